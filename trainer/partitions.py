"""A worker's state by partition, so that a partition can move to another worker with its state.

    partition (topic, number) ──► next offset to train, sample ids within the dedupe horizon,
                                  progressive metrics, number of chunks and requests taken of it

Reports merge the metrics of all partitions: sums add up, and score counts have the resolution of the coarsest
one (monitoring/ranking_metrics.py).

Letters: R requests, B candidates, T tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from roostream.errors import CheckpointError
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Partition, Progress
from roostream.runtime.manifest import StoredFile, WorkerPart
from roostream.schema.schema import Label
from roostream.wire.batch import Batch
from trainer.corrections import record_due_ms
from trainer.dedupe import Dedupe, DedupeSnapshot, IdRun, merged, plan_files
from trainer.monitoring.progressive_metrics import Metrics, ScoredBatch, sampling_weights, update_each
from trainer.monitoring.slices import Slicer
from trainer.monitoring.windowed_metrics import WindowedMetrics

MAX_SCORES = 1 << 14
"""Per partition and task: 20 bytes each in every commit, and several times that in memory; AUC ± 8e-5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionSnapshot:
    """State of one partition between two chunks."""

    offset: int  # next to train
    tensors: dict[str, np.ndarray]  # metrics.<name>, windows.<name>, taken
    dedupe: DedupeSnapshot
    leader_epoch: int = -1  # Kafka's, of the record before `offset`; -1 = unknown


class _PartitionState:
    def __init__(self, labels: Sequence[Label], horizon_ms: int) -> None:
        self.dedupe, self.metrics = Dedupe(horizon_ms), Metrics([label.name for label in labels], MAX_SCORES)
        self._labels = labels
        self.taken = np.zeros(2, np.int64)  # number of chunks with records of it, and of new requests

    def tensors(self) -> dict[str, np.ndarray]:
        tensors = {f"metrics.{name}": value for name, value in self.metrics.state().items()}
        return {name: value.copy() for name, value in (tensors | {"taken": self.taken}).items()}

    def load(self, snapshot: PartitionSnapshot) -> None:
        tensors = snapshot.tensors
        self.dedupe.load(snapshot.dedupe)
        if metrics := _part(tensors, "metrics."):
            self.metrics.load(metrics, self._labels)
        # Old files have no `taken`.
        self.taken = tensors.get("taken", np.array([0, self.metrics.num_requests])).astype(np.int64)


