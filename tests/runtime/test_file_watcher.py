"""A watched file counts as changed after any kind of replacement."""

from __future__ import annotations

from pathlib import Path

from roostream.runtime.file_watcher import FileWatcher


def test_a_file_moved_into_place_counts_as_changed(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"1")
    watch = FileWatcher(file)
    assert not watch.changed()
    other.write_bytes(b"2")
    other.replace(file)
    assert watch.changed() and not watch.changed()
    file.unlink()
    assert watch.changed() and not watch.changed()
