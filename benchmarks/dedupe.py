"""What does it cost to find what requests of a batch share?

The cost of finding duplicates, compared with other work on the same batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np

from benchmarks.common.dataset_paths import EBNERD, absent
from benchmarks.common.rebatch import cut
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.recd import clustered, users_batch
from roostream.wire.batch import Batch
from roostream.wire.dedup import find_inverse, find_partial_dedup, request_values
from roostream.wire.lookup import build_lookup

Way = Callable[[Batch], object]
WAYS: dict[str, Way] = {
    "exact, all request-only features": lambda batch: find_inverse(request_values(batch), batch.num_requests),
    "partial, the history": lambda batch: find_partial_dedup(batch.ro_lists, "history"),
    "look-up": build_lookup,
    "look-up, deduplicated": lambda batch: build_lookup(batch, deduplicated=True),
    "copy of the lists": lambda batch: batch.ro_lists.take_rows(np.arange(batch.num_requests)),
}


@contextlib.contextmanager
def found(way: str, users: int, history: int, requests: int) -> Iterator[Work]:
    """Find duplicates in batches of about `requests` requests, sorted by user. The unit of work is a
    request."""
    whole = clustered(users_batch(users, history))
    batches = cut(whole, max(round(requests * whole.num_candidates / whole.num_requests), 1))

    def step() -> None:
        for batch in batches:
            WAYS[way](batch)

    yield Work(step, sum(b.num_requests for b in batches), functools.cache(lambda: factors(batches)))


def factors(batches: list[Batch]) -> Mapping[str, float]:
    """Entries over entries that remain, of the history and of everything."""
    total = sum(b.ro_lists.total_of("history") for b in batches)
    kept = sum(len(find_partial_dedup(b.ro_lists, "history").entry_V) for b in batches)
    rows = sum(b.num_requests for b in batches)
    unique = sum(find_inverse(request_values(b), b.num_requests).num_unique for b in batches)
    return {
        "history, partial": total / max(kept, 1),
        "requests, exact": rows / max(unique, 1),
        "entries a request": total / rows,
    }


_FOUND = "benchmarks.dedupe:found"
_USERS = 60
_WAYS: tuple[tuple[str, Literal["ours", "stage", "limit"]], ...] = (
    ("look-up, deduplicated", "ours"),
    ("look-up", "stage"),
    ("partial, the history", "stage"),
    ("exact, all request-only features", "stage"),
    ("copy of the lists", "limit"),
)


def _row(history: int, requests: int) -> Row:
    return Row(
        name=f"histories of {history}, batches of {requests} requests",
        unit="requests",
        clock="cpu",
        subjects=tuple(
            Subject(name, _FOUND, (name, _USERS, history, requests), role) for name, role in _WAYS
        ),
        skipped=absent(EBNERD),
    )


BENCHMARK = Benchmark(
    name="dedupe",
    summary="What does it cost to find what requests of a batch share?",
    rows=(_row(50, 64), _row(50, 364), _row(500, 364)),
    interpretation="""\
Requests of 60 of EB-NeRD's users, clustered. exact: the index of all request-only features as one group (RecD's IKJT). partial:
spans of the history with its columns. The look-up hashes each entry that remains instead of each entry; deduplicated, both forms
are found first. RecD's readers pay 11 to 37 % more for conversion (§6.3).""",
)
