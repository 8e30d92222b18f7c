"""What one worker alone knows, partition by partition, so that a partition can move to another worker with all that is its own.

    partition (topic, number) ──► next offset to train, sample ids within the horizon, progressive metrics,
                                  chunks and requests taken of it so far

A report merges the partitions' metrics: sums add up, and score counts at the resolution of the coarsest (auc.py).
Letters: R requests, B candidates, T tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Partition, Progress
from roostream.wire.batch import Batch
from trainer.corrections import due_ms_of
from trainer.dedupe import Dedupe
from trainer.monitoring.progressive_metrics import Metrics, Report, update_each
from trainer.monitoring.slices import Slicer
from trainer.monitoring.windowed_metrics import WindowedMetrics

MAX_SCORES = (
    1 << 14
)  # a partition and task, 20 bytes each in every commit and several times that in memory; AUC ± 8e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionSnapshot:
    """One partition at one moment between two chunks."""

    offset: int  # next to train
    tensors: dict[
        str, np.ndarray
    ]  # dedupe.id, dedupe.close_ms, dedupe.recent_ms, metrics.<name>, windows.<name>, taken


class _PartitionState:
    def __init__(self, tasks: Sequence[str], horizon_ms: int) -> None:
        self.dedupe, self.metrics = Dedupe(horizon_ms), Metrics(tasks, MAX_SCORES)
        self.taken = np.zeros(2, np.int64)  # chunks that held something of it, and new requests

    def tensors(self) -> dict[str, np.ndarray]:
        kept = {"dedupe": self.dedupe.state(), "metrics": self.metrics.state()}
        tensors = {
            f"{part}.{name}": value.copy() for part, state in kept.items() for name, value in state.items()
        }
        return tensors | {"taken": self.taken.copy()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.dedupe.load(_part(tensors, "dedupe."))
        if metrics := _part(tensors, "metrics."):
            self.metrics.load(metrics)
        self.taken = tensors.get("taken", np.array([0, self.metrics.num_requests])).astype(
            np.int64
        )  # files of before lack it


def _part(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def report_of(cuts: Collection[PartitionSnapshot], tasks: Sequence[str]) -> Report:
    """What `Partitions.report` said when these were cut."""
    states = [_PartitionState(tasks, 0) for _ in cuts]
    for state, cut in zip(states, cuts, strict=True):
        state.load(cut.tensors)
    return _merged([state.metrics for state in states], tasks).report()


def _merged(parts: Iterable[Metrics], tasks: Sequence[str]) -> Metrics:
    merged = Metrics(tasks)
    for part in parts:
        merged.merge(part)
    return merged


class PartitionStates:
    """The partitions of one worker, each at an offset."""

    def __init__(
        self, at: Progress, tasks: Sequence[str], horizon_ms: int, build_slicers: Sequence[Slicer] = ()
    ) -> None:
        self.tasks, self.horizon_ms = tuple(tasks), horizon_ms
        self.progress = dict(at)
        self.windowed = WindowedMetrics(tasks, build_slicers)
        self._parked: dict[Partition, PartitionSnapshot] = {}  # of corrections while they aren't trained
        self._states = {partition: _PartitionState(self.tasks, horizon_ms) for partition in at}

    def claim(self, batch: Batch) -> np.ndarray:
        """bool [R]: which requests are trained; the others' ids were trained or claimed before. Chunks may be claimed ahead; they
        are settled in the same order. See `Dedupe`."""
        new_R, due_ms_R = np.zeros(batch.num_requests, dtype=np.bool_), due_ms_of(batch)
        for partition, row_M in rows_by_partition(batch).items():
            new_R[row_M] = self._states[partition].dedupe.claim(batch.sample_id_R[row_M], due_ms_R[row_M])
        return new_R

    def settle(self, batch: Batch, new_R: np.ndarray, after: Progress) -> None:
        """A chunk is trained: the whole `batch` that was given to the oldest `claim`, whose answer was `new_R`."""
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
        stands_for_R: np.ndarray | None = None,
    ) -> None:
        """`score_BT`: probabilities, of before these labels were used; `shadow_BT`: those of a frozen copy; `stands_for_R`: how
        many requests each is counted for, None = 1."""
        if stands_for_R is not None:
            batch = dataclasses.replace(
                batch, weight_BT=batch.weight_BT * stands_for_R[batch.request_index_B][:, None]
            )
        place_R = np.where(batch.correction_R, -1, batch.partition_R)
        self.windowed.count(batch, place_R[batch.request_index_B], score_BT, watermark_ms, shadow_BT)
        scale_T = [label.amount_scale for label in batch.schema.labels]
        rows, of_R = rows_by_partition(batch), np.zeros(batch.num_requests, dtype=np.int64)
        for number, row_M in enumerate(rows.values()):
            of_R[row_M] = number
        of = [self._states[partition].metrics for partition in rows]
        if of:
            columns = (score_BT, batch.label_BT, batch.weight_BT, batch.request_index_B, batch.time_ms_R)
            update_each(of, of_R, *columns, scale_T, stands_for_R)

    def metrics(self) -> Metrics:
        """Of everything counted in all partitions since the beginning."""
        return _merged([state.metrics for state in self._states.values()], self.tasks)

    @property
    def num_requests(self) -> int:
        """New ones taken of all partitions since the beginning, whoever had them then."""
        return sum(int(state.taken[1]) for state in self._states.values())

    def in_turn(self, num_chunks: int = 0) -> Partition | None:
        """Of which the fewest chunks were taken, the first of several, when so many more are taken in this way. None: there is no
        partition."""
        taken = {partition: int(state.taken[0]) for partition, state in sorted(self._states.items())}
        for _ in range(num_chunks * bool(taken)):
            taken[min(taken, key=taken.__getitem__)] += 1
        return min(taken, key=taken.__getitem__, default=None)

    @property
    def num_skipped(self) -> int:
        return sum(state.dedupe.num_skipped for state in self._states.values())

    def cut(self) -> dict[Partition, PartitionSnapshot]:
        """Copies: later chunks don't change them. What is only claimed isn't in them."""
        return self._parked | {
            p: PartitionSnapshot(offset=self.progress[p], tensors=self._tensors(p)) for p in self._states
        }

    def load(self, cuts: Mapping[Partition, PartitionSnapshot]) -> None:
        """Become what `cut` gave, also where other workers gave it; offsets are those that the source was put to. Partitions
        without a cut stay as they are. A cut of corrections that aren't read stays in later cuts as it is, so that whoever reads
        them again goes on from there and trains none twice."""
        self._parked = {p: cut for p, cut in cuts.items() if p not in self._states and p[0] == CORRECTIONS}
        for partition in self._states.keys() & cuts.keys():
            self._states[partition].load(cuts[partition].tensors)
            if partition[0] == SAMPLES and (windows := _part(cuts[partition].tensors, "windows.")):
                self.windowed.load(partition[1], windows)

    def know(self, partition: Partition, sample_id: np.ndarray, close_ms: np.ndarray) -> None:
        """These samples, by close time, are what is remembered of a partition's from now on; nothing may be claimed."""
        self._states[partition].dedupe.load({"id": sample_id, "close_ms": close_ms})

    def _tensors(self, partition: Partition) -> dict[str, np.ndarray]:
        windows = self.windowed.state(partition[1]) if partition[0] == SAMPLES else {}
        return self._states[partition].tensors() | {
            f"windows.{name}": value for name, value in windows.items()
        }


def rows_by_partition(batch: Batch) -> dict[Partition, np.ndarray]:
    """Partition → its requests, int64 [M], in the order of the batch. A correction comes from the topic of corrections."""
    place_R = 2 * batch.partition_R.astype(np.int64) + batch.correction_R
    return {
        (CORRECTIONS if place % 2 else SAMPLES, place // 2): np.flatnonzero(place_R == place)
        for place in np.unique(place_R).tolist()
    }
