"""The impression-level twin of a batch: what training costs without request-level samples (ROO paper §2.1.3).

`Batch.expand` makes every candidate a request of its own; `Rebatcher` cuts the result into batches of a constant number of
impressions. Offsets move by whole messages, so what is left over is carried to the next batch and flushed short at a commit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from roo.batch import Batch
from roo.jagged import Jagged


class Rebatcher:
    """Not thread-safe. State: fewer than `size` impressions that wait for more."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._rest: Batch | None = None

    @property
    def num_waiting(self) -> int:
        return 0 if self._rest is None else self._rest.num_requests

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
        values=np.concatenate([np.zeros(0, np.int64), *(j.values_of(key) for key in first.keys for j in lists)]),
        present_KN=np.concatenate([j.present_KN for j in lists], axis=1),
        weights=None if first.weights is None else np.concatenate([np.zeros(0, np.float32), *given]),
        columns={name: np.concatenate([j.columns[name] for j in lists]) for name in first.columns},
    )
