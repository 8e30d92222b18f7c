"""Bearer keys, the key file, and how serving reloads a changed key file."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError
from serving.access.bearer_keys import (
    ANY,
    BearerKey,
    Keyring,
    decode_key_file,
    encode_key_file,
    new_key,
    parse_key,
    read_keys,
    write_keys,
)
from serving.errors import RequestError

NOW_S = 5000


def make_key(name: str = "web", *scopes: str) -> tuple[bytes, BearerKey]:
    text, key = new_key(name, scopes or ("rank",), 1000)
    return text.encode(), key


def test_a_key_matches_only_its_own_entry() -> None:
    (first, one), (second, two) = make_key(), make_key()
    for text, own, other in ((first, one, two), (second, two, one)):
        parsed = parse_key(text)
        assert parsed is not None and parsed[0] == own.id
        assert own.fits(parsed[1]) and not other.fits(parsed[1]) and not own.fits(parsed[1][:-1])


def test_the_key_file_contains_no_secret() -> None:
    text, key = make_key()
    secret = text.decode().rpartition("_")[2]
    assert secret.encode() not in encode_key_file([key]) and secret not in repr(key)
    assert len({make_key()[1].salt for _ in range(5)}) == 5


def test_a_written_key_file_is_read_back() -> None:
    keys = tuple(
        new_key(name, scopes, 5, expires)[1]
        for name, scopes, expires in (("a", ["rank"], 0), ("b", ["engage", "admin"], 9))
    )
    assert decode_key_file(encode_key_file(keys)) == keys and decode_key_file(encode_key_file(())) == ()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"roo_",
        b"roo_abc_def",
        b"x" * 80,
        make_key()[0][:-1],
        make_key()[0] + b"A",
        make_key()[0].upper(),
    ],
    ids=["empty", "prefix", "short", "other", "cut", "longer", "upper"],
)
def test_malformed_keys_are_rejected(text: bytes) -> None:
    assert parse_key(text) is None


@pytest.mark.parametrize(
    ("name", "scopes", "text"),
    [
        ("Web", ["rank"], "expected"),
        ("", ["rank"], "expected"),
        ("web", [], "expected"),
        ("web", ["metric"], "did you mean 'metrics'"),
    ],
)
def test_invalid_names_and_scopes_are_refused(name: str, scopes: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        new_key(name, scopes, 0)


def key_file_with(**fields: Any) -> bytes:
    content = json.loads(encode_key_file([make_key()[1]]))
    content["keys"][0].update(fields)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"format": 2, "keys": []}',
        b'{"format": 1}',
        b'{"format": 1, "keys": [3]}',
        b'{"format": 1, "keys": [{}]}',
        b"[" * 100_000,
        key_file_with(salt="zz"),
        key_file_with(salt="00"),
        key_file_with(sha256="00"),
        key_file_with(scopes=["root"]),
        key_file_with(scopes=3),
        key_file_with(id="x"),
        key_file_with(name="A B"),
        key_file_with(expires_s="tomorrow"),
        json.dumps({"format": 1, "keys": json.loads(key_file_with())["keys"] * 2}).encode(),
    ],
)
def test_an_invalid_key_file_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(ConfigError, match="expected"):
        decode_key_file(data)


def make_keyring(file: Path, *scopes: str, expires_s: int = 0) -> tuple[Keyring, bytes]:
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
    keys, header = make_keyring(tmp_path / "keys.json", "rank", "metrics")
    allowed = {scope: status_of(keys, header, scope) for scope in ("rank", "metrics", ANY, "engage", "admin")}
    assert allowed == {"rank": 200, "metrics": 200, ANY: 200, "engage": 403, "admin": 403}
    for same in (b"bearer " + header[7:], b"BEARER  " + header[7:], b" " + header + b" \t"):
        assert status_of(keys, same) == 200
    assert keys.check(header, ANY).name == "web"
    admin, header = make_keyring(tmp_path / "admin.json", "admin")
    assert status_of(admin, header, "admin") == 200 and status_of(admin, "Bearer é".encode(), "admin") == 401


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"Basic eDp5", b"Bearer roo_x", b"\xff" * 30])
def test_a_call_without_a_key_is_401(tmp_path: Path, header: bytes) -> None:
    assert status_of(make_keyring(tmp_path / "keys.json")[0], header) == 401


def test_a_refusal_says_what_is_wrong_with_the_header(tmp_path: Path) -> None:
    keys, header = make_keyring(tmp_path / "keys.json")
    for wrong, got in (
        (b"", "no such header"),
        (b"Basic eDp5", "another scheme"),
        (header[7:], "another scheme"),
        (header[:-1], "a malformed key"),
        (b'Bearer "' + header[7:] + b'"', "a malformed key"),
    ):
        with pytest.raises(RequestError, match=got) as caught:
            keys.check(wrong, "rank")
        assert header[7:].decode() not in str(caught.value)


def test_a_wrong_secret_for_a_known_id_is_refused(tmp_path: Path) -> None:
    keys, header = make_keyring(tmp_path / "keys.json")
    last = header[-1:]
    assert status_of(keys, header[:-1] + (b"A" if last != b"A" else b"B")) == 401
    assert status_of(keys, make_keyring(tmp_path / "other.json")[1]) == 401


def test_a_key_ends_when_it_expires(tmp_path: Path) -> None:
    keys, header = make_keyring(tmp_path / "keys.json", expires_s=NOW_S + 1)
    assert status_of(keys, header) == 200
    keys.now_s = lambda: NOW_S + 1
    assert status_of(keys, header) == 401


def test_a_changed_key_file_is_loaded_and_a_bad_one_keeps_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    keys, first = make_keyring(file)
    text, key = new_key("other", ["rank"], 0)
    write_keys(file, [*read_keys(file), key])
    keys.poll()
    second = b"Bearer " + text.encode()
    assert status_of(keys, first) == status_of(keys, second) == 200
    with caplog.at_level(logging.ERROR):
        for bad in (b"{", b"[]"):
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
    keys, _ = make_keyring(file, "rank")
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
    make_keyring(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == [
        "keys.json"
    ]
    with pytest.raises(ConfigError, match="written"):
        write_keys(tmp_path / "none" / "keys.json", [])
