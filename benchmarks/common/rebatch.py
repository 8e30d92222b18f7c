"""The impression-level twin of batches: what training costs without request-level samples (ROO paper §2.1.3).

`Batch.expand` makes every candidate a request of its own, with all that its request has; `Rebatcher` cuts the
result into batches of a constant number of impressions, as the paper's adapter and the trainer behind it do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from roostream.wire.batch import Batch
from roostream.wire.jagged import Jagged


class Rebatcher:
    """Not thread-safe. State: fewer than `size` impressions that wait for more."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._rest: Batch | None = None

    def add(self, batch: Batch) -> list[Batch]:
        """The expanded batches of `size` impressions that are now complete, in order."""
        expanded = batch.expand()
        whole = expanded if self._rest is None else concatenate([self._rest, expanded])
        cuts = range(0, whole.num_requests - self.size + 1, self.size)
        out = [whole.take_requests(np.arange(at, at + self.size)) for at in cuts]
        left = np.arange(len(out) * self.size, whole.num_requests)
        self._rest = whole.take_requests(left) if len(left) else None
        return out

    def flush(self) -> Batch | None:
        """What waits, shorter than `size`; None if nothing does."""
        rest, self._rest = self._rest, None
        return rest


def cut(batch: Batch, size: int) -> list[Batch]:
    """Batches of whole requests with `size` impressions, or as many as is nearest; a rest below half of that
    is left out."""
    ends_R = np.cumsum(batch.num_candidates_R, dtype=np.int64)
    wanted = np.minimum(size * np.arange(1, round(batch.num_candidates / size) + 1), batch.num_candidates)
    over = np.searchsorted(ends_R, wanted)
    under = np.maximum(over - 1, 0)
    last = np.where(wanted - ends_R[under] < ends_R[over] - wanted, under, over)
    cuts = np.unique(np.concatenate([[0], last + 1]))
    return [batch.take_requests(np.arange(first, end)) for first, end in itertools.pairwise(cuts)]


def shuffled(batch: Batch) -> Batch:
    """The same requests in random order."""
    return batch.take_requests(np.random.default_rng(0).permutation(batch.num_requests))


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The requests of one or more batches of one schema, one batch behind the other."""
    first = batches[0]
    changes: dict[str, object] = {}
    for field in dataclasses.fields(first):
        values = [getattr(b, field.name) for b in batches]
        if isinstance(values[0], np.ndarray):
            changes[field.name] = np.concatenate(values)
        elif isinstance(values[0], Jagged):
            changes[field.name] = _concatenate_lists(values)
    shifts = np.cumsum([0, *(b.num_requests for b in batches[:-1])])
    moved = [b.request_index_B + shift for b, shift in zip(batches, shifts, strict=True)]
    changes["request_index_B"] = np.concatenate(moved)
    return dataclasses.replace(first, **changes)  # type: ignore[arg-type]


def _concatenate_lists(lists: Sequence[Jagged]) -> Jagged:
    first = lists[0]
    weights = [j.weights_of(key) for key in first.keys for j in lists]
    given = [w for w in weights if w is not None]
    return Jagged(
        keys=first.keys,
        lengths_KN=np.concatenate([j.lengths_KN for j in lists], axis=1),
        values=np.concatenate(
            [np.zeros(0, np.int64), *(j.values_of(key) for key in first.keys for j in lists)]
        ),
        present_KN=np.concatenate([j.present_KN for j in lists], axis=1),
        weights=None if first.weights is None else np.concatenate([np.zeros(0, np.float32), *given]),
        columns={name: np.concatenate([j.columns[name] for j in lists]) for name in first.columns},
    )
