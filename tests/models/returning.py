"""Requests of users who come back: histories that moved on, or that are as they were."""

from __future__ import annotations

import dataclasses

import numpy as np

from roostream.wire.batch import Batch
from roostream.wire.jagged import Jagged
from tests.models.model_cases import NOW_MS, make_batch, make_schema

LONGEST = 5


def returning(visits: list[tuple[int, int]], seed: int = 0, *, as_before: bool = False) -> Batch:
    """Of the schema "everything", a request for each (user, clicks so far). `as_before`: users' floats don't
    change."""
    schema = make_schema("everything")
    batch = make_batch(schema, [1 + n % 4 for n in range(len(visits))], seed)
    rng = np.random.default_rng(seed)
    most = max((clicks for _, clicks in visits), default=0)
    streams = {
        user: rng.integers(0, 30, (most, 2)) % [30, 3] for user in sorted({user for user, _ in visits})
    }
    rows = [np.arange(clicks)[::-1][:LONGEST] for _, clicks in visits]
    entries = [streams[user][at] for (user, _), at in zip(visits, rows, strict=True)]
    entry_L2 = np.concatenate([np.zeros((0, 2), np.int64), *entries])
    time_L = NOW_MS - 10**7 + 1000 * np.concatenate([np.zeros(0, np.int64), *rows])
    user_R = np.array([user for user, _ in visits], dtype=np.int64)
    one_R = np.ones(len(visits), dtype=np.int32)
    lists = Jagged(
        keys=batch.ro_lists.keys,
        lengths_KN=np.stack([one_R, np.array([len(at) for at in rows], dtype=np.int32), one_R]),
        values=np.concatenate([user_R, entry_L2[:, 0], 0 * user_R]),
        present_KN=np.ones((3, len(visits)), dtype=np.bool_),
        weights=np.ones(2 * len(visits) + len(entry_L2), dtype=np.float32),
        columns={"history.action": entry_L2[:, 1].copy(), "history.time": time_L},
    )
    assert lists.keys == ("user", "history", "topics")
    changes: dict[str, np.ndarray] = {}
    if as_before:
        first = {user: n for n, (user, _) in reversed(list(enumerate(visits)))}
        like_R = np.array([first[user] for user, _ in visits], dtype=np.int64)
        changes = {name: getattr(batch, name)[like_R] for name in ("ro_float_RF", "ro_present_RF")}
    return dataclasses.replace(batch, ro_lists=lists, **changes)


MOVED_ON = [(1, 4), (2, 7), (1, 5), (3, 0), (2, 8), (1, 6), (2, 9), (3, 2), (1, 7)]
"""Each visit has a click more than the one before; two users' visits lie between each other."""
AS_BEFORE = [(1, 4), (2, 7), (1, 4), (2, 7), (1, 4), (3, 0), (3, 0), (2, 8), (1, 4)]
"""Most visits have none."""
