"""`roostream inspect batch`: describe a batch that a worker saved when it stopped training.

Letters: R requests, B candidates, F floats of a side, N values, T tasks.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from roostream.cli.options import json_option
from roostream.cli.output import Row, clock, print_report
from roostream.errors import ConfigError, SchemaError
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.jagged import Jagged
from trainer.saved_batch import SavedBatch, decode

EXTREME = 1e6
"""Larger magnitudes are reported: such a feature needs a transform in the schema."""
MAX_LARGEST = 5


@click.command("batch")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def batch_command(file: Path, as_json: bool) -> None:
    """Describe the batch at which a worker stopped training: the reason, the records, and the values.

    \b
    Example:
      roostream inspect batch .roostream/worker/batches/1700000000000-42.batch
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a batch saved by a worker, got {error.strerror}; choose a file in its batches/"
        ) from None
    found = inspected(decode(data, str(file)))
    print_report(as_json, found, rows(found), str(file))


def inspected(saved: SavedBatch) -> dict[str, Any]:
    """The contents of a batch as plain values with stable keys.

    Raises:
        ConfigError: the schema of the batch cannot be read.
    """
    batch, rejects = _decoded(saved)
    return {
        "reason": saved.reason,
        "findings": list(saved.findings),
        "time_ms": saved.time_ms,
        "worker": saved.worker,
        "incarnation": saved.incarnation,
        "step": saved.step,
        "manifest": saved.manifest,
        "manifest_checksum": saved.checksum,
        "records": _records(saved),
        "left_out": saved.left_out,
        "requests": batch.num_requests,
        "candidates": batch.num_candidates,
        "corrections": int(batch.correction_R.sum()),
        "rejects": dict(rejects),
        "tasks": _tasks(batch),
        "features": dict(_features(batch)),
        "largest": _largest(batch),
    }


def _decoded(saved: SavedBatch) -> tuple[Batch, Counter[str]]:
    """The batch, and the number of rejected records by reason; another schema than the worker's is
    `unknown_schema`."""
    try:
        schema: Schema = schema_from_dict(tomllib.loads(saved.schema))
    except (SchemaError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"expected the schema of the saved batch as TOML, got {error}; use the version that wrote it"
        ) from None
    known: dict[int, Schema] = {}
    batch, rejects = Decoder(schema, known.get).decode(saved.records, corrections=True)
    return batch, Counter(reject.reason for reject in rejects)


def _records(saved: SavedBatch) -> list[dict[str, Any]]:
    """One entry per partition, sorted by name."""
    partitions = sorted({(record.topic, record.partition) for record in saved.records})
    out = []
    for topic, partition in partitions:
        records = [r for r in saved.records if (r.topic, r.partition) == (topic, partition)]
        offsets, times = [r.offset for r in records], [r.timestamp_ms for r in records]
        out.append(
            {
                "topic": topic,
                "partition": partition,
                "count": len(records),
                "first_offset": min(offsets),
                "last_offset": max(offsets),
                "first_ms": min(times),
                "last_ms": max(times),
                "bytes": sum(len(r.value) for r in records),
            }
        )
    return out


def _tasks(batch: Batch) -> dict[str, dict[str, float]]:
    """Labels and weights of each task."""
    return {
        task: {
            "weight": float(batch.weight_BT[:, t].sum()),
            "largest_weight": float(batch.weight_BT[:, t].max(initial=0)),
            "label_mean": float(batch.label_BT[:, t].mean()) if batch.num_candidates else 0.0,
        }
        for t, task in enumerate(batch.schema.tasks)
    }


