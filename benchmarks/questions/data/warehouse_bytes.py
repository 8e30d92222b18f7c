"""How many bytes does an impression take at rest?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.question import Question, Row, Subject, Told
from benchmarks.workloads.sharing.shared_data import EBNERD, MIND, absent

_HERE = "benchmarks.workloads.warehouse.table_bytes"
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


def _saved(told: Mapping[str, Told]) -> dict[str, float]:
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


QUESTION = Question(
    name="warehouse-bytes",
    asks="How many bytes does an impression take at rest, and what of it is order and encoding?",
    rows=(
        _log("EB-NeRD", 50, "histories of up to 50", absent(EBNERD)),
        _log("EB-NeRD", 500, "histories of up to 500", absent(EBNERD)),
        _log("MIND", 50, "its first 2,000 requests", absent(MIND)),
    ),
    means="""\
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
