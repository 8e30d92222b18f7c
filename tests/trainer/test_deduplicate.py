"""`deduplicate`: parts of a chunk say what their requests share, and training goes on as before."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.wire.decode import Decoder
from tests.trainer import samples
from tests.trainer.loops import build
from trainer.chunks import build_part, split_frozen

N12 = samples.records(range(1, 13))


def test_lookups_are_deduplicated_only_if_requested() -> None:
    batch = Decoder(samples.schema(), {}.get).decode(N12)[0].take_requests(np.array([0, 0, 0, 1]))
    assert build_part(batch, trains=True).lookup.unique is None
    (part,) = split_frozen(batch, 0, deduplicated=True)
    assert part.lookup.unique is not None and part.lookup.unique.row_N.tolist() == [0, 0, 0, 1]
    between_ms = int(batch.time_ms_R.max())
    parts = split_frozen(batch, between_ms, deduplicated=True)
    assert [p.lookup.unique is not None for p in parts] == [True, False], "a single request shares nothing"


def test_training_with_deduplication_gives_the_same_scores() -> None:
    plain, shared = (build(N12, deduplicate=of).train_all() for of in (False, True))
    for one, other in zip(plain.predicted, shared.predicted, strict=True):
        assert one.sample_id == other.sample_id
        assert list(other.scores) == pytest.approx(list(one.scores), abs=1e-6)
    assert shared.pushes() == plain.pushes() and shared.loop.num_steps == plain.loop.num_steps
