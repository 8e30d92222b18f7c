"""The checkpoint store in a directory: objects are complete or absent, names are exclusive, writes are
durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.checkpoint_store import UNFINISHED_S, FileStore, open_store
from tests.runtime.full_disk import limited_file_size


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.mark.parametrize("url", ["{path}", "file://{path}"])
def test_a_store_is_opened_by_its_path_or_url(tmp_path: Path, url: str) -> None:
    open_store(url.format(path=tmp_path / "store")).put("dense/1", b"x")
    assert (tmp_path / "store" / "dense" / "1").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "gs://bucket/store",
            "expected a store that is a path or begins with file://, s3://, got 'gs://bucket/store'",
        ),
        ("fiel:///a", "did you mean 'file'"),
        ("file://a/b", "expected a store like file:///a/directory, got 'file://a/b'; add the third slash"),
    ],
)
def test_a_store_of_an_unknown_kind_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert message in str(caught.value)


def files(store: FileStore) -> list[str]:
    return sorted(str(p.relative_to(store.root)) for p in store.root.rglob("*") if p.is_file())


def test_a_write_that_fails_leaves_the_old_object_and_no_half_one(store: FileStore) -> None:
    store.put("dense/1", b"old")
    too_large = bytes(1 << 20)
    with limited_file_size(1 << 16):
        for write in (store.put, store.create):
            with pytest.raises(UnavailableError, match="File too large"):
                write("dense/1", too_large)
        with pytest.raises(UnavailableError, match="File too large"):
            store.create("manifests/00000001", too_large)
    assert store.get("dense/1") == b"old" and files(store) == ["dense/1"]


class RecordingDisk:
    """Records each fsync, and what a reader finds at that moment under the name being written."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.synced: list[tuple[str, bytes | None]] = []

    def fsync(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        kind = (
            f"directory {path.relative_to(self.root)}"
            if path.is_dir()
            else f"file with {path.read_bytes()!r}"
        )
        target = self.root / self.name
        self.synced.append((kind, target.read_bytes() if target.exists() else None))
        os.fsync(handle)


@pytest.mark.parametrize("method", ["create", "put"])
def test_files_are_synced_before_and_directories_after_renaming(tmp_path: Path, method: str) -> None:
    (tmp_path / "dense").mkdir()
    disk = RecordingDisk(tmp_path, "dense/1")
    getattr(FileStore(tmp_path, fsync=disk.fsync), method)("dense/1", b"new")
    assert disk.synced == [("file with b'new'", None), ("directory dense", b"new")]


def test_the_parent_of_a_new_directory_is_synced(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path, "store/dense/1")
    FileStore(tmp_path / "store", fsync=disk.fsync).put("dense/1", b"new")
    assert [kind for kind, _ in disk.synced] == [
        "directory .",
        "directory store",
        "file with b'new'",
        "directory store/dense",
    ]


def test_a_failed_sync_is_reported_and_leaves_no_partial_file(tmp_path: Path) -> None:
    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "dense").mkdir()
    with pytest.raises(UnavailableError, match="No space left on device"):
        FileStore(tmp_path, fsync=refuse).put("dense/1", b"new")
    assert files(FileStore(tmp_path)) == []


def leave_unfinished(folder: Path) -> Path:
    """Leave a temporary file behind, as a killed writer does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".roostream-unfinished.k2j1"
    path.write_bytes(bytes(1000))
    os.utime(path, (0, 0))
    return path


def test_only_leftovers_of_killed_writers_are_deleted(tmp_path: Path) -> None:
    now_s = UNFINISHED_S
    store = FileStore(tmp_path, now_s=lambda: now_s)
    store.put("dense/1", b"x")
    for folder in (tmp_path, tmp_path / "dense", tmp_path / "manifests"):
        leave_unfinished(folder)
    now_s -= 1
    store.sweep()
    assert len(files(store)) == 4, "unfinished files may still be written"
    now_s += 1
    store.sweep()
    assert files(store) == ["dense/1"]
    FileStore(tmp_path / "nothing").sweep()


def test_a_sweep_leaves_another_store_below_the_directory_alone(tmp_path: Path) -> None:
    (tmp_path / "warehouse").mkdir()
    foreign = leave_unfinished(tmp_path / "warehouse" / "schemas")
    FileStore(tmp_path).sweep()
    assert foreign.exists()


def test_an_unreadable_store_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("a file where a directory was")
    for call in (
        lambda: FileStore(tmp_path).get("manifests/1"),
        lambda: FileStore(tmp_path).put("manifests/1", b""),
    ):
        with pytest.raises(UnavailableError, match="can't be"):
            call()


def test_a_sweep_deletes_only_unfinished_files_of_stores(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("dense/1", b"finished")
    foreign = [tmp_path / ".bashrc", tmp_path / "dense" / ".gitignore", tmp_path / "project" / ".env"]
    foreign[2].parent.mkdir()
    for path in foreign:
        path.write_text("of the user")
        os.utime(path, (0, 0))
    store.sweep()
    assert store.get("dense/1") == b"finished" and all(path.exists() for path in foreign)
