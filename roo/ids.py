"""64-bit ids and hashes; one definition for Python, and golden vectors in tests for everyone else.

Ids are uint64 on the wire and int64 views in arrays. `hash64` is xxh3-64 with seed 0.
"""

from __future__ import annotations

import numpy as np
import xxhash

MASK64 = (1 << 64) - 1


def hash64(data: bytes | str) -> int:
    """xxh3-64 of `data` (a string's UTF-8), as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(data.encode() if isinstance(data, str) else data)


def item_id(value: int | str) -> int:
    """An id from outside as uint64: integers pass through (negative ones as their two's complement), strings are hashed."""
    return hash64(value) if isinstance(value, str) else value & MASK64


def signed(value: int) -> int:
    """uint64 → the int64 with the same bits, as arrays hold it."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """int64 → the uint64 with the same bits, as messages hold it."""
    return value & MASK64


def table_id(name: str) -> int:
    """Low 32 bits of `hash64(name)`: what rows and deltas name a table by."""
    return hash64(name) & 0xFFFFFFFF


NO_KEY = bytes(8)
"""Key of what belongs to no request: a dead letter of a record whose own key can't be one."""


def key_bytes(user_id: int, session_id: int, request_id: str) -> bytes:
    """Kafka key of a request's events, 8 bytes little-endian: the user; without one (0) `hash64('s' ‖ session as 8 bytes
    little-endian)`; with neither, `hash64('r' ‖ request id)`, since strangers have nothing in common."""
    if user_id:
        key = user_id
    elif session_id:
        key = hash64(b"s" + (session_id & MASK64).to_bytes(8, "little"))
    else:
        key = hash64(b"r" + request_id.encode())
    return (key & MASK64).to_bytes(8, "little")


def sample_id(key: bytes, request_id: str, event_id: int | None = None) -> int:
    """`hash64(key ‖ request_id)`; a correction's adds 0xFF, which no UTF-8 holds, and its event id (8 bytes little-endian)."""
    tail = b"" if event_id is None else b"\xff" + (event_id & MASK64).to_bytes(8, "little")
    return hash64(key + request_id.encode() + tail)


def splitmix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), on unsigned integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def bucket_of(id_: int, table: int, num_buckets: int) -> int:
    """`splitmix64(id ^ table id) mod num_buckets`; `buckets_of` is the same over arrays."""
    return splitmix64((id_ & MASK64) ^ table) % num_buckets


def buckets_of(ids_N: np.ndarray, tables_N: np.ndarray | int, num_buckets: int) -> np.ndarray:
    """int64 [N], (uint32 [N] or one table) → int32 [N]."""
    x = ids_N.view(np.uint64) ^ np.asarray(tables_N, dtype=np.uint64)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x % np.uint64(num_buckets)).astype(np.int32)
