"""Forms in which the same impressions reach training: requests, impressions, or deduplicated tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.common.rebatch import Rebatcher, concatenate, cut, shuffled
from roostream.wire.batch import Batch
from roostream.wire.dedup import group_impressions


class Arrival(NamedTuple):
    """What arrives, and the batches that are trained. What it takes to make one of the other is a part of the
    step."""

    arriving: Sequence[Batch]
    trained: Iterator[Batch]


def requests(pool: Sequence[Batch], size: int) -> Arrival:
    """Requests, trained as they are."""
    return Arrival(pool, itertools.cycle(pool))


def first_of_each(pool: Sequence[Batch], size: int) -> Arrival:
    """A quarter of a batch of requests of which only the first candidate was shown; where they are fewer,
    they come again."""
    whole = concatenate(pool)
    first_R = whole.num_candidates_R.cumsum() - whole.num_candidates_R
    firsts = [whole.expand().take_requests(first_R[np.arange(max(size // 4, 2)) % len(first_R)])]
    return Arrival(firsts, itertools.cycle(firsts))


def one(pool: Sequence[Batch], size: int) -> Arrival:
    """A single impression."""
    alone = [pool[0].expand().take_requests(pool[0].num_candidates_R[:1] - 1)]
    return Arrival(alone, itertools.cycle(alone))


def adapted(pool: Sequence[Batch], size: int) -> Arrival:
    """Requests, made impressions and cut into batches again in the step (ROO paper §2.1.3)."""
    return Arrival(pool, _rebatched(itertools.cycle(pool), size))


def impressions(pool: Sequence[Batch], size: int) -> Arrival:
    """Impressions, each with all that its request has, in random order, trained as they are."""
    twins = cut(shuffled(concatenate(pool).expand()), size)
    return Arrival(twins, itertools.cycle(twins))


def recd(pool: Sequence[Batch], size: int) -> Arrival:
    """Impressions of a clustered log: those of a request next to each other. Made deduplicated tensors in the
    step."""
    twins = cut(concatenate(pool).expand(), size)
    return Arrival(twins, map(group_impressions, itertools.cycle(twins)))


FORMS: dict[str, Callable[[Sequence[Batch], int], Arrival]] = {
    "requests": requests,
    "adapter": adapted,
    "impressions": impressions,
    "recd": recd,
    "first of each": first_of_each,
    "one impression": one,
}


def _rebatched(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    rebatcher = Rebatcher(size)
    for batch in batches:
        yield from rebatcher.add(batch)
