"""A worker's state by partition, so that a partition can move to another worker with its state.

    partition (topic, number) ──► next offset to train, sample ids within the dedupe horizon,
                                  progressive metrics, number of chunks and requests taken of it

Reports merge the metrics of all partitions: sums add up, and score counts have the resolution of the coarsest
one (monitoring/ranking_metrics.py).

Letters: R requests, B candidates, T tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from roostream.runtime import tensor_file
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Partition, Progress
from roostream.wire.batch import Batch
from trainer.corrections import record_due_ms
from trainer.dedupe import Dedupe
from trainer.monitoring.progressive_metrics import Metrics, Report, ScoredBatch, update_each
from trainer.monitoring.slices import Slicer
from trainer.monitoring.windowed_metrics import WindowedMetrics

MAX_SCORES = 1 << 14
"""Per partition and task: 20 bytes each in every commit, and several times that in memory; AUC ± 8e-5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionSnapshot:
    """State of one partition between two chunks."""

    offset: int  # next to train
    # dedupe.id, dedupe.close_ms, dedupe.recent_ms, metrics.<name>, windows.<name>, taken
    tensors: dict[str, np.ndarray]


class _PartitionState:
    def __init__(self, tasks: Sequence[str], horizon_ms: int) -> None:
        self.dedupe, self.metrics = Dedupe(horizon_ms), Metrics(tasks, MAX_SCORES)
        self.taken = np.zeros(2, np.int64)  # number of chunks with records of it, and of new requests

    def tensors(self) -> dict[str, np.ndarray]:
        tensors = {f"dedupe.{name}": value for name, value in self.dedupe.state().items()}
        tensors |= {f"metrics.{name}": value for name, value in self.metrics.state().items()}
        return {name: value.copy() for name, value in (tensors | {"taken": self.taken}).items()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.dedupe.load(_part(tensors, "dedupe."))
        if metrics := _part(tensors, "metrics."):
            self.metrics.load(metrics)
        # Old files have no `taken`.
        self.taken = tensors.get("taken", np.array([0, self.metrics.num_requests])).astype(np.int64)


def _part(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def report_of_snapshots(snapshots: Collection[PartitionSnapshot], tasks: Sequence[str]) -> Report:
    """Metrics of the partitions as of these snapshots."""
    states = [_PartitionState(tasks, 0) for _ in snapshots]
    for state, snapshot in zip(states, snapshots, strict=True):
        state.load(snapshot.tensors)
    return _merged([state.metrics for state in states], tasks).report()


def _merged(parts: Iterable[Metrics], tasks: Sequence[str]) -> Metrics:
    merged = Metrics(tasks)
    for part in parts:
        merged.merge(part)
    return merged


class PartitionStates:
    """The partitions of one worker."""

    def __init__(
        self, at: Progress, tasks: Sequence[str], horizon_ms: int, slicers: Sequence[Slicer] = ()
    ) -> None:
        self.tasks, self.horizon_ms = tuple(tasks), horizon_ms
        self.progress = dict(at)
        self.windowed = WindowedMetrics(tasks, slicers)
        # State of corrections while they are not trained.
        self._parked: dict[Partition, PartitionSnapshot] = {}
        self._states = {partition: _PartitionState(self.tasks, horizon_ms) for partition in at}

    def claim(self, batch: Batch) -> np.ndarray:
        """Claim the new requests of a chunk. Returns bool [R]: False for ids that were trained or claimed
        before. Chunks are settled in the order of their claims. See `Dedupe`."""
        new_R, due_ms_R = np.zeros(batch.num_requests, dtype=np.bool_), record_due_ms(batch)
        for partition, row_M in rows_by_partition(batch).items():
            new_R[row_M] = self._states[partition].dedupe.claim(batch.sample_id_R[row_M], due_ms_R[row_M])
        return new_R

    def settle(self, batch: Batch, new_R: np.ndarray, after: Progress) -> None:
        """The chunk of the oldest claim is trained. `batch`: as given to `claim`; `new_R`: its result."""
        for partition, row_M in rows_by_partition(batch).items():
            state = self._states[partition]
            state.dedupe.settle(new_R[row_M])
            if partition[0] != CORRECTIONS:
                state.taken[1] += int(new_R[row_M].sum())
        for partition in after:
            self._states[partition].taken[0] += 1
        self.progress |= after

    def count(
        self,
        batch: Batch,
        score_BT: np.ndarray,
        watermark_ms: int = 0,
        shadow_BT: np.ndarray | None = None,
        importance_R: np.ndarray | None = None,
    ) -> None:
        """Count scored requests in the metrics. `score_BT`: probabilities from before these labels were used.
        `shadow_BT`: scores of a frozen copy. `importance_R`: how many requests each one represents; None =
        1."""
        if importance_R is not None:
            weight_BT = batch.weight_BT * importance_R[batch.request_index_B][:, None]
            batch = dataclasses.replace(batch, weight_BT=weight_BT)
        partition_R = np.where(batch.correction_R, -1, batch.partition_R)
        self.windowed.count(batch, partition_R[batch.request_index_B], score_BT, watermark_ms, shadow_BT)
        scale_T = [label.amount_scale for label in batch.schema.labels]
        rows, index_R = rows_by_partition(batch), np.zeros(batch.num_requests, dtype=np.int64)
        for index, row_M in enumerate(rows.values()):
            index_R[row_M] = index
        metrics = [self._states[partition].metrics for partition in rows]
        if metrics:
            columns = (score_BT, batch.label_BT, batch.weight_BT, batch.request_index_B, batch.time_ms_R)
            update_each(metrics, index_R, ScoredBatch(*columns, scale_T, importance_R))

    def metrics(self) -> Metrics:
        """Merged metrics of all partitions since the beginning."""
        return _merged([state.metrics for state in self._states.values()], self.tasks)

    @property
    def num_requests(self) -> int:
        """New requests of all partitions since the beginning, including those that other workers trained."""
        return sum(int(state.taken[1]) for state in self._states.values())

    def in_turn(self, num_chunks: int = 0) -> Partition | None:
        """The partition with the fewest chunks taken, after `num_chunks` more were taken by this rule; the
        first one of several. None: there are no partitions."""
        taken = {partition: int(state.taken[0]) for partition, state in sorted(self._states.items())}
        for _ in range(num_chunks * bool(taken)):
            taken[min(taken, key=taken.__getitem__)] += 1
        return min(taken, key=taken.__getitem__, default=None)

    @property
    def num_skipped(self) -> int:
        return sum(state.dedupe.num_skipped for state in self._states.values())

    def snapshot(self) -> dict[Partition, PartitionSnapshot]:
        """Copy the state of all partitions, without what is only claimed."""
        return self._parked | {
            p: PartitionSnapshot(offset=self.progress[p], tensors=self._tensors(p)) for p in self._states
        }

    def load(self, snapshots: Mapping[Partition, PartitionSnapshot]) -> None:
        """Load snapshots, also those of other workers. Offsets are those of the source. Partitions without a
        snapshot stay unchanged. Snapshots of corrections that are not read now are passed on unchanged, so
        that a later reader continues from there."""
        unread = [p for p in snapshots if p not in self._states]
        self._parked = {p: snapshots[p] for p in unread if p[0] == CORRECTIONS}
        for partition in self._states.keys() & snapshots.keys():
            self._states[partition].load(snapshots[partition].tensors)
            if partition[0] == SAMPLES and (windows := _part(snapshots[partition].tensors, "windows.")):
                self.windowed.load(partition[1], windows)

    def set_seen_ids(self, partition: Partition, sample_id: np.ndarray, close_ms: np.ndarray) -> None:
        """Replace the remembered sample ids of a partition, sorted by close time.

        There may be no open claim."""
        self._states[partition].dedupe.load({"id": sample_id, "close_ms": close_ms})

    def _tensors(self, partition: Partition) -> dict[str, np.ndarray]:
        windows = self.windowed.state(partition[1]) if partition[0] == SAMPLES else {}
        tensors = {f"windows.{name}": value for name, value in windows.items()}
        return self._states[partition].tensors() | tensors


def rows_by_partition(batch: Batch) -> dict[Partition, np.ndarray]:
    """Partition → indices of its requests (int64 [M]), in the order of the batch. Corrections have their own
    topic."""
    key_R = 2 * batch.partition_R.astype(np.int64) + batch.correction_R
    return {
        (CORRECTIONS if key % 2 else SAMPLES, key // 2): np.flatnonzero(key_R == key)
        for key in np.unique(key_R).tolist()
    }


def encode_partitions(
    partitions: Mapping[Partition, PartitionSnapshot], metadata: Mapping[str, str]
) -> bytes:
    """A worker's part of a commit: one tensor file with names `<topic>/<partition>/<name>`. Offsets are in
    the manifest."""
    tensors = {
        f"{topic}/{number}/{name}": value
        for (topic, number), snapshot in partitions.items()
        for name, value in snapshot.tensors.items()
    }
    return tensor_file.encode(tensors, metadata)


def decode_partitions(data: bytes, offsets: Progress) -> dict[Partition, PartitionSnapshot]:
    """Decode the partitions of `offsets`, which the manifest names for this file. Raises CheckpointError: not
    such a file."""
    tensors, _ = tensor_file.decode(data)
    if "dedupe.id" in tensors:
        return _decode_format_1(tensors, offsets)
    by_partition: dict[Partition, dict[str, np.ndarray]] = {partition: {} for partition in offsets}
    for name, value in tensors.items():
        topic, number, rest = name.split("/", 2)
        by_partition[topic, int(number)][rest] = value
    return {
        partition: PartitionSnapshot(offset=offsets[partition], tensors=tensors)
        for partition, tensors in by_partition.items()
    }


def _decode_format_1(
    tensors: Mapping[str, np.ndarray], offsets: Progress
) -> dict[Partition, PartitionSnapshot]:
    """Format 1 stored ids and metrics of all partitions together. Every partition gets all ids, which is safe
    until the horizon has passed. Metrics are sums, so only the first partition gets them."""
    ids = {name: tensors[name] for name in ("dedupe.id", "dedupe.close_ms")}
    metrics = {name: value for name, value in tensors.items() if name.startswith("metrics.")}
    first = min(offsets)
    return {
        p: PartitionSnapshot(offset=offset, tensors=ids | (metrics if p == first else {}))
        for p, offset in offsets.items()
    }
