"""How many bytes does an impression take at rest?

Writes the samples of a log into one file and reports its bytes per impression.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from benchmarks.common import rows_at_rest
from benchmarks.common.dataset_paths import EBNERD, MIND, absent
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, Work
from roostream.wire.records import Record


@contextlib.contextmanager
def written(
    name: str, history: int, rows: str, order: str, encoding: str = "ours", users: int = 1 << 30
) -> Iterator[Work]:
    """`encoding`: ours, pyarrow, or ours without counters."""
    its = rows_at_rest.log(name, history, users)
    if encoding == "without counters":
        its, encoding = rows_at_rest.without_counters(its), "ours"
    size = 0

    def step() -> None:
        nonlocal size
        size = len(rows_at_rest.written(rows_at_rest.ordered(its, rows, order), its.schema, encoding))

    candidates = its.batch.num_candidates
    yield Work(step, lambda: candidates, lambda: {"bytes an impression": size / candidates})


@contextlib.contextmanager
def on_the_wire(name: str, history: int, users: int = 1 << 30) -> Iterator[Work]:
    """What the topic holds before a producer compresses it."""
    its = rows_at_rest.log(name, history, users)

    def joined(records: list[Record]) -> int:
        return len(b"".join(record.value or b"" for record in records))

    yield Work(
        lambda: joined(its.records),
        its.batch.num_candidates,
        lambda: {"bytes an impression": joined(its.records) / its.batch.num_candidates},
    )


_HERE = "benchmarks.warehouse_bytes"
WAYS = (
    ("requests, by user", ("requests", "user", "ours")),
    ("requests, in time order", ("requests", "time", "ours")),
    ("requests, by user, as pyarrow encodes", ("requests", "user", "pyarrow")),
    ("impressions, by user", ("impressions", "user", "ours")),
    ("impressions, in time order", ("impressions", "time", "ours")),
    ("impressions, mixed within the hour", ("impressions", "mixed", "ours")),
    ("requests, by user within the day", ("requests", "day", "ours")),
    ("impressions, by user within the day", ("impressions", "day", "ours")),
    ("requests, by user, without counters", ("requests", "user", "without counters")),
    ("impressions, mixed, without counters", ("impressions", "mixed", "without counters")),
)


def _saved(told: Mapping[str, SubjectResult]) -> dict[str, float]:
    size = {name: one.figures["bytes an impression"] for name, one in told.items()}
    mixed, ours = size["impressions, mixed within the hour"], size["requests, by user"]
    return {
        "mixed impressions to impressions by user": mixed / size["impressions, by user"],
        "mixed impressions to requests by user": mixed / ours,
        "mixed impressions to requests by user within the day": mixed
        / size["requests, by user within the day"],
        "mixed impressions to impressions by user within the day": mixed
        / size["impressions, by user within the day"],
        "mixed impressions to requests by user, without counters": size[
            "impressions, mixed, without counters"
        ]
        / size["requests, by user, without counters"],
        "pyarrow's encodings to ours": size["requests, by user, as pyarrow encodes"] / ours,
    }


def _log(name: str, history: int, where: str, skipped: str) -> Row:
    peers = [
        Subject(way, f"{_HERE}:written", (name, history, *how), "peer" if n else "ours")
        for n, (way, how) in enumerate(WAYS)
    ]
    wire = Subject("on the wire, not compressed", f"{_HERE}:on_the_wire", (name, history), "peer")
    return Row(
        name=f"{name}, {where}",
        unit="impressions",
        clock="cpu",
        subjects=(*peers, wire),
        derives=_saved,
        skipped=skipped,
    )


BENCHMARK = Benchmark(
    name="warehouse-bytes",
    summary="How many bytes does an impression take at rest, and what of it is order and encoding?",
    rows=(
        _log("EB-NeRD", 50, "histories of up to 50", absent(EBNERD)),
        _log("EB-NeRD", 500, "histories of up to 500", absent(EBNERD)),
        _log("MIND", 50, "its first 2,000 requests", absent(MIND)),
    ),
    interpretation="""\
The log's samples in one Parquet file, row groups of 4,096 requests (or about as many impressions), zstd 3: the speed is that
of writing, the figures are bytes an impression. "Ours" are dictionaries for ids, floats split by byte, times as differences;
pyarrow by itself takes dictionaries for everything. Impression rows repeat what a request has; mixed, they lie as dense
traffic interleaves them, which is where RecD starts from (3.71 and 2.06 times by clustering, its paper says); by user, a
page's window sees the repeats.

EB-NeRD has 15.5 requests a user in its week and noisy counters of candidates, which nothing compresses: the row without them
says what a log of request features would save. MIND's first 2,000 requests hardly meet a user twice, so that order is worth
little there.""",
    slice_s=0.01,
    rounds=1,
)
