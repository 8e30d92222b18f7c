"""A worker's own file: what its partitions know, as one tensor file with names `<topic>/<partition>/<name>`.

Offsets stand in the manifest. Format 1 kept `dedupe.id`, `dedupe.close_ms` and `metrics.<name>` of all partitions together, in
the dense file.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from roostream.runtime import tensor_file
from roostream.runtime.kafka.topics import Partition, Progress
from trainer.partitions import PartitionSnapshot


def encode(own: Mapping[Partition, PartitionSnapshot], metadata: Mapping[str, str]) -> bytes:
    tensors = {f"{t}/{p}/{name}": value for (t, p), cut in own.items() for name, value in cut.tensors.items()}
    return tensor_file.encode(tensors, metadata)


def decode(data: bytes, offsets: Progress) -> dict[Partition, PartitionSnapshot]:
    """The partitions of `offsets`, as the manifest names them for this file.

    Raises:
        CheckpointError: not such a file.
    """
    tensors, _ = tensor_file.decode(data)
    if "dedupe.id" in tensors:
        return _of_format_1(tensors, offsets)
    of: dict[Partition, dict[str, np.ndarray]] = {partition: {} for partition in offsets}
    for name, value in tensors.items():
        topic, number, rest = name.split("/", 2)
        of[topic, int(number)][rest] = value
    return {
        partition: PartitionSnapshot(offset=offsets[partition], tensors=tensors)
        for partition, tensors in of.items()
    }


def _of_format_1(tensors: Mapping[str, np.ndarray], offsets: Progress) -> dict[Partition, PartitionSnapshot]:
    """Nothing says which partition an id is of: each gets all of them, until the horizon has passed. Metrics are sums: the
    first gets them."""
    ids = {name: tensors[name] for name in ("dedupe.id", "dedupe.close_ms")}
    metrics = {name: value for name, value in tensors.items() if name.startswith("metrics.")}
    first = min(offsets)
    return {
        p: PartitionSnapshot(offset=at, tensors=ids | (metrics if p == first else {}))
        for p, at in offsets.items()
    }
