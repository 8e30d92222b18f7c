"""Row blocks as bytes: they round-trip, and a damaged block is never decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from param_server import row_block as blocks
from param_server.embedding_table import Keys
from param_server.row_block import RowBlock
from roostream.errors import CheckpointError

KEY = b"b/1-1/d2-adagrad/00003"


def make_block(
    live: list[int], gone: Sequence[int] = (), unpublished: bool = False, value: float = 1.0
) -> RowBlock:
    ids = [*live, *gone]
    return RowBlock(
        keys=Keys(np.full(len(ids), 9, np.uint32), np.array(ids, np.int64)),
        unpublished_K=np.full(len(ids), unpublished, np.uint8),
        stamp_ms_L=np.arange(len(live), dtype=np.int64),
        rows_LD=np.full((len(live), 2), value, np.float32) + np.array(live, np.float32)[:, None],
        state_LA=np.full((len(live), 1), 0.5, np.float32),
    )


def equal_blocks(a: RowBlock, b: RowBlock) -> bool:
    pairs = [(a.keys.table_U, b.keys.table_U), (a.keys.id_U, b.keys.id_U), (a.unpublished_K, b.unpublished_K)]
    pairs += [(a.stamp_ms_L, b.stamp_ms_L), (a.rows_LD, b.rows_LD), (a.state_LA, b.state_LA)]
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)


@given(live=IDS, gone=IDS, unpublished=st.booleans())
def test_blocks_round_trip(live: list[int], gone: list[int], unpublished: bool) -> None:
    block = make_block(live, gone, unpublished)
    assert equal_blocks(blocks.decode(blocks.encode(block, KEY), KEY, 2, 1), block)


def test_every_damaged_byte_is_detected() -> None:
    data = blocks.encode(make_block([1, 2], [3]), KEY)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CheckpointError, match="damaged"):
            blocks.decode(bytes(damaged), KEY, 2, 1)


def test_a_block_stored_under_another_key_is_detected() -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        blocks.decode(blocks.encode(make_block([1]), KEY), b"b/1-1/d2-adagrad/00004", 2, 1)


def test_a_block_of_another_width_is_refused() -> None:
    with pytest.raises(CheckpointError):
        blocks.decode(blocks.encode(make_block([1]), KEY), KEY, 3, 3)


def forge_with_valid_checksum(data: bytes, at: int, value: bytes) -> bytes:
    body = data[:at] + value + data[at + len(value) : -8]
    return body + blocks.checksum(body, KEY).to_bytes(8, "little")


def test_a_block_of_another_version_is_refused() -> None:
    with pytest.raises(CheckpointError):
        blocks.decode(forge_with_valid_checksum(blocks.encode(make_block([1]), KEY), 4, b"\x09"), KEY, 2, 1)


def test_inconsistent_counts_are_refused_before_memory_is_allocated() -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        blocks.decode(
            forge_with_valid_checksum(blocks.encode(make_block([1]), KEY), 12, b"\xff\xff\xff\x7f"), KEY, 2, 1
        )


def test_splitting_by_bucket_keeps_every_key_once_and_live_keys_first() -> None:
    block = make_block([10, 11, 12, 13], [20, 21])
    parts = blocks.split_by_bucket(block, np.array([2, 0, 2, 0, 0, 5]))
    assert sorted(parts) == [0, 2, 5]
    assert parts[0].keys.id_U.tolist() == [11, 13, 20] and parts[0].num_live == 2
    assert parts[2].keys.id_U.tolist() == [10, 12] and parts[2].stamp_ms_L.tolist() == [0, 2]
    assert parts[5].gone.id_U.tolist() == [21] and parts[5].num_live == 0
    assert blocks.split_by_bucket(make_block([]), np.zeros(0, np.int32)) == {}


@pytest.mark.parametrize("num_rows", [0, 1, 7, 1000])
def test_the_number_of_rows_follows_from_the_size(num_rows: int) -> None:
    size = len(blocks.encode(make_block(list(range(num_rows))), KEY))
    assert num_rows <= blocks.rows_in(size, 2, 1) <= num_rows + 1
