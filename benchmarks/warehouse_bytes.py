"""How many bytes does an impression take at rest?

Writes the samples of a log into one file and reports its bytes per impression.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from benchmarks.common import rows_at_rest
from benchmarks.common.dataset_paths import EBNERD, MIND, absent
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, TurnResult, WholeTurn, Work


@contextlib.contextmanager
def written(
    name: str, history: int, rows: str, order: str, encoding: str = "ours", users: int = 1 << 30
) -> Iterator[WholeTurn]:
    """`encoding`: ours, pyarrow, or ours without counters."""
    log = rows_at_rest.log(name, history, users)
    if encoding == "without counters":
        log, encoding = rows_at_rest.without_counters(log), "ours"
    candidates = log.batch.num_candidates

    def turn() -> TurnResult:
        size = len(rows_at_rest.written(rows_at_rest.ordered(log, rows, order), log.schema, encoding))
        return TurnResult(candidates, None, {"bytes an impression": size / candidates})

    yield WholeTurn(turn, warm_up=turn)


@contextlib.contextmanager
def on_the_wire(name: str, history: int, users: int = 1 << 30) -> Iterator[Work]:
    """The bytes in the topic before a producer compresses them."""
    log = rows_at_rest.log(name, history, users)
    candidates, size = log.batch.num_candidates, sum(len(record.value) for record in log.records)
    figures = {"bytes an impression": size / candidates}
    yield Work(lambda: b"".join(record.value for record in log.records), candidates, lambda: figures)


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


def _saved(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    size = {name: one.figures["bytes an impression"] for name, one in results.items()}
    mixed, no_counters = (
        size["impressions, mixed within the hour"],
        size["impressions, mixed, without counters"],
    )
    return {
        "mixed impressions to impressions by user": mixed / size["impressions, by user"],
        "mixed impressions to requests by user": mixed / size["requests, by user"],
        "mixed impressions to requests by user within the day": mixed
        / size["requests, by user within the day"],
        "mixed impressions to impressions by user within the day": mixed
        / size["impressions, by user within the day"],
        "mixed impressions to requests by user, without counters": no_counters
        / size["requests, by user, without counters"],
        "pyarrow's encodings to ours": size["requests, by user, as pyarrow encodes"]
        / size["requests, by user"],
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
The samples of a log are written into one Parquet file with row groups of 4,096 requests (or about as many
impressions) and zstd 3. "Ours" uses dictionaries for ids, byte-split floats and delta-coded times; pyarrow
alone uses dictionaries for everything. Rows of impressions repeat the features of their request; "mixed"
interleaves them as dense traffic does, which is RecD's starting point (its paper gains 3.71 and 2.06 times
by clustering). EB-NeRD has 15.5 requests a user and noisy counters of candidates that do not compress; the
rows without counters show a log of request features. MIND's first 2,000 requests rarely repeat a user.""",
    slice_s=0.01,
    rounds=1,
)
