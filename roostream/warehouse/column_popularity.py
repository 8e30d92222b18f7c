"""Column order by popularity: features that sessions read together are stored side by side
(docs/decisions/0060).

Each session leaves a small object, `popularity/asked/<version>-<digest>`, that names its features; the newest
ones count. The column order that follows is stored as `popularity/columns`
(roostream/warehouse/warehouse.py). The compactor writes sealed files in that order, so that a reader gets its
columns in fewer requests; existing files stay as they are.
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
    """Record which features of `schema` a session (`digest`, over the table's `version`) reads. Idempotent.

    Nothing is recorded if the store is unavailable: the order is not worth an error.
    """
    with contextlib.suppress(UnavailableError):
        if not store.create(f"{_ASKED}/{version:012d}-{digest}", json.dumps(sorted(features)).encode()):
            return
        for name in store.list(_ASKED)[:-MAX_SESSIONS]:
            store.delete(name)
        store.put(
            COLUMN_ORDER, json.dumps(column_order(schema, hit_rates(recent_session_features(store)))).encode()
        )


def recent_session_features(store: CheckpointStore) -> list[frozenset[str]]:
    """The features of the newest sessions, oldest first; an unreadable record counts as no features.

    Raises:
        UnavailableError: the store cannot be read now.
    """
    found = []
    for name in store.list(_ASKED)[-MAX_SESSIONS:]:
        try:
            features = json.loads(store.get(name))
        except (CheckpointError, ValueError):  # deleted meanwhile, or damaged
            continue
        names = features if isinstance(features, list) else []
        found.append(frozenset(name for name in names if isinstance(name, str)))
    return found


def hit_rates(sessions: Iterable[Collection[str]]) -> dict[str, float]:
    """Feature → share of sessions that read it, largest first, ties by name."""
    feature_sets = [set(features) for features in sessions]
    counts = Counter(feature for features in feature_sets for feature in features)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return {feature: count / len(feature_sets) for feature, count in ranked}


def interleave_by_hit_rate(widths: Sequence[float], rates: Sequence[float]) -> list[int]:
    """Order of columns by width, widest first, so that holes between needed columns are narrow where they are
    over-read.

    Columns of one width are ordered by hit rate, alternately ascending and descending, so that popular
    columns of neighboring widths lie next to each other. Stable.
    """
    out: list[int] = []
    for turn, width in enumerate(sorted(set(widths), reverse=True)):
        columns = [n for n, one in enumerate(widths) if one == width]
        out += sorted(columns, key=lambda n: -rates[n] if turn % 2 else rates[n])
    return out


def column_order(schema: Schema, rates: Mapping[str, float]) -> list[str]:
    """All columns of a sample of `schema`: first those that every reader needs, then features by
    `interleave_by_hit_rate`.

    Without hit rates the order is as declared. Lists count as wider than single values, candidate features as
    wider than request features.
    """
    features = [(side, feature) for side in SIDES for feature in getattr(schema, side)]
    widths = [2.0 * feature.is_list + (side == "nro") for side, feature in features]
    hit_rate = [rates.get(feature.name, 0.0) for _, feature in features]
    ranked = interleave_by_hit_rate(widths, hit_rate) if any(hit_rate) else range(len(features))
    columns = [column for n in ranked for column in feature_columns(*features[n])]
    of_features = set(columns)
    return [name for name in column_types(schema) if name not in of_features] + columns
