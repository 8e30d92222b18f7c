"""Both sides of the benchmark `train-vs-torchrec` do the same work: equal losses, and equal rows after some
steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.train_vs_torchrec import NUM_BATCHES, OurBatches, TorchRecBatches, batches_of, dlrm_case
from roostream.wire.lookup import build_lookup


def test_our_step_and_the_step_of_torchrec_learn_the_same(tmp_path: Path) -> None:
    case = dlrm_case(str(tmp_path), 8, 4)
    ours, torchrec = OurBatches(case), TorchRecBatches(case)
    losses = np.array([(ours.step(), torchrec.step()) for _ in range(2 * NUM_BATCHES)])
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-5)
    assert losses[-1, 0] < 0.9 * losses[NUM_BATCHES - 1, 0], "the model learns something"

    lookup = build_lookup(batches_of(case)[0])
    (part,) = lookup.stacks.values()
    (rows_UD,) = case.client.pull(lookup).values()
    names = {table.id: name for name, table in case.schema.table_by_name.items()}
    for row_D, table, id_ in zip(rows_UD, part.table_U.tolist(), part.id_U.tolist(), strict=True):
        weight = torchrec.bags.embedding_bags[names[table]].weight
        torch.testing.assert_close(torch.from_numpy(row_D), weight[id_].detach(), rtol=1e-4, atol=1e-5)


def test_the_loop_trains_on_the_same_batches(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    looped, ours = dlrm_case(str(tmp_path / "a"), 8, 4), dlrm_case(str(tmp_path / "b"), 8, 4)
    step = OurBatches(ours).step
    for _ in range(3):
        looped.whole()
        step()
    lookup = build_lookup(batches_of(ours)[0])
    (by_loop,), (by_step,) = (list(case.client.pull(lookup).values()) for case in (looped, ours))
    np.testing.assert_allclose(by_loop, by_step, rtol=1e-4, atol=1e-5)
