"""Warnings about a log and its schema together: mistakes that raise no error but prevent learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roostream.errors import nearest
from roostream.online.counters import STATELESS_FEATURES, sources_of
from roostream.replay.log_profile import LogProfile
from roostream.schema.counter_declaration import SHOWN
from roostream.schema.counter_plan import ITEM, REQUEST_FIELDS, declared
from roostream.schema.schema import Schema

_FAR_FROM_PRIOR = 5.0
_MIN_CANDIDATES = 1000  # below this a share is not significant
_MAX_NAMED = 5


def advice(
    schema: Schema,
    profile: LogProfile,
    positives: Mapping[str, int] | None = None,
    base_rates: Mapping[str, float] | None = None,
    prior: float = 0.1,
) -> list[str]:
    """One sentence for each problem: what was found, and what to do.

    `positives` is label → number of candidates with a label above 0, and `base_rates` their share by sampling
    weight, if the log was joined. `prior` is the prediction of the untrained model.
    """
    found = [
        *_actions(schema, profile),
        *_features(schema, profile),
        *_zero_ids(schema, profile),
        *_tables(schema),
    ]
    found += [*_lists(profile), *_times(profile)]
    return (
        found
        if positives is None
        else [*found, *_labels(schema, profile, positives, base_rates or {}, prior)]
    )


def _actions(schema: Schema, profile: LogProfile) -> Iterator[str]:
    wanted = {schema.online.click, *(label.action for label in schema.labels)}
    wanted |= {c.event for c in schema.counters} - {"", SHOWN}
    if unnamed := [a for a in profile.actions if a not in wanted]:
        shown = ", ".join(f"{a!r} ({profile.actions[a]}{nearest(a, wanted)})" for a in unnamed[:_MAX_NAMED])
        more = f" and {len(unnamed) - _MAX_NAMED} more" if len(unnamed) > _MAX_NAMED else ""
        yield f"actions that no [[label]], no [[counter]] and not [online] click uses: {shown}{more}"
    for label in schema.labels:
        if label.action not in profile.actions:
            near = nearest(label.action, profile.actions)
            yield f"label {label.name!r}: no engagement of the log has action {label.action!r}{near}"
    online = {source for side in ("ro", "nro") for source in sources_of(schema, side).values()}
    counters = declared(schema)
    wanted_by = {s: counters[s].event or schema.online.click for s in sorted(online) if s in counters}
    of_clicks = [s for s, event in wanted_by.items() if event == schema.online.click]
    for name, event in wanted_by.items():
        if event not in (SHOWN, schema.online.click, *profile.actions):
            near = nearest(event, profile.actions)
            yield f"counter {name!r}: no engagement of the log has action {event!r}{near}; it stays 0"
    if of_clicks and schema.online.click not in profile.actions:
        near = nearest(schema.online.click, profile.actions)
        yield (
            f"[online] click = {schema.online.click!r}: no engagement of the log has this action{near}; "
            f"{', '.join(of_clicks[:_MAX_NAMED])} count no clicks"
        )


def _features(schema: Schema, profile: LogProfile) -> Iterator[str]:
    coverage = profile.features()
    for side in ("ro", "nro"):
        sources = sources_of(schema, side)
        for f in getattr(schema, side):
            seen = coverage[f.name]
            if seen["share"] is None or sources.get(f.name) in STATELESS_FEATURES:
                continue
            if not seen["share"]:
                is_item = side == "nro" and f.kind == "ids"
                own = ', or set online = "item_id" if it is the candidate\'s id' if is_item else ""
                yield f"feature {f.name!r} is missing in every row; add it to the log{own}, or remove it"
            elif f.is_list and not seen["max"]:
                yield f"feature {f.name!r}: every list is empty"


def _zero_ids(schema: Schema, profile: LogProfile) -> Iterator[str]:
    online = {source for side in ("ro", "nro") for source in sources_of(schema, side).values()}
    counters = [c for name, c in declared(schema).items() if name in online]
    own = {*REQUEST_FIELDS, ITEM}  # their ids are those of the request and the candidate
    for feature, count in profile.zero_ids().items():
        if names := [c.name for c in counters if feature in c.entity and feature not in own]:
            yield (
                f"feature {feature!r} has the id 0 in {count} rows, which counters take as unknown: no "
                f"{', '.join(names[:_MAX_NAMED])}; number its values from 1, also in requests"
            )


def _tables(schema: Schema) -> Iterator[str]:
    features = (*schema.ro, *schema.nro)
    used = {f.table for f in features} | {t for f in features for t in f.column_tables.values()}
    for table in schema.tables:
        if table.name not in used:
            yield f"table {table.name!r}: no feature uses it; remove it"


def _lists(profile: LogProfile) -> Iterator[str]:
    if profile.num_with_repeats:
        yield f"{profile.num_with_repeats} lists show an item twice; the later position is dropped"
    if profile.num_anonymous:
        yield (
            f"{profile.num_anonymous} impressions have neither user_id nor session_id, and 0 counts as none: "
            "no history; if 0 is a user of yours, number users from 1, also in requests"
        )


def _times(profile: LogProfile) -> Iterator[str]:
    if profile.num_early:
        yield (
            f"{profile.num_early} engagements come before their request, by up to "
            f"{profile.max_early_ms / 1000:,.0f} s; if the times are of different clocks or time zones, "
            "correct those of the requests or of the engagements"
        )


def prior_of(share: float) -> str:
    """The `prior` for a label with this share of positives; it must be below 1."""
    return f"{min(share, 0.99):.2g}"


def _labels(
    schema: Schema,
    profile: LogProfile,
    positives: Mapping[str, int],
    base_rates: Mapping[str, float],
    prior: float,
) -> Iterator[str]:
    for label in schema.labels:
        count, predicted = positives.get(label.name, 0), label.prior or prior
        if not count and label.action in profile.actions:
            yield (
                f"label {label.name!r} was never positive, though the log has action {label.action!r}; "
                "check its threshold and window, and the ids of engagements"
            )
        if count and count == profile.num_candidates and label.objective == "event":
            yield (
                f"label {label.name!r} is positive for every candidate, so there is nothing to learn; log "
                "also the candidates that were shown without this action"
            )
            continue
        share = base_rates.get(label.name, 0.0)
        is_near = 1 / _FAR_FROM_PRIOR <= share / predicted <= _FAR_FROM_PRIOR
        if count and profile.num_candidates >= _MIN_CANDIDATES and not is_near:
            yield (
                f"label {label.name!r} is positive for {share:.2g} of the candidates, but the untrained "
                f"model predicts {predicted:.2g}; set prior = {prior_of(share)} in its [[label]]"
            )
