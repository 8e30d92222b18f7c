"""Clicks from before the log into counters that are empty, in bulk: the same states as one `apply_engagement` each.

One difference: of a user with more items than are kept (MAX_USER_ITEMS), those clicked last are kept with all their clicks,
while event by event an item that was dropped in between starts anew.

Letters: N clicks, H clicks of a user, I items, P items of a user.
"""

from __future__ import annotations

import numpy as np

from roo.counter_state import CLICK, MAX_USER_ITEMS, NEVER, User, add_event, item_bytes, new_items
from roo.counters import Counters
from roo.ids import hash64, signed


def seed(counters: Counters, users_N: np.ndarray, items_N: np.ndarray, times_N: np.ndarray) -> None:
    """int64 [N] each, times in ms and not falling. Replaces what the counters know of these users and items. The same click
    of a user twice counts once."""
    order_N = np.lexsort((np.arange(len(users_N)), times_N, items_N, users_N))
    clicks_N3 = np.stack([users_N, items_N, times_N], axis=1)[order_N]
    again_N = np.zeros(len(order_N), dtype=np.bool_)
    again_N[1:] = (clicks_N3[1:] == clicks_N3[:-1]).all(axis=1)
    kept_N = np.sort(order_N[~again_N])
    _seed_items(counters, items_N[kept_N], times_N[kept_N])
    users_N, items_N, times_N = users_N[kept_N], items_N[kept_N], times_N[kept_N]
    by_user_N = np.argsort(users_N, kind="stable")
    ids, starts = np.unique(users_N[by_user_N], return_index=True)
    for user_id, at_H in zip(ids.tolist(), np.split(by_user_N, starts[1:]), strict=True):
        counters.load_user(user_id, _user(counters, items_N[at_H], times_N[at_H]).to_bytes())


def _seed_items(counters: Counters, items_N: np.ndarray, times_N: np.ndarray) -> None:
    ids_I, index_N = np.unique(items_N, return_inverse=True)
    states = new_items(len(ids_I))
    for k, time_ms in enumerate(times_N.tolist()):
        add_event(states, index_N[k : k + 1], float(time_ms), CLICK)
    counters.load_items(ids_I, [item_bytes(states, at) for at in range(len(ids_I))])


def _user(counters: Counters, items_H: np.ndarray, times_H: np.ndarray) -> User:
    """The state of a user with these clicks, in time order, and no other events."""
    action = np.full(len(items_H), signed(hash64(counters.schema.online.click)), dtype=np.int64)
    history_H3 = np.stack([items_H, action, times_H], axis=1)[::-1][: counters.schema.online.history_len]
    ids_P, index_H = np.unique(items_H, return_inverse=True)
    newest_P = np.full(len(ids_P), NEVER, dtype=np.int64)
    np.maximum.at(newest_P, index_H, times_H)
    zeros_P, never_P = np.zeros_like(ids_P), np.full_like(ids_P, NEVER)
    items_P5 = np.stack([ids_P, zeros_P, np.bincount(index_H, minlength=len(ids_P)), never_P, newest_P], axis=1)
    kept_P = np.sort(np.lexsort((ids_P, -newest_P))[:MAX_USER_ITEMS])
    return User(history_H3=np.ascontiguousarray(history_H3), items_P5=np.ascontiguousarray(items_P5[kept_P]))
