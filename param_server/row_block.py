"""Rows of one stack with all their state: what a freeze copies, a segment stores and a restore inserts.

Letters: K keys, the first L of them live, the others deleted; D width, A state width.

    bytes = magic RSEG · version u16 · state width u16 · width u32 · L u32 · K u32 · 4 zero bytes
          · table u4[K] · id i8[K] · unpublished u1[K] · stamp_ms i8[L] · rows f4[L, D] · state f4[L, A],
          padded to 8 each · xxh3-64 of the block's key and of everything before
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from param_server.embedding_table import KeyIndex, Keys, join_keys
from roostream.errors import CheckpointError, OtherVersionError

MAX_BLOCK_BYTES = 64 << 20
"""A bucket with more bytes is stored in several blocks: it may exceed what the store can hold under one key,
and each block is in memory a few times while it is encoded."""

VERSION = 1
_HEAD = struct.Struct("<4sHHIII4x")
_MAGIC = b"RSEG"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowBlock:
    """Rows of one stack with their keys and states; of the K keys, the first L are live and have a row."""

    keys: Keys  # K
    unpublished_K: np.ndarray  # uint8: 1 = replicas do not have this state yet
    stamp_ms_L: np.ndarray  # int64: event time of the last push
    rows_LD: np.ndarray  # float32
    state_LA: np.ndarray  # float32

    @property
    def num_live(self) -> int:
        return len(self.stamp_ms_L)

    @property
    def live(self) -> Keys:
        return Keys(self.keys.table_U[: self.num_live], self.keys.id_U[: self.num_live])

    @property
    def gone(self) -> Keys:
        return Keys(self.keys.table_U[self.num_live :], self.keys.id_U[self.num_live :])

    def take(self, chosen: np.ndarray) -> RowBlock:
        """The keys where bool [K] is True, or at int64 positions, live ones first."""
        order_M = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        live_L = order_M[order_M < self.num_live]
        return RowBlock(
            keys=self.keys.take(order_M),
            unpublished_K=self.unpublished_K[order_M],
            stamp_ms_L=self.stamp_ms_L[live_L],
            rows_LD=self.rows_LD[live_L],
            state_LA=self.state_LA[live_L],
        )


def with_gone(block: RowBlock, gone: Keys, unpublished_G: np.ndarray) -> RowBlock:
    """`block` without deleted keys, and these deleted keys."""
    return dataclasses.replace(
        block,
        keys=join_keys(block.keys, gone),
        unpublished_K=np.concatenate([block.unpublished_K, unpublished_G.astype(np.uint8)]),
    )


def split_by_bucket(block: RowBlock, bucket_K: np.ndarray) -> dict[int, RowBlock]:
    """Bucket → its part; empty buckets are absent."""
    live_K = np.arange(len(block.keys)) < block.num_live
    order_K = np.lexsort((~live_K, bucket_K))  # by bucket, live keys first, else stable
    sorted_K = bucket_K[order_K]
    edges = [*np.flatnonzero(np.diff(sorted_K, prepend=-1)).tolist(), len(order_K)]
    return {int(sorted_K[start]): block.take(order_K[start:end]) for start, end in itertools.pairwise(edges)}


def newest_of(newest_first: Sequence[RowBlock], num_buckets: int) -> RowBlock:
    """Merge a bucket's blocks: each key as the newest block has it, without deleted keys that replicas know
    of."""
    seen, live, gone = KeyIndex(num_buckets), [], []
    for block in newest_first:
        new_K, live_K = seen.add_new(block.keys), np.arange(len(block.keys)) < block.num_live
        live.append(block.take(new_K & live_K))
        gone.append(block.take(new_K & ~live_K & (block.unpublished_K != 0)))
    parts = [*live, *gone]
    return RowBlock(
        keys=join_keys(*(part.keys for part in parts)),
        unpublished_K=np.concatenate([part.unpublished_K for part in parts]),
        stamp_ms_L=np.concatenate([part.stamp_ms_L for part in parts]),
        rows_LD=np.concatenate([part.rows_LD for part in parts]),
        state_LA=np.concatenate([part.state_LA for part in parts]),
    )


def published(block: RowBlock) -> RowBlock:
    """The same block without unpublished marks."""
    return dataclasses.replace(block, unpublished_K=np.zeros_like(block.unpublished_K))


def checksum(data: bytes | memoryview, key: bytes = b"") -> int:
    """xxh3-64 of `key ‖ data`."""
    hasher = xxhash.xxh3_64(key)
    hasher.update(data)
    return hasher.intdigest()


def rows_in(num_bytes: int, width: int, state_width: int) -> int:
    """About how many rows a block of that size holds: exact but for padding and deleted keys."""
    return max(num_bytes - _HEAD.size - 8, 0) // (4 + 8 + 1 + 8 + 4 * (width + state_width))


def encode(block: RowBlock, key: bytes) -> bytes:
    """The bytes of `block` as stored under `key`. The checksum covers the key, so blocks cannot be
    swapped."""
    (num_live, width), state_width = block.rows_LD.shape, block.state_LA.shape[1]
    parts = [_HEAD.pack(_MAGIC, VERSION, state_width, width, num_live, len(block.keys))]
    for array in _arrays(block):
        data = np.ascontiguousarray(array).tobytes()
        parts += [data, bytes(-len(data) % 8)]
    body = b"".join(parts)
    return body + checksum(body, key).to_bytes(8, "little")


def decode(data: bytes, key: bytes, width: int, state_width: int) -> RowBlock:
    """Verified inverse of `encode`; copies `data`.

    Raises:
        CheckpointError: damaged, or of another key, version or width.
    """
    what = f"segment part {key.decode(errors='replace')}"
    if len(data) < _HEAD.size + 8 or checksum(memoryview(data)[:-8], key) != int.from_bytes(
        data[-8:], "little"
    ):
        raise CheckpointError(f"{what}: checksum mismatch: it is damaged")
    magic, version, a, d, num_live, num_keys = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, VERSION):
        raise OtherVersionError(
            f"{what}: expected version {VERSION}, got {version}; use the version of Roostream that wrote it"
        )
    if (d, a) != (width, state_width):
        raise CheckpointError(
            f"{what}: expected rows of {width} + {state_width} numbers (schema), got {d} + {a}; "
            "use the schema it was written with"
        )
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("<u4", (num_keys,)),
        ("<i8", (num_keys,)),
        ("|u1", (num_keys,)),
        ("<i8", (num_live,)),
    ]
    shapes += [("<f4", (num_live, d)), ("<f4", (num_live, a))]
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in shapes]
    if num_live > num_keys or _HEAD.size + sum(-(-n // 8) * 8 for n in sizes) + 8 != len(data):
        raise CheckpointError(
            f"{what}: expected sizes that sum up to its {len(data)} bytes, got others: it is damaged"
        )
    arrays, at = [], _HEAD.size
    body = np.frombuffer(data, np.uint8).copy()  # writable: kernels are compiled for that
    for (dtype, shape), n in zip(shapes, sizes, strict=True):
        arrays.append(body[at : at + n].view(dtype).reshape(shape))
        at += -(-n // 8) * 8
    table_K, id_K, unpublished_K, stamp_ms_L, rows_LD, state_LA = arrays
    return RowBlock(
        keys=Keys(table_K, id_K),
        unpublished_K=unpublished_K,
        stamp_ms_L=stamp_ms_L,
        rows_LD=rows_LD,
        state_LA=state_LA,
    )


def _arrays(block: RowBlock) -> tuple[np.ndarray, ...]:
    return (
        block.keys.table_U,
        block.keys.id_U,
        block.unpublished_K,
        block.stamp_ms_L,
        block.rows_LD,
        block.state_LA,
    )
