"""Support for tests of segments: small blocks, the state of a segment list as a dict, and a writer that
commits as a shard does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from param_server.embedding_table import Keys
from param_server.key_value_store import MemoryKeyValueStore
from param_server.row_block import RowBlock
from param_server.segment_parts import Segment
from param_server.segments import Commit, Segments
from roostream.schema.ids import buckets_of

STACK = "d2-adagrad"


def make_segments(blobs: MemoryKeyValueStore | None = None) -> Segments:
    return Segments(blobs or MemoryKeyValueStore(), {STACK: (2, 2)}, 8)


def changes(
    rows: dict[int, float], deleted: Sequence[int] = (), unpublished: bool = False
) -> dict[str, RowBlock]:
    ids = np.array([*rows, *deleted], np.int64)
    values = np.array(list(rows.values()), np.float32).reshape(-1, 1)
    block = RowBlock(
        keys=Keys(np.full(len(ids), 5, np.uint32), ids),
        unpublished_K=np.full(len(ids), unpublished, np.uint8),
        stamp_ms_L=np.zeros(len(rows), np.int64),
        rows_LD=np.repeat(values, 2, axis=1),
        state_LA=np.repeat(values, 2, axis=1) + 1,
    )
    return {STACK: block}


def state(segments: Segments, live: tuple[Segment, ...]) -> dict[int, float]:
    """The rows that a reader of `live` finds: id → first number of the row."""
    out: dict[int, float] = {}
    for part in segments.read(live):
        for block in reversed(part.blocks):
            out.update(zip(block.live.id_U.tolist(), block.rows_LD[:, 0].tolist(), strict=True))
            for id_ in block.gone.id_U.tolist():
                out.pop(id_, None)
    return out


class Writer:
    """Commits as a shard does. It keeps all rows in memory and takes the rows of buckets to rewrite from
    there."""

    def __init__(self, store: MemoryKeyValueStore | None = None) -> None:
        self.segments, self.rows, self.live = make_segments(store), dict[int, float](), tuple[Segment, ...]()
        self.seq = 0

    def commit(
        self, rows: dict[int, float], deleted: Sequence[int] = (), *, linked: bool = True
    ) -> tuple[Segment, ...]:
        self.seq += 1
        self.rows |= rows
        for id_ in deleted:
            self.rows.pop(id_, None)
        share = (len(rows) + len(deleted)) / max(len(self.rows), 1)
        buckets_to_rewrite = self.segments.buckets_to_rewrite(self.live, share)
        all_rows = {i: v for i, v in self.rows.items() if i in rows or bucket_of(i) in buckets_to_rewrite}
        live = self.segments.write(
            f"{self.seq}-1", changes(all_rows, deleted), self.live, complete=buckets_to_rewrite
        )
        if linked:
            self.live = live
            self.segments.commit(Commit(self.seq, 1, live))
        return live


def bucket_of(id_: int) -> int:
    return int(buckets_of(np.array([id_], np.int64), np.array([5], np.uint32), 8)[0])