def _features(batch: Batch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every feature by name: share of present values, and min, mean, max and number of extreme values.

    A list has its longest length, its number of distinct ids, and the same figures of its weights.
    """
    for side in ("ro", "nro"):
        value_NF, present_NF = side_floats(batch, side)
        for f, feature in enumerate(batch.schema.floats(side)):
            yield (
                feature.name,
                {"kind": "float", **_of(value_NF[present_NF[:, f], f]), "present": _share(present_NF[:, f])},
            )
        lists = batch.ro_lists if side == "ro" else batch.nro_lists
        for k, name in enumerate(lists.keys):
            weight_N = lists.weights_of(name)
            yield (
                name,
                {
                    "kind": "list",
                    "present": _share(lists.present_KN[k]),
                    "longest": int(lists.lengths_KN[k].max(initial=0)),
                    "distinct": len(np.unique(lists.values_of(name))),
                    **(
                        {"weights": _of(weight_N)}
                        if weight_N is not None and _is_weighted(batch, name)
                        else {}
                    ),
                },
            )


def _is_weighted(batch: Batch, name: str) -> bool:
    return any(
        f.name == name and f.kind == "weighted_ids"
        for side in ("ro", "nro")
        for f in batch.schema.lists(side)
    )


def side_floats(batch: Batch, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and presence of the floats of "ro" or "nro"."""
    return (
        (batch.ro_float_RF, batch.ro_present_RF)
        if side == "ro"
        else (batch.nro_float_BF, batch.nro_present_BF)
    )


def _of(value_N: np.ndarray) -> dict[str, Any]:
    """min, mean and max, which are None without values, and the number of extreme values."""
    wide_N = value_N.astype(np.float64)
    numbers = (
        {"min": wide_N.min(), "mean": wide_N.mean(), "max": wide_N.max()}
        if len(wide_N)
        else dict.fromkeys(("min", "mean", "max"))
    )
    plain = {name: None if value is None else float(value) for name, value in numbers.items()}
    return {**plain, "extreme": int((~(np.abs(wide_N) <= EXTREME)).sum())}


def _share(present_N: np.ndarray) -> float:
    return float(present_N.mean()) if len(present_N) else 0.0


def _largest(batch: Batch) -> list[dict[str, Any]]:
    """The floats and list weights with the largest magnitudes, and the offsets of their records."""
    found: list[tuple[float, str, int]] = []
    for side in ("ro", "nro"):
        value_NF, present_NF = side_floats(batch, side)
        request_N = np.arange(batch.num_requests) if side == "ro" else batch.request_index_B
        for f, feature in enumerate(batch.schema.floats(side)):
            found += _top(np.where(present_NF[:, f], value_NF[:, f], 0), feature.name, request_N)
        found += _top_weights(batch, batch.ro_lists if side == "ro" else batch.nro_lists, request_N)
    found.sort(key=lambda one: -abs(one[0]))
    return [
        {
            "feature": name,
            "value": value,
            "partition": int(batch.partition_R[request]),
            "offset": int(batch.offset_R[request]),
            "correction": bool(batch.correction_R[request]),
        }
        for value, name, request in found[:MAX_LARGEST]
    ]


def _top(value_N: np.ndarray, name: str, request_N: np.ndarray) -> list[tuple[float, str, int]]:
    order = np.argsort(-np.abs(value_N), kind="stable")[:MAX_LARGEST]
    return [(float(value_N[n]), name, int(request_N[n])) for n in order.tolist()]


def _top_weights(batch: Batch, lists: Jagged, request_N: np.ndarray) -> list[tuple[float, str, int]]:
    out = []
    for k, name in enumerate(lists.keys):
        weight_N = lists.weights_of(name)
        if weight_N is not None and _is_weighted(batch, name):
            out += _top(weight_N, f"{name} (weight)", np.repeat(request_N, lists.lengths_KN[k]))
    return out


def rows(found: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of text for a batch: the reason, the origin, then the contents."""
    yield "why", found["reason"]
    for finding in found["findings"]:
        yield "not finite", finding
    restored = (
        f"{found['manifest']} (checksum {found['manifest_checksum']})"
        if found["manifest"]
        else "the beginning"
    )
    yield (
        "when",
        f"{clock(found['time_ms'])} UTC, worker {found['worker']}, step {found['step']:,}, incarnation "
        f"{found['incarnation']}",
    )
    yield "restored", restored
    for figures in found["records"]:
        where = (
            f"{figures['topic']}-{figures['partition']} {figures['first_offset']}..{figures['last_offset']}"
        )
        yield (
            "records",
            f"{where}: {figures['count']:,}, {figures['bytes']:,} bytes, {clock(figures['first_ms'])} to "
            f"{clock(figures['last_ms'])}",
        )
    if found["left_out"]:
        yield "not saved", f"{found['left_out']:,} more records, above the limit"
    for reason, count in found["rejects"].items():
        yield "not decoded", f"{count:,}: {reason}"
    yield (
        "batch",
        f"{found['requests']:,} requests, {found['candidates']:,} candidates, {found['corrections']:,} "
        "corrections",
    )
    for task, figures in found["tasks"].items():
        yield (
            f"label {task}",
            f"mean {figures['label_mean']:.4f}, weight {figures['weight']:.6g}, the largest "
            f"{figures['largest_weight']:.6g}",
        )
    for name, figures in found["features"].items():
        yield name, _feature(figures)
    for one in found["largest"]:
        topic = "corrections" if one["correction"] else "samples"
        yield (
            "largest",
            f"{one['feature']} = {one['value']:.6g} in {topic}-{one['partition']} offset {one['offset']}",
        )


def _feature(figures: Mapping[str, Any]) -> str:
    present = f"present in {figures['present']:.0%}"
    if figures["kind"] == "float":
        return f"{_numbers(figures)}, {present}"
    weights = f"; weights {_numbers(figures['weights'])}" if "weights" in figures else ""
    return f"{figures['distinct']:,} distinct ids, longest list {figures['longest']:,}, {present}{weights}"


def _numbers(figures: Mapping[str, Any]) -> str:
    if figures["min"] is None:
        return "no values"
    extreme = f", EXTREME: {figures['extreme']:,}" if figures["extreme"] else ""
    return f"{figures['min']:.6g} to {figures['max']:.6g}, mean {figures['mean']:.6g}{extreme}"
