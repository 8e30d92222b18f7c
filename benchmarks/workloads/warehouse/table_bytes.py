"""Writing a log's samples into one file: its bytes an impression."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.question import Work
from benchmarks.workloads.warehouse import rows_at_rest
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
