"""Batches in which users send several requests, with histories that grow or stay the same in between."""

from __future__ import annotations

import dataclasses

import numpy as np

from roostream.wire.batch import Batch
from roostream.wire.jagged import Jagged
from tests.models.model_cases import NOW_MS, make_batch, make_schema

MAX_HISTORY = 5


def returning_users_batch(
    visits: list[tuple[int, int]], seed: int = 0, *, same_floats: bool = False
) -> Batch:
    """Build a batch of the schema "everything" with one request for each (user, clicks so far).

    With `same_floats`, all requests of a user have equal float features.
    """
    schema = make_schema("everything")
    batch = make_batch(schema, [1 + n % 4 for n in range(len(visits))], seed)
    rng = np.random.default_rng(seed)
    max_clicks = max((clicks for _, clicks in visits), default=0)
    streams = {
        user: rng.integers(0, 30, (max_clicks, 2)) % [30, 3] for user in sorted({user for user, _ in visits})
    }
    rows = [np.arange(clicks)[::-1][:MAX_HISTORY] for _, clicks in visits]
    entries = [streams[user][indices] for (user, _), indices in zip(visits, rows, strict=True)]
    entry_L2 = np.concatenate([np.zeros((0, 2), np.int64), *entries])
    time_L = NOW_MS - 10**7 + 1000 * np.concatenate([np.zeros(0, np.int64), *rows])
    user_R = np.array([user for user, _ in visits], dtype=np.int64)
    one_R = np.ones(len(visits), dtype=np.int32)
    lists = Jagged(
        keys=batch.ro_lists.keys,
        lengths_KN=np.stack([one_R, np.array([len(indices) for indices in rows], dtype=np.int32), one_R]),
        values=np.concatenate([user_R, entry_L2[:, 0], 0 * user_R]),
        present_KN=np.ones((3, len(visits)), dtype=np.bool_),
        weights=np.ones(2 * len(visits) + len(entry_L2), dtype=np.float32),
        columns={"history.action": entry_L2[:, 1].copy(), "history.time": time_L},
    )
    assert lists.keys == ("user", "history", "topics")
    changes: dict[str, np.ndarray] = {}
    if same_floats:
        first = {user: n for n, (user, _) in reversed(list(enumerate(visits)))}
        first_visit_R = np.array([first[user] for user, _ in visits], dtype=np.int64)
        changes = {name: getattr(batch, name)[first_visit_R] for name in ("ro_float_RF", "ro_present_RF")}
    return dataclasses.replace(batch, ro_lists=lists, **changes)


GROWING_HISTORIES = [(1, 4), (2, 7), (1, 5), (3, 0), (2, 8), (1, 6), (2, 9), (3, 2), (1, 7)]
"""Each visit of a user has more clicks than the user's visit before. The visits of the users alternate."""
UNCHANGED_HISTORIES = [(1, 4), (2, 7), (1, 4), (2, 7), (1, 4), (3, 0), (3, 0), (2, 8), (1, 4)]
"""Most visits of a user have the same clicks as the user's visit before."""
