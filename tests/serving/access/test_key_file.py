"""Who is let in, and what becomes of a file that changes."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from roostream.errors import ConfigError
from serving.access.bearer_keys import ANY, FileWatcher, Keyring, new_key, read_keys, write_keys
from serving.errors import RequestError

NOW_S = 5000


def ring(file: Path, *scopes: str, expires_s: int = 0) -> tuple[Keyring, bytes]:
    text, key = new_key("web", scopes or ("rank",), 0, expires_s)
    write_keys(file, [key])
    return Keyring(file, lambda: NOW_S), b"Bearer " + text.encode()


def status_of(keys: Keyring, header: bytes, scope: str = "rank") -> int:
    try:
        keys.check(header, scope)
    except RequestError as error:
        assert header[7:].decode("latin-1") not in str(error) or len(header) < 8
        return error.status
    return 200


def test_a_key_is_authorized_for_its_scopes_only(tmp_path: Path) -> None:
    keys, header = ring(tmp_path / "keys.json", "rank", "metrics")
    assert [status_of(keys, header, scope) for scope in ("rank", "metrics", ANY, "engage", "admin")] == [
        200,
        200,
        200,
        403,
        403,
    ]
    assert status_of(keys, b"bearer " + header[7:]) == 200 and keys.check(header, ANY).name == "web"
    assert keys.fits(header.decode()) is False
    admin, header = ring(tmp_path / "admin.json", "admin")
    assert admin.fits(header.decode()) and not admin.fits("Bearer é")


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"Basic eDp5", b"Bearer roo_x", b"\xff" * 30])
def test_a_call_without_a_key_is_401(tmp_path: Path, header: bytes) -> None:
    assert status_of(ring(tmp_path / "keys.json")[0], header) == 401


def test_a_wrong_secret_for_a_known_id_is_refused(tmp_path: Path) -> None:
    keys, header = ring(tmp_path / "keys.json")
    last = header[-1:]
    assert status_of(keys, header[:-1] + (b"A" if last != b"A" else b"B")) == 401
    assert status_of(keys, ring(tmp_path / "other.json")[1]) == 401


def test_a_key_ends_when_it_expires(tmp_path: Path) -> None:
    keys, header = ring(tmp_path / "keys.json", expires_s=NOW_S + 1)
    assert status_of(keys, header) == 200
    keys.now_s = lambda: NOW_S + 1
    assert status_of(keys, header) == 401


def test_a_changed_key_file_is_loaded_and_a_bad_one_keeps_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    keys, first = ring(file)
    text, key = new_key("other", ["rank"], 0)
    write_keys(file, [*read_keys(file), key])
    keys.poll()
    second = b"Bearer " + text.encode()
    assert status_of(keys, first) == status_of(keys, second) == 200
    with caplog.at_level(logging.ERROR):
        for bad in (b"{", b""):
            file.write_bytes(bad)
            keys.poll()
            keys.poll()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2 and "the previous keys stay in force" in caplog.text and keys.refused
    file.unlink()
    keys.poll()
    assert status_of(keys, first) == status_of(keys, second) == 200 and "keys.json" in keys.refused
    write_keys(file, [key])
    keys.poll()
    assert status_of(keys, first) == 401 and status_of(keys, second) == 200 and not keys.refused


def test_a_key_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    keys, _ = ring(file, "rank")
    text, key = new_key("second", ["rank"], 0)
    write_keys(file, [key])

    def unreadable(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(Path, "read_bytes", unreadable)
        keys.poll()
        keys.poll()
    assert keys.refused and caplog.text.count("the previous keys stay in force") == 1
    keys.poll()
    assert not keys.refused and status_of(keys, b"Bearer " + text.encode()) == 200


def test_a_process_does_not_start_without_its_key_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make one with `roostream keys new`"):
        Keyring(tmp_path / "none.json")


def test_the_key_file_is_private_and_replaced_atomically(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    ring(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == [
        "keys.json"
    ]
    with pytest.raises(ConfigError, match="written"):
        write_keys(tmp_path / "none" / "keys.json", [])


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
