"""Which features are read together, learned from what sessions asked for: what most of them ask for lies in front of a file, so
that a reader finds its columns next to each other and gets them in fewer requests.

Each session leaves a small object, `asked/<time>-<name>.json`; the newest MOST_SESSIONS count. Files that are written next have
`column_order`; those that are there stay as they are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable

from roo.columnar import feature_columns, forms
from roo.errors import CheckpointError, ConfigError
from roo.schema import Schema
from runtime.checkpoint_store import CheckpointStore
from warehouse.statistics import SIDES

MOST_SESSIONS = 200
_NAME = re.compile(r"[a-z0-9_-]{1,64}")


def note_asked(store: CheckpointStore, session: str, features: Collection[str], time_ms: int) -> None:
    """A session asked for these features; older sessions beyond MOST_SESSIONS are forgotten. Idempotent for a session and time.

    Raises:
        ConfigError: a session's name that can't be one of an object. UnavailableError: the store can't be written now.
    """
    if not _NAME.fullmatch(session):
        raise ConfigError(f"expected a session's name of lower-case letters, digits, '_' and '-' (at most 64), got {session!r}")
    store.put(f"asked/{time_ms:014d}-{session}.json", json.dumps(sorted(features)).encode())
    for name in store.list("asked")[:-MOST_SESSIONS]:
        store.delete(name)


def asked(store: CheckpointStore) -> list[frozenset[str]]:
    """What the newest sessions asked for, oldest first; one that can't be understood asked for nothing.

    Raises:
        UnavailableError: the store can't be read now.
    """
    found = []
    for name in store.list("asked")[-MOST_SESSIONS:]:
        try:
            said = json.loads(store.get(name))
        except (CheckpointError, ValueError):  # another one forgot it, or it is damaged: an order is worth no error
            continue
        found.append(frozenset(f for f in said if isinstance(f, str)) if isinstance(said, list) else frozenset())
    return found


def hit_rates(sessions: Iterable[Collection[str]]) -> dict[str, float]:
    """Feature → share of sessions that asked for it, largest first, by name where equal."""
    all_of_them = [set(features) for features in sessions]
    counts = Counter(feature for features in all_of_them for feature in features)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return {feature: count / len(all_of_them) for feature, count in ranked}


def column_order(schema: Schema, rates: dict[str, float]) -> list[str]:
    """Every column of a sample of `schema`: what each reader needs, then features from the most asked for to the least; those
    that nobody asked for stay as declared."""
    features = [(side, feature) for side in SIDES for feature in getattr(schema, side)]
    ranked = sorted(features, key=lambda pair: -rates.get(pair[1].name, 0.0))  # stable
    columns = [column for side, feature in ranked for column in feature_columns(side, feature)]
    of_features = set(columns)
    return [name for name in forms(schema) if name not in of_features] + columns
