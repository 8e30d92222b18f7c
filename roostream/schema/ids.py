"""64-bit ids, and the hashes that are made of them. No other Python code defines these; golden vectors are in
the tests.

Ids are uint64 on the wire and int64 views in arrays. `hash64` is xxh3-64 with seed 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xxhash

MASK64 = (1 << 64) - 1
LOWEST_ID = -(1 << 63)


def hash64(data: bytes | str) -> int:
    """xxh3-64 of `data` (a string's UTF-8), as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(data.encode() if isinstance(data, str) else data)


def item_id(value: int | str) -> int:
    """An external id as uint64: an integer stays (a negative one as two's complement), a string is hashed.

    HTTP, logs and feature values all check ids with it.

    Raises:
        ValueError: an empty string, or an integer that does not fit 64 bits.
    """
    if isinstance(value, str):
        if not value:
            raise ValueError("expected an id, got an empty string; leave out an unknown id")
        return hash64(value)
    if not LOWEST_ID <= value <= MASK64:
        shown = value if abs(value) < 10**24 else f"one of {value.bit_length()} bits"
        raise ValueError(f"expected a 64-bit integer or a string, got {shown}")
    return value & MASK64


def other_id_form(item: int, shown: Iterable[int]) -> str:
    """A hint for the message about an id that is not among `shown`. A log may write one id both as the
    integer 5 and as the text "5" or "5.0", which are different ids. "" if the other form of `item` was not
    shown either. All ids are uint64."""
    known = set(shown)
    for number, text in _texts(item):
        if hash64(text) in known:
            return f'; it did show the text "{text}", and this is the integer {number}: use one form'
    for other in known:
        for number, text in _texts(other):
            if hash64(text) == item:
                return f'; it did show the integer {number}, and this is the text "{text}": use one form'
    return ""


def _texts(item: int) -> Iterator[tuple[int, str]]:
    """The integers that an id may be, each with texts that a table may have for it. More texts would cost the
    joiner a hash each for every shown item."""
    for number in {item, signed(item)}:
        yield number, str(number)
        yield number, f"{number}.0"


def signed(value: int) -> int:
    """uint64 → the int64 with the same bits, used in arrays."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def as_int64(item_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """uint64 or int64 ids, or any Python integers, as int64 [n]."""
    if isinstance(item_ids, np.ndarray):
        return item_ids.astype(np.int64, copy=False)
    return np.array([signed(i) for i in item_ids], dtype=np.int64)


def unsigned(value: int) -> int:
    """int64 → the uint64 with the same bits, used in messages."""
    return value & MASK64


def table_id(name: str) -> int:
    """Low 32 bits of `hash64(name)`, which name a table in rows and deltas."""
    return hash64(name) & 0xFFFFFFFF


NO_KEY = bytes(8)
"""Key of a dead letter whose record has no valid key."""


def key_bytes(user_id: int, session_id: int, request_id: str) -> bytes:
    """Kafka key of a request's events, 8 bytes little-endian: the user; without a user (0), `hash64('s' ‖
    session as 8 bytes little-endian)`; with neither, `hash64('r' ‖ request id)`."""
    if user_id:
        key = user_id
    elif session_id:
        key = hash64(b"s" + (session_id & MASK64).to_bytes(8, "little"))
    else:
        key = hash64(b"r" + request_id.encode())
    return (key & MASK64).to_bytes(8, "little")


def sample_id(key: bytes, request_id: str, event_id: int | None = None) -> int:
    """`hash64(key ‖ request_id)`; for a correction followed by 0xFF (not in UTF-8) and its event id, 8 bytes
    little-endian."""
    tail = b"" if event_id is None else b"\xff" + (event_id & MASK64).to_bytes(8, "little")
    return hash64(key + request_id.encode() + tail)


def splitmix64(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), on unsigned integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def bucket_of(id_: int, table: int, num_buckets: int) -> int:
    """`splitmix64(id ^ table id) mod num_buckets`; `buckets_of` is the same for arrays."""
    return splitmix64((id_ & MASK64) ^ table) % num_buckets


def buckets_of(ids_N: np.ndarray, tables_N: np.ndarray | int, num_buckets: int) -> np.ndarray:
    """`bucket_of` of each id, int32 [N]. `ids_N`: int64; `tables_N`: uint32 [N], or one table id for all."""
    x = splitmix64_of(ids_N.view(np.uint64) ^ np.asarray(tables_N, dtype=np.uint64))
    return (x % np.uint64(num_buckets)).astype(np.int32)


def splitmix64_of(x_N: np.ndarray) -> np.ndarray:
    """Return the hash `splitmix64` of each element, uint64 [N]. `x_N`: uint64 [N]."""
    x_N = x_N + np.uint64(0x9E3779B97F4A7C15)
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))
