"""The labels of samples after all corrections, instead of those at the close of the request.

A correction gives the current labels of a sample's items; of several corrections of one item the one with the
highest offset counts. If the topic was created again, its corrections count after those of the topic before,
the one whose newest engagement is older. Files keep both: `label__<label>` is what the stream trained on;
`latest__<label>` of a sealed file includes the corrections until the seal (docs/decisions/0058). So sealing
loses nothing that was on the topic.

Letters: M corrected (sample, item) pairs, R requests, B candidates, T labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import NamedTuple

import numpy as np

from roostream.runtime.kafka.topics import CORRECTIONS
from roostream.warehouse.archive import OF_SAMPLE, correction_types
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.file_reader import writer_of
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.batch import Batch
from roostream.wire.columnar import label_column

LATEST = "latest"


class LatestLabels(NamedTuple):
    """Current labels by (sample, item)."""

    sample_M: np.ndarray  # int64, ascending
    item_M: np.ndarray  # int64
    label_MT: np.ndarray  # float32; NaN = not corrected

    @property
    def is_empty(self) -> bool:
        return not len(self.sample_M)


def read_latest(
    warehouse: Warehouse,
    files: Iterable[DataFile],
    labels: Sequence[str],
    from_offsets: Mapping[str, int] | None = None,
) -> LatestLabels:
    """The labels after all corrections in these files of one partition. `from_offsets`: topic id → offset
    below which corrections are left out, because sealed files contain them.

    Raises:
        UnavailableError: a file cannot be read now.
        CheckpointError: a file is damaged; the message names it.
        SchemaError: the schema that wrote it is not registered.
    """
    samples, items, offsets, values, topics = [], [], [], [], []
    newest_ms: dict[str, int] = {}
    for file in files:
        first = (from_offsets or {}).get(file.topic, 0)
        if file.last_offset < first:
            continue
        known = correction_types(writer_of(file, warehouse.registry))
        columns, counts_R = warehouse.open_file(CORRECTIONS, file).columns(known)
        index_B = np.repeat(np.arange(len(counts_R)), counts_R)
        kept_B = columns["offset"].values[index_B] >= first
        samples.append(columns[OF_SAMPLE].values[index_B][kept_B])
        offsets.append(columns["offset"].values[index_B][kept_B])
        items.append(columns["item"].values[kept_B])
        label_BT = np.full((len(index_B), len(labels)), np.nan, dtype=np.float32)
        for t, label in enumerate(labels):
            if (name := label_column(label)) in columns:
                label_BT[:, t] = columns[name].values
        values.append(label_BT[kept_B])
        topics.append(file.topic)
        event_ms = int(columns["event__time_ms"].values.max(initial=0))
        newest_ms[file.topic] = max(newest_ms.get(file.topic, 0), event_ms)
    if not samples:
        none = np.zeros(0, dtype=np.int64)
        return LatestLabels(none, none, np.zeros((0, len(labels)), dtype=np.float32))
    in_order = sorted(newest_ms, key=lambda topic: (newest_ms[topic], topic))
    places = [np.full(len(part), in_order.index(topic)) for part, topic in zip(items, topics, strict=True)]
    return _newest(*(np.concatenate(parts) for parts in (samples, items, places, offsets, values)))


def _newest(
    sample_N: np.ndarray, item_N: np.ndarray, topic_N: np.ndarray, offset_N: np.ndarray, label_NT: np.ndarray
) -> LatestLabels:
    """For each (sample, item) the labels with the highest offset of the last topic."""
    order = np.lexsort([offset_N, topic_N, item_N, sample_N])
    sample_N, item_N, label_NT = sample_N[order], item_N[order], label_NT[order]
    last = np.ones(len(order), dtype=np.bool_)
    last[:-1] = (sample_N[1:] != sample_N[:-1]) | (item_N[1:] != item_N[:-1])
    return LatestLabels(sample_N[last], item_N[last], label_NT[last])


def overlay_labels(
    latest: LatestLabels,
    sample_id_R: np.ndarray,
    counts_R: np.ndarray,
    item_B: np.ndarray,
    label_BT: np.ndarray,
) -> np.ndarray:
    """`label_BT` (float32) with corrections applied; the same array if there are none for these samples.

    `sample_id_R`: int64. `counts_R`: number of candidates of each. `item_B`: int64.
    """
    corrected_R = np.flatnonzero(np.isin(sample_id_R, latest.sample_M)) if not latest.is_empty else ()
    if not len(corrected_R):
        return label_BT
    out, ends = label_BT.copy(), np.cumsum(counts_R, dtype=np.int64)
    for r in corrected_R:
        first, end = (np.searchsorted(latest.sample_M, sample_id_R[r], side) for side in ("left", "right"))
        items = item_B[ends[r] - counts_R[r] : ends[r]]
        for m in range(first, end):
            is_corrected_T = ~np.isnan(latest.label_MT[m])
            at = ends[r] - counts_R[r] + np.flatnonzero(items == latest.item_M[m])
            out[np.ix_(at, is_corrected_T)] = latest.label_MT[m][is_corrected_T]
    return out


def overlay_batch(batch: Batch, latest: LatestLabels) -> Batch:
    """A batch with corrections applied; `latest` was read for the labels of its schema."""
    label_BT = overlay_labels(latest, batch.sample_id_R, batch.num_candidates_R, batch.item_B, batch.label_BT)
    return batch if label_BT is batch.label_BT else dataclasses.replace(batch, label_BT=label_BT)


def files_of_part(files: Iterable[DataFile], day: date, partition: int) -> list[DataFile]:
    """The files of a close day and a partition; a sample's corrections have the same ones."""
    return [file for file in files if (file.day, file.partition) == (day, partition)]
