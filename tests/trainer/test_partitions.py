"""What a worker knows of each partition, and that the partitions' reports add up to one of everything."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from tests.trainer import samples
from trainer.monitoring.progressive_metrics import METRIC_NAMES, Metrics, ScoredBatch
from trainer.partitions import PartitionStates, report_of_snapshots, rows_by_partition

AT = {(SAMPLES, 0): 0, (SAMPLES, 1): 0}


def batch_of(numbers: list[int], first: int = 0) -> Batch:
    records = [r._replace(offset=r.offset + first) for r in samples.records(numbers)]
    return Decoder(samples.schema(), {}.get).decode(records)[0]


def partitions() -> PartitionStates:
    return PartitionStates(AT, samples.schema().tasks, 3_600_000)


def test_requests_are_grouped_by_topic_and_partition() -> None:
    batch = batch_of([1, 2, 3, 4])
    assert {p: rows.tolist() for p, rows in rows_by_partition(batch).items()} == {
        (SAMPLES, 0): [1, 3],
        (SAMPLES, 1): [0, 2],
    }
    corrected = np.array([False, True, False, False])
    object.__setattr__(batch, "correction_R", corrected)
    assert sorted(rows_by_partition(batch)) == [(CORRECTIONS, 0), (SAMPLES, 0), (SAMPLES, 1)]


@pytest.mark.parametrize("num_candidates", [1, 3])
def test_the_report_equals_one_metric_over_all_partitions(num_candidates: int) -> None:
    split, whole = partitions(), Metrics(samples.schema().tasks)
    random = np.random.default_rng(num_candidates)
    for start in range(1, 400, 40):
        batch = batch_of(list(range(start, start + 40)))
        score_BT = random.random((batch.num_candidates, 1), dtype=np.float32)
        split.count(batch, score_BT)
        columns = batch.label_BT, batch.weight_BT, batch.request_index_B, batch.time_ms_R
        whole.update(ScoredBatch(score_BT, *columns))
    mine, theirs = split.metrics().report(), whole.report()
    assert {k: mine[k] for k in METRIC_NAMES} == pytest.approx(
        {k: theirs[k] for k in METRIC_NAMES}, rel=1e-12
    )
    assert report_of_snapshots(split.snapshot().values(), samples.schema().tasks) == mine
    assert all(mine[name] == theirs[name] for name in ("requests", "first_ms", "last_ms"))


def test_a_snapshot_can_be_loaded_by_another_worker() -> None:
    both, batch = partitions(), batch_of([1, 2, 3, 4])
    new_R = both.claim(batch)
    both.settle(batch, new_R, {(SAMPLES, 0): 2, (SAMPLES, 1): 2})
    cut = both.snapshot()
    assert {partition: of.offset for partition, of in cut.items()} == {(SAMPLES, 0): 2, (SAMPLES, 1): 2}
    one = PartitionStates({(SAMPLES, 1): 2}, samples.schema().tasks, 3_600_000)
    one.load(cut)
    assert not one.claim(batch_of([1, 3]).take_requests(np.array([0, 1]))).any(), "trained by the one before"
    assert both.num_skipped == 0
