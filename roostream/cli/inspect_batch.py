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

from roostream.cli.options import NonEmptyPath, json_option
from roostream.cli.output import Row, clock, print_report
from roostream.errors import ConfigError, SchemaError
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.block import Side
from roostream.wire.decode import Decoder
from trainer.saved_batch import SavedBatch, decode

EXTREME = 1e6
"""Values of a larger magnitude are counted as extreme: their feature needs a transform in the schema."""
MAX_LARGEST = 5
"""Number of values that are listed with the offsets of their records."""


@click.command("batch")
@click.argument("file", type=NonEmptyPath(path_type=Path))
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
    report = describe_batch(decode(data, str(file)))
    print_report(as_json, report, rows(report), str(file))


def describe_batch(saved: SavedBatch) -> dict[str, Any]:
    """Everything that the command prints, as plain values with stable keys.

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
    """The batch, and the number of rejected records by reason.

    Records of another schema than the worker's are rejected as `unknown_schema`.
    """
    try:
        schema: Schema = schema_from_dict(tomllib.loads(saved.schema))
    except (SchemaError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"expected the schema of the saved batch as TOML, got {error}; use the version that wrote it"
        ) from None
    other_schemas: dict[int, Schema] = {}
    batch, rejects = Decoder(schema, other_schemas.get).decode(saved.records, corrections=True)
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
    """Figures of each feature, with its name. A float: share of present values, min, mean, max and number of
    extreme values. A list: share of present lists, greatest length, number of distinct ids, and the figures
    of its weights if it has any."""
    for side in ("ro", "nro"):
        value_NF, present_NF = side_floats(batch, side)
        for f, feature in enumerate(batch.schema.floats(side)):
            yield (
                feature.name,
                {
                    "kind": "float",
                    **_statistics(value_NF[present_NF[:, f], f]),
                    "present": _share_present(present_NF[:, f]),
                },
            )
        lists = batch.ro_lists if side == "ro" else batch.nro_lists
        weighted = _weighted_lists(batch, side)
        for k, name in enumerate(lists.keys):
            figures: dict[str, Any] = {
                "kind": "list",
                "present": _share_present(lists.present_KN[k]),
                "longest": int(lists.lengths_KN[k].max(initial=0)),
                "distinct": len(np.unique(lists.values_of(name))),
            }
            weight_N = lists.weights_of(name)
            if weight_N is not None and name in weighted:
                figures["weights"] = _statistics(weight_N)
            yield name, figures


def _weighted_lists(batch: Batch, side: Side) -> set[str]:
    """Names of the lists whose entries have weights in the schema."""
    return {f.name for f in batch.schema.lists(side) if f.kind == "weighted_ids"}


def side_floats(batch: Batch, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Values [N, F] and presence [N, F] of the floats of "ro" (one row per request) or "nro" (one per
    candidate)."""
    if side == "ro":
        return batch.ro_float_RF, batch.ro_present_RF
    return batch.nro_float_BF, batch.nro_present_BF


def _statistics(value_N: np.ndarray) -> dict[str, Any]:
    """min, mean and max, which are None without values, and the number of extreme values."""
    value64_N = value_N.astype(np.float64)
    if not len(value64_N):
        return {"min": None, "mean": None, "max": None, "extreme": 0}
    return {
        "min": float(value64_N.min()),
        "mean": float(value64_N.mean()),
        "max": float(value64_N.max()),
        "extreme": int((~(np.abs(value64_N) <= EXTREME)).sum()),  # NaN counts as extreme
    }


def _share_present(present_N: np.ndarray) -> float:
    return float(present_N.mean()) if len(present_N) else 0.0


def _largest(batch: Batch) -> list[dict[str, Any]]:
    """The floats and list weights with the largest magnitudes, and the offsets of their records."""
    top: list[tuple[float, str, int]] = []  # value, feature, request
    for side in ("ro", "nro"):
        value_NF, present_NF = side_floats(batch, side)
        request_N = np.arange(batch.num_requests) if side == "ro" else batch.request_index_B
        for f, feature in enumerate(batch.schema.floats(side)):
            top += _top(np.where(present_NF[:, f], value_NF[:, f], 0), feature.name, request_N)
        lists = batch.ro_lists if side == "ro" else batch.nro_lists
        for k, name in enumerate(lists.keys):
            weight_N = lists.weights_of(name)
            if weight_N is not None and name in _weighted_lists(batch, side):
                top += _top(weight_N, f"{name} (weight)", np.repeat(request_N, lists.lengths_KN[k]))
    top.sort(key=lambda entry: -abs(entry[0]))
    return [
        {
            "feature": name,
            "value": value,
            "partition": int(batch.partition_R[request]),
            "offset": int(batch.offset_R[request]),
            "correction": bool(batch.correction_R[request]),
        }
        for value, name, request in top[:MAX_LARGEST]
    ]


def _top(value_N: np.ndarray, name: str, request_N: np.ndarray) -> list[tuple[float, str, int]]:
    """The MAX_LARGEST values by magnitude, each with `name` and its request."""
    order = np.argsort(-np.abs(value_N), kind="stable")[:MAX_LARGEST]
    return [(float(value_N[n]), name, int(request_N[n])) for n in order.tolist()]


def rows(report: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of text for a batch: the reason, the origin, then the contents."""
    yield "why", report["reason"]
    for finding in report["findings"]:
        yield "not finite", finding
    restored = (
        f"{report['manifest']} (checksum {report['manifest_checksum']})"
        if report["manifest"]
        else "the beginning"
    )
    yield (
        "when",
        f"{clock(report['time_ms'])} UTC, worker {report['worker']}, step {report['step']:,}, incarnation "
        f"{report['incarnation']}",
    )
    yield "restored", restored
    for figures in report["records"]:
        where = (
            f"{figures['topic']}-{figures['partition']} {figures['first_offset']}..{figures['last_offset']}"
        )
        yield (
            "records",
            f"{where}: {figures['count']:,}, {figures['bytes']:,} bytes, {clock(figures['first_ms'])} to "
            f"{clock(figures['last_ms'])}",
        )
    if report["left_out"]:
        yield "not saved", f"{report['left_out']:,} more records, above the limit"
    for reason, count in report["rejects"].items():
        yield "not decoded", f"{count:,}: {reason}"
    yield (
        "batch",
        f"{report['requests']:,} requests, {report['candidates']:,} candidates, {report['corrections']:,} "
        "corrections",
    )
    for task, figures in report["tasks"].items():
        yield (
            f"label {task}",
            f"mean {figures['label_mean']:.4f}, weight {figures['weight']:.6g}, the largest "
            f"{figures['largest_weight']:.6g}",
        )
    for name, figures in report["features"].items():
        yield name, _feature(figures)
    for value in report["largest"]:
        topic = "corrections" if value["correction"] else "samples"
        where = f"{topic}-{value['partition']} offset {value['offset']}"
        yield "largest", f"{value['feature']} = {value['value']:.6g} in {where}"


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
