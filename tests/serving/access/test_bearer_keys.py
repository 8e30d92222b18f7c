"""Keys and their file, without a clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roostream.errors import ConfigError
from serving.access.bearer_keys import BearerKey, decode_key_file, encode_key_file, new_key, parse_key


def made(name: str = "web", *scopes: str) -> tuple[bytes, BearerKey]:
    text, key = new_key(name, scopes or ("rank",), 1000)
    return text.encode(), key


def test_a_key_matches_only_its_own_entry() -> None:
    (first, one), (second, two) = made(), made()
    for text, own, other in ((first, one, two), (second, two, one)):
        told = parse_key(text)
        assert told is not None and told[0] == own.id
        assert own.fits(told[1]) and not other.fits(told[1]) and not own.fits(told[1][:-1])


def test_the_key_file_contains_no_secret() -> None:
    text, key = made()
    secret = text.decode().rpartition("_")[2]
    assert secret.encode() not in encode_key_file([key]) and secret not in repr(key)
    assert len({made()[1].salt for _ in range(5)}) == 5


def test_a_written_key_file_is_read_back() -> None:
    keys = tuple(
        new_key(name, scopes, 5, expires)[1]
        for name, scopes, expires in (("a", ["rank"], 0), ("b", ["engage", "admin"], 9))
    )
    assert decode_key_file(encode_key_file(keys)) == keys and decode_key_file(encode_key_file(())) == ()


@pytest.mark.parametrize(
    "text",
    [b"", b"roo_", b"roo_abc_def", b"x" * 80, made()[0][:-1], made()[0] + b"A", made()[0].upper()],
    ids=["empty", "prefix", "short", "other", "cut", "longer", "upper"],
)
def test_malformed_keys_are_rejected(text: bytes) -> None:
    assert parse_key(text) is None


@pytest.mark.parametrize(
    ("name", "scopes"), [("Web", ["rank"]), ("", ["rank"]), ("web", []), ("web", ["rnk"])]
)
def test_invalid_names_and_scopes_are_refused(name: str, scopes: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        new_key(name, scopes, 0)


def test_a_misspelled_scope_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'metrics'"):
        new_key("web", ["metric"], 0)


def changed(**fields: Any) -> bytes:
    told = json.loads(encode_key_file([made()[1]]))
    told["keys"][0].update(fields)
    return json.dumps(told).encode()


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
        changed(salt="zz"),
        changed(salt="00"),
        changed(sha256="00"),
        changed(scopes=["root"]),
        changed(scopes=3),
        changed(id="x"),
        changed(name="A B"),
        changed(expires_s="tomorrow"),
        json.dumps({"format": 1, "keys": json.loads(changed())["keys"] * 2}).encode(),
    ],
)
def test_an_invalid_key_file_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(ConfigError, match="expected"):
        decode_key_file(data)
