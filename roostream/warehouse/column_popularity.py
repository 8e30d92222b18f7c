"""Which features are read together, learned from what sessions asked for: what most of them ask for lies side by side in a file,
and wide columns apart from narrow ones, so that a reader gets its columns in fewer requests (docs/decisions/0075).

A session that asks for some of the features leaves a small object, `popularity/asked/<version>-<digest>`; the newest of these
count. From them comes `popularity/columns` (roostream/warehouse/warehouse.py), which whoever writes files reads; files that are there stay as
they are.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.schema import Schema
from roostream.warehouse.statistics import SIDES
from roostream.warehouse.warehouse import COLUMN_ORDER
from roostream.wire.columnar import column_types, feature_columns

MAX_SESSIONS = 200
_ASKED = "popularity/asked"


def record_session_features(
    store: CheckpointStore, schema: Schema, version: int, digest: str, features: Collection[str]
) -> None:
    """A session (`digest`, of the table's `version`) asks for these features of `schema`. Idempotent. Where the store can't be
    read or written now, nothing is noted: an order is worth no error."""
    with contextlib.suppress(UnavailableError):
        if not store.create(f"{_ASKED}/{version:012d}-{digest}", json.dumps(sorted(features)).encode()):
            return
        for name in store.list(_ASKED)[:-MAX_SESSIONS]:
            store.delete(name)
        store.put(COLUMN_ORDER, json.dumps(column_order(schema, hit_rates(asked(store)))).encode())


def asked(store: CheckpointStore) -> list[frozenset[str]]:
    """What the newest sessions asked for, oldest first; one that can't be understood asked for nothing.

    Raises:
        UnavailableError: the store can't be read now.
    """
    found = []
    for name in store.list(_ASKED)[-MAX_SESSIONS:]:
        try:
            said = json.loads(store.get(name))
        except (CheckpointError, ValueError):  # another one forgot it, or it is damaged
            continue
        found.append(
            frozenset(f for f in said if isinstance(f, str)) if isinstance(said, list) else frozenset()
        )
    return found


def hit_rates(sessions: Iterable[Collection[str]]) -> dict[str, float]:
    """Feature → share of sessions that asked for it, largest first, by name where equal."""
    all_of_them = [set(features) for features in sessions]
    counts = Counter(feature for features in all_of_them for feature in features)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return {feature: count / len(all_of_them) for feature, count in ranked}


def interleave_by_hit_rate(widths: Sequence[float], rates: Sequence[float]) -> list[int]:
    """Places of columns, the widest first: those of one width together, since a narrow hole may be read in vain and a wide one
    not; of one width by how often they are asked for, alternately upwards and downwards, so that what is asked for most lies
    next to what is asked for most. Stable."""
    out: list[int] = []
    for turn, width in enumerate(sorted(set(widths), reverse=True)):
        its = [n for n, one in enumerate(widths) if one == width]
        out += sorted(its, key=lambda n: -rates[n] if turn % 2 else rates[n])
    return out


def column_order(schema: Schema, rates: Mapping[str, float]) -> list[str]:
    """Every column of a sample of `schema`: what each reader needs, then features as `interleave_by_hit_rate` has them; as declared where
    nobody has asked for any. Lists are wider than single values, and what a candidate has than what its request has."""
    features = [(side, feature) for side in SIDES for feature in getattr(schema, side)]
    widths = [2.0 * feature.is_list + (side == "nro") for side, feature in features]
    asked_for = [rates.get(feature.name, 0.0) for _, feature in features]
    ranked = interleave_by_hit_rate(widths, asked_for) if any(asked_for) else range(len(features))
    columns = [column for n in ranked for column in feature_columns(*features[n])]
    of_features = set(columns)
    return [name for name in column_types(schema) if name not in of_features] + columns
