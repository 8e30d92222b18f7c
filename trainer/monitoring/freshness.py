"""Freshness of training: from the oldest engagement of a chunk to its training.

Letters: R requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainer.chunks import Chunk

_SANE_MS = 3_600_000


def chunk_freshness(chunk: Chunk, new_R: np.ndarray, now_ms: int) -> Iterator[tuple[str, float]]:
    """(stage, ms) of a chunk that is trained by `now_ms`. Waits of replayed old data are not reported."""
    new_R = new_R & ~chunk.batch.correction_R
    if not new_R.any():
        return
    close_ms_R, engaged_ms_R = chunk.batch.close_ms_R[new_R], chunk.batch.oldest_engagement_ms_R[new_R]
    if (engaged_ms_R > 0).any():
        join_waits_ms = (close_ms_R - engaged_ms_R)[engaged_ms_R > 0]
        yield "engagement_to_close", float(join_waits_ms.max())
    to_readable_ms = chunk.read_ms - int(close_ms_R.min())
    if 0 <= to_readable_ms < _SANE_MS:
        yield "close_to_readable", float(to_readable_ms)
        yield "readable_to_trained", float(now_ms - chunk.read_ms)
