"""What finding duplicates costs, beside what is done with the same batch anyway."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from benchmarks.question import Work
from benchmarks.workloads.sharing.ladder import clustered, users_batch
from benchmarks.workloads.sharing.rebatch import cut
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
    """Batches of so many requests, clustered by user; units are requests."""
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
