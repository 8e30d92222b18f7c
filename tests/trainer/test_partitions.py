"""A worker's state per partition: offsets, deduplication and metrics. The metrics of all partitions must add
up to those of the whole."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from roostream.errors import CheckpointError
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.runtime.manifest import WorkerPart, store_file
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from tests.trainer import samples
from tests.trainer.memory_store import MemoryStore
from trainer.dedupe import Dedupe
from trainer.monitoring.progressive_metrics import METRIC_NAMES, Metrics, ScoredBatch
from trainer.partitions import (
    PartitionStates,
    encode_partitions,
    id_files,
    metrics_of_snapshots,
    read_partitions,
    rows_by_partition,
    store_ids,
    with_new_partitions,
)

AT = {(SAMPLES, 0): 0, (SAMPLES, 1): 0}


def batch_of(numbers: list[int], first: int = 0) -> Batch:
    records = [r._replace(offset=r.offset + first) for r in samples.records(numbers)]
    return Decoder(samples.schema(), {}.get).decode(records)[0]


def partitions() -> PartitionStates:
    return PartitionStates(AT, samples.schema().labels, 3_600_000)


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
    found, expected = split.metrics().report(), whole.report()
    assert {k: found[k] for k in METRIC_NAMES} == pytest.approx(
        {k: expected[k] for k in METRIC_NAMES}, rel=1e-12
    )
    assert metrics_of_snapshots(split.snapshot().values(), samples.schema().labels).report() == found
    assert all(found[name] == expected[name] for name in ("requests", "first_ms", "last_ms"))


def test_a_sampling_weight_counts_like_as_many_requests() -> None:
    batch, random = batch_of(list(range(1, 60))), np.random.default_rng(0)
    score_BT = random.random((batch.num_candidates, 1), dtype=np.float32)
    weight_R = random.integers(1, 5, batch.num_requests)
    weight_B = weight_R[batch.request_index_B]
    weighted, repeated = partitions(), Metrics(samples.schema().tasks)
    weight_BT = batch.weight_BT * weight_B[:, None].astype(np.float32)
    weighted.count(dataclasses.replace(batch, weight_BT=weight_BT), score_BT)
    for weight in range(1, 5):
        part_R = np.flatnonzero(weight_R >= weight)
        part = batch.take_requests(part_R)
        columns = part.label_BT, part.weight_BT, part.request_index_B, part.time_ms_R
        repeated.update(ScoredBatch(score_BT[weight_B >= weight], *columns))
    found, expected = weighted.metrics().report(), repeated.report()
    assert {k: found[k] for k in METRIC_NAMES} == pytest.approx({k: expected[k] for k in METRIC_NAMES})


def test_a_sample_that_is_repeated_in_a_new_partition_is_not_trained_again() -> None:
    both, batch = partitions(), batch_of([1, 2, 3, 4])
    both.settle(batch, both.claim(batch), {(SAMPLES, 0): 2, (SAMPLES, 1): 2})
    all_three = [(SAMPLES, number) for number in range(3)]
    grown = with_new_partitions(both.snapshot(), all_three)
    assert {p: at.offset for p, at in grown.items()} == dict(zip(all_three, (2, 2, 0), strict=True))
    for partition in all_three:
        dedupe = Dedupe(3_600_000)
        dedupe.load(grown[partition].dedupe)
        ids, times = np.array([1, 2, 3, 4, 9]), np.array(batch.close_ms_R[[0, 1, 2, 3, 3]])
        assert dedupe.claim(ids, times).tolist() == [False] * 4 + [True]
    three = PartitionStates(dict.fromkeys(all_three, 0), samples.schema().labels, 3_600_000)
    three.load(grown)
    assert three.in_turn() == (SAMPLES, 0), "the new partition must not get extra turns"
    assert three.metrics().num_requests == both.metrics().num_requests


def test_a_part_of_a_commit_is_read_as_it_was_stored() -> None:
    store, both, batch = MemoryStore(), partitions(), batch_of([1, 2, 3, 4])
    new_R = both.claim(batch)
    both.settle(batch, new_R, {(SAMPLES, 0): 2, (SAMPLES, 1): 2}, {(SAMPLES, 0): 5})
    ids = store_ids(both.snapshot(), lambda data: store_file(store, "ids", data))
    file = store_file(store, "own", encode_partitions(ids, {}))
    part = WorkerPart(
        offsets={(SAMPLES, 0): 2, (SAMPLES, 1): 2}, file=file, dedupe=4, metrics={}, id_files=id_files(ids)
    )
    found = read_partitions(store, part)
    assert {p: (at.offset, at.leader_epoch) for p, at in found.items()} == {
        (SAMPLES, 0): (2, 5),
        (SAMPLES, 1): (2, -1),
    }
    for p, at in found.items():
        assert at.dedupe.recent_ms == ids[p].dedupe.recent_ms and at.dedupe.num_ids == 2
        assert all((at.tensors[name] == value).all() for name, value in ids[p].tensors.items())
    assert [at.dedupe.num_ids for at in read_partitions(store, part, ids=False).values()] == [0, 0]
    imported = dataclasses.replace(
        part, offsets=dict.fromkeys(part.offsets, 0)
    )  # `checkpoint import` does this
    assert [at.leader_epoch for at in read_partitions(store, imported).values()] == [-1, -1]
    assert list(read_partitions(store, part, [(SAMPLES, 1)])) == [(SAMPLES, 1)]
    with pytest.raises(CheckpointError, match="expected one of 0 files of ids"):
        read_partitions(store, dataclasses.replace(part, id_files=()))


def test_a_snapshot_can_be_loaded_by_another_worker() -> None:
    both, batch = partitions(), batch_of([1, 2, 3, 4])
    new_R = both.claim(batch)
    both.settle(batch, new_R, {(SAMPLES, 0): 2, (SAMPLES, 1): 2})
    cut = both.snapshot()
    assert {partition: state.offset for partition, state in cut.items()} == {(SAMPLES, 0): 2, (SAMPLES, 1): 2}
    one = PartitionStates({(SAMPLES, 1): 2}, samples.schema().labels, 3_600_000)
    one.load(cut)
    assert not one.claim(batch_of([1, 3]).take_requests(np.array([0, 1]))).any(), (
        "the first worker has trained these samples"
    )