def _part(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def metrics_of_snapshots(snapshots: Collection[PartitionSnapshot], labels: Sequence[Label]) -> Metrics:
    """Merged metrics of the partitions as of these snapshots."""
    tasks = [label.name for label in labels]
    parts = [Metrics(tasks, MAX_SCORES) for _ in snapshots]
    for part, snapshot in zip(parts, snapshots, strict=True):
        if metrics := _part(snapshot.tensors, "metrics."):
            part.load(metrics, labels)
    return _merged(parts, tasks)


def _merged(parts: Iterable[Metrics], tasks: Sequence[str]) -> Metrics:
    merged = Metrics(tasks)
    for part in parts:
        merged.merge(part)
    return merged


class PartitionStates:
    """The partitions of one worker."""

    def __init__(
        self, at: Progress, labels: Sequence[Label], horizon_ms: int, slicers: Sequence[Slicer] = ()
    ) -> None:
        self.labels, self.horizon_ms = tuple(labels), horizon_ms
        self.progress = dict(at)
        self.windowed = WindowedMetrics([label.name for label in labels], slicers)
        # State of corrections while they are not trained.
        self._parked: dict[Partition, PartitionSnapshot] = {}
        self._states = {partition: _PartitionState(self.labels, horizon_ms) for partition in at}
        # Partition → an offset, and the leader epoch of the record before it.
        self._leader_epochs: dict[Partition, tuple[int, int]] = {}

    def claim(self, batch: Batch) -> np.ndarray:
        """Claim the new requests of a chunk. Returns bool [R]: False for ids that were trained or claimed
        before. Chunks are settled in the order of their claims. See `Dedupe`."""
        new_R, due_ms_R = np.zeros(batch.num_requests, dtype=np.bool_), record_due_ms(batch)
        for partition, row_M in rows_by_partition(batch).items():
            new_R[row_M] = self._states[partition].dedupe.claim(batch.sample_id_R[row_M], due_ms_R[row_M])
        return new_R

    def settle(
        self,
        batch: Batch,
        new_R: np.ndarray,
        after: Progress,
        leader_epochs: Mapping[Partition, int] = MappingProxyType({}),
    ) -> None:
        """Record that the chunk of the oldest claim was trained. `batch`: as given to `claim`; `new_R`: its
        result. `after`, `leader_epochs`: of the chunk."""
        for partition, row_M in rows_by_partition(batch).items():
            state = self._states[partition]
            state.dedupe.settle()
            if partition[0] != CORRECTIONS:
                state.taken[1] += int(new_R[row_M].sum())
        for partition in after:
            self._states[partition].taken[0] += 1
        self.progress |= after
        self._leader_epochs |= {p: (after[p], epoch) for p, epoch in leader_epochs.items()}

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
        weight_R = sampling_weights(batch)
        if importance_R is not None:
            weight_R *= importance_R
            weight_BT = batch.weight_BT * importance_R[batch.request_index_B][:, None]
            batch = dataclasses.replace(batch, weight_BT=weight_BT)
        partition_R = np.where(batch.correction_R, -1, batch.partition_R)
        self.windowed.count(batch, partition_R[batch.request_index_B], score_BT, watermark_ms, shadow_BT)
        rows, index_R = rows_by_partition(batch), np.zeros(batch.num_requests, dtype=np.int64)
        for index, row_M in enumerate(rows.values()):
            index_R[row_M] = index
        metrics = [self._states[partition].metrics for partition in rows]
        if metrics:
            columns = (score_BT, batch.label_BT, batch.weight_BT, batch.request_index_B, batch.time_ms_R)
            update_each(metrics, index_R, ScoredBatch(*columns, batch.schema.labels, weight_R))

    def metrics(self) -> Metrics:
        """Metrics over all partitions together, since training began."""
        return _merged(
            [state.metrics for state in self._states.values()], [label.name for label in self.labels]
        )

    @property
    def num_requests(self) -> int:
        """New requests of all partitions since the beginning, including those that other workers trained."""
        return sum(int(state.taken[1]) for state in self._states.values())

    def in_turn(self, num_chunks: int = 0) -> Partition | None:
        """The partition to read next: the one of which the fewest chunks were trained, and of several the
        first one. `num_chunks`: chunks that were read by this rule but are not trained yet. None: there are
        no partitions."""
        taken = {partition: int(state.taken[0]) for partition, state in sorted(self._states.items())}
        for _ in range(num_chunks * bool(taken)):
            taken[min(taken, key=taken.__getitem__)] += 1
        return min(taken, key=taken.__getitem__, default=None)

    def snapshot(self) -> dict[Partition, PartitionSnapshot]:
        """Copy the state of all partitions. It includes every chunk that was trained, and no chunk that was
        claimed but is not trained yet."""
        return self._parked | {
            p: PartitionSnapshot(
                offset=self.progress[p],
                tensors=self._tensors(p),
                dedupe=state.dedupe.cut(),
                leader_epoch=self._leader_epoch(p),
            )
            for p, state in self._states.items()
        }

    def committed(self, stored: Mapping[Partition, PartitionSnapshot]) -> None:
        """Note that the last snapshot was committed. `stored`: the snapshots that `store_ids` returned for
        it."""
        self._parked = {p: stored[p] for p in self._parked}
        for partition, state in self._states.items():
            state.dedupe.committed(stored[partition].dedupe.runs)

    def load(self, snapshots: Mapping[Partition, PartitionSnapshot]) -> None:
        """Load snapshots, also those of other workers. Offsets are those of the source. Partitions without a
        snapshot stay unchanged. Snapshots of corrections that are not read now are passed on unchanged, so
        that a later reader continues from there."""
        unread = [p for p in snapshots if p not in self._states]
        self._parked = {p: snapshots[p] for p in unread if p[0] == CORRECTIONS}
        for partition in self._states.keys() & snapshots.keys():
            self._states[partition].load(snapshots[partition])
            self._leader_epochs[partition] = snapshots[partition].offset, snapshots[partition].leader_epoch
            if partition[0] == SAMPLES and (windows := _part(snapshots[partition].tensors, "windows.")):
                self.windowed.load(partition[1], windows)

    def set_seen_ids(self, partition: Partition, sample_id: np.ndarray, close_ms: np.ndarray) -> None:
        """Replace the remembered sample ids of a partition, sorted by close time.

        There may be no open claim."""
        self._states[partition].dedupe.load(DedupeSnapshot.of(sample_id, close_ms))

    def _leader_epoch(self, partition: Partition) -> int:
        offset, epoch = self._leader_epochs.get(partition, (-1, -1))
        return epoch if offset == self.progress[partition] else -1

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


# A worker's part of a commit, in two kinds of tensor files. Names of tensors: `<topic>/<partition>/<name>`.
#
#     part.file      one a commit: metrics, windows, `leader_epoch` (offset, epoch), and for the ids
#                    `dedupe.recent_ms` and `dedupe.runs` int64 [K, 3]: (index in part.id_files, number of
#                    ids, floor_ms)
#     part.id_files  ids, times and floors as in `IdRun`: the new ids of this commit, and files of earlier
#                    commits. A partition has at most one run in a file.


def store_ids(
    partitions: Mapping[Partition, PartitionSnapshot], store: Callable[[bytes], StoredFile]
) -> dict[Partition, PartitionSnapshot]:
    """Store the ids that are in no file yet. Returns the snapshots with a file for every run. `store` is
    called at most once; its errors pass through."""
    plans = {partition: plan_files(snapshot.dedupe.runs) for partition, snapshot in partitions.items()}
    new = {partition: run for partition, (_, run) in plans.items() if run is not None}
    file = None
    if new:
        tensors = {_tensor_name(partition, "id"): run.id_N for partition, run in new.items()}
        tensors |= {_tensor_name(partition, "time_ms"): run.time_ms_N for partition, run in new.items()}
        file = store(tensor_file.encode(tensors, {}))
    out = {}
    for partition, (kept, run) in plans.items():
        runs = kept if run is None else [*kept, run._replace(file=file)]
        dedupe = partitions[partition].dedupe._replace(runs=tuple(runs))
        out[partition] = dataclasses.replace(partitions[partition], dedupe=dedupe)
    return out


def id_files(partitions: Mapping[Partition, PartitionSnapshot]) -> tuple[StoredFile, ...]:
    """The files that `store_ids` left the ids in, in the order of their names."""
    runs = [run for snapshot in partitions.values() for run in snapshot.dedupe.runs]
    return tuple(sorted({run.file for run in runs if run.file}, key=lambda file: file.name))


def encode_partitions(
    partitions: Mapping[Partition, PartitionSnapshot], metadata: Mapping[str, str]
) -> bytes:
    """Encode the partitions of one worker as the file that it adds to a commit. The snapshots are those that
    `store_ids` returned. The commit's manifest has the offsets, and the names of the files with ids."""
    index = {file: number for number, file in enumerate(id_files(partitions))}
    tensors: dict[str, np.ndarray] = {}
    for partition, snapshot in partitions.items():
        runs = [(index[run.file], len(run.id_N), run.floor_ms) for run in snapshot.dedupe.runs if run.file]
        own = snapshot.tensors | {
            "dedupe.recent_ms": np.array(snapshot.dedupe.recent_ms, np.int64),
            "dedupe.runs": np.array(runs, np.int64).reshape(-1, 3),
            "leader_epoch": np.array([snapshot.offset, snapshot.leader_epoch], np.int64),
        }
        tensors |= {_tensor_name(partition, name): value for name, value in own.items()}
    return tensor_file.encode(tensors, metadata)


def read_partitions(
    store: CheckpointStore, part: WorkerPart, wanted: Collection[Partition] | None = None, *, ids: bool = True
) -> dict[Partition, PartitionSnapshot]:
    """Read `wanted` partitions of a worker's part; None = all. Without `ids` no trained ids are read.

    Raises:
        CheckpointError: a file is absent, damaged, or not such a file.
        UnavailableError: the store cannot be read now.
    """
    tensors, _ = tensor_file.decode(manifests.read_file(store, part.file))
    offsets = {p: offset for p, offset in part.offsets.items() if wanted is None or p in wanted}
    if "dedupe.id" in tensors:
        found = _of_format_1(tensors, part.offsets)
        return {partition: _snapshot(offset, found[partition]) for partition, offset in offsets.items()}
    by_partition = _by_partition(tensors)
    read: dict[StoredFile, dict[Partition, dict[str, np.ndarray]]] = {}
    out = {}
    for partition, offset in offsets.items():
        own = by_partition.get(partition, {})
        runs = []
        for number, length, floor_ms in own.pop("dedupe.runs", np.zeros((0, 3), np.int64)).tolist():
            if not ids:
                continue
            if number >= len(part.id_files):
                raise CheckpointError(
                    f"{part.file.name}: expected one of {len(part.id_files)} files of ids, got {number}"
                )
            file = part.id_files[number]
            if file not in read:
                read[file] = _by_partition(tensor_file.decode(manifests.read_file(store, file))[0])
            columns = read[file].get(partition, {})
            if {len(columns.get(name, ())) for name in ("id", "time_ms")} != {length}:
                raise CheckpointError(f"{file.name}: expected {length} ids of {partition}, got others")
            run = IdRun.of(columns["id"], columns["time_ms"])
            runs.append(run._replace(floor_ms=floor_ms, file=file))
        out[partition] = _snapshot(offset, own, runs)
    return out


def with_new_partitions(
    committed: Mapping[Partition, PartitionSnapshot], wanted: Collection[Partition]
) -> dict[Partition, PartitionSnapshot]:
    """The snapshots to restore the partitions `wanted` from, if the topics have more partitions than the
    commit.

    A key may belong to another partition than before, and so may a sample that the joiner writes again. So
    each partition gets the ids of all partitions of its topic. A new partition starts at its first record.
    """
    out = {}
    for partition in wanted:
        of_topic = [at for (topic, _), at in sorted(committed.items()) if topic == partition[0]]
        if not of_topic:
            continue
        runs = [run for at in of_topic for run in at.dedupe.runs]
        at = committed.get(partition)
        if at is None:  # it has had its turns, so that nobody waits until it has caught up
            turns = min(int(other.tensors.get("taken", np.zeros(2, np.int64))[0]) for other in of_topic)
            taken = {"taken": np.array([turns, 0], np.int64)}
            at = PartitionSnapshot(offset=0, tensors=taken, dedupe=of_topic[0].dedupe)
        dedupe = at.dedupe._replace(runs=(merged(runs),) if runs else ())
        out[partition] = dataclasses.replace(at, dedupe=dedupe)
    return out


def _snapshot(offset: int, own: dict[str, np.ndarray], runs: Sequence[IdRun] = ()) -> PartitionSnapshot:
    """Formats before 5 have the ids and their close times in the same file; the oldest one has no
    `recent_ms`, which the close times replace."""
    id_N, close_ms_N = (own.pop(f"dedupe.{name}", np.zeros(0, np.int64)) for name in ("id", "close_ms"))
    dedupe = DedupeSnapshot.of(id_N, close_ms_N) if len(id_N) else DedupeSnapshot(tuple(runs))
    if (recent_ms := own.pop("dedupe.recent_ms", None)) is not None:
        dedupe = dedupe._replace(recent_ms=tuple(recent_ms.tolist()))
    known_at, leader_epoch = own.pop("leader_epoch", np.array([-1, -1])).tolist()
    if known_at != offset:  # an import starts at other offsets
        leader_epoch = -1
    return PartitionSnapshot(offset=offset, tensors=own, dedupe=dedupe, leader_epoch=leader_epoch)


def _tensor_name(partition: Partition, name: str) -> str:
    return f"{partition[0]}/{partition[1]}/{name}"


def _by_partition(tensors: Mapping[str, np.ndarray]) -> dict[Partition, dict[str, np.ndarray]]:
    found: dict[Partition, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        topic, number, rest = name.split("/", 2)
        found.setdefault((topic, int(number)), {})[rest] = value
    return found


def _of_format_1(
    tensors: Mapping[str, np.ndarray], offsets: Progress
) -> dict[Partition, dict[str, np.ndarray]]:
    """Format 1 stored ids and metrics of all partitions together. Every partition gets all ids, which is safe
    until the horizon has passed. Metrics are sums, so only the first partition gets them."""
    ids = {name: tensors[name] for name in ("dedupe.id", "dedupe.close_ms")}
    metrics = {name: value for name, value in tensors.items() if name.startswith("metrics.")}
    first = min(offsets)
    return {p: ids | (metrics if p == first else {}) for p in offsets}
