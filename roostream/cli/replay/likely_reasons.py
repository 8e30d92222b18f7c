"""Likely reasons why a model is not ahead of the baselines, from facts of its replay, with what to change.

`reasons_of` reads only the schema, the settings and the report, so each reason can be checked there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from roostream.online.counters import STATELESS_FEATURES, sources_of
from roostream.replay.config import ReplayConfig
from roostream.replay.log_advice import prior_of
from roostream.schema.counter_declaration import SHOWN
from roostream.schema.counter_plan import declared
from roostream.schema.schema import Schema
from trainer.monitoring.verdict import Verdict

MAX_REASONS = 3
_MAX_NAMED = 3
_MIN_SHARE = 0.5
"""A feature of the log that is present in fewer rows counts as missing."""
_MAX_LOST = 0.05
"""Share of engagements without a sample."""
_SHORT_LOG = 5000
"""Requests; on shorter logs training steps are scarce (docs/benchmarks/quality.md, Other logs)."""
_MANY_STEPS = 1000
_MAX_MEAN_BATCH = 16.0
"""265 steps in batches of 64 cost 1.3 % of NE against 1,193 steps (docs/benchmarks/quality.md)."""
_MAX_HALF_LIVES = 48
"""Length of a log in half-lives of its longest click rate."""
_FAR_FROM_PRIOR = 2.0
_MIN_POSITIVES = 100  # below this a base rate is too uncertain


class Reason(NamedTuple):
    """`fact` is what was found in the run, `change` the setting or input to change."""

    name: str
    fact: str
    change: str

    def sentence(self) -> str:
        return f"{self.fact}; {self.change}"


def likely_reasons(
    verdict: Verdict, schema: Schema, config: ReplayConfig, report: Mapping[str, Any]
) -> list[Reason]:
    """At most MAX_REASONS reasons, the likeliest first; none if the model is ahead or there is no verdict."""
    if verdict.state not in ("behind", "undecided"):
        return []
    found = list(reasons_of(verdict, schema, config, report))[:MAX_REASONS]
    if found:
        return found
    change = "compare settings of the model with --set model.KEY=VALUE, or another model with --model FILE"
    return [Reason("no_fault_found", "log, features and training show no common fault", change)]


def reasons_of(
    verdict: Verdict, schema: Schema, config: ReplayConfig, report: Mapping[str, Any]
) -> Iterator[Reason]:
    """All reasons whose fact is true, faults of log and labels first. The keys of `report` that are read:
    counts, log, positives, base_rates, training, settings."""
    nearest = {each.metric: each.nearest for each in verdict.comparisons if each.state != "ahead"}
    yield from _labels(config, report)
    yield from _values(schema, report)
    yield from _frozen(config, report)
    yield from _counters(schema, report, set(nearest.values()))
    yield from _inputs(schema, report)
    yield from _amount_of_training(config, report)
    if verdict.ne.state in ("behind", "undecided"):
        yield from _priors(schema, report)
    if "linear" in nearest.values():
        yield Reason(
            "linear_is_better",
            "the model is not clearly better than a linear one on the same floats, so it learns slowly",
            "try --learning-rate 0.005",
        )
    if nearest.get("request_auc") == "place":
        yield Reason(
            "positions_explain_clicks",
            "positions explain most positives, because users take what is on top",
            "explore in serving and log propensities, or keep the position out of the judgement",
        )


def _labels(config: ReplayConfig, report: Mapping[str, Any]) -> Iterator[Reason]:
    """Engagements that became no label."""
    counts = report["counts"]
    dead = counts["dead_engagements"]
    late = 0 if config.early_close_ms or report["training"]["corrections"] else counts["corrected"]
    if dead + late <= _MAX_LOST * counts["engagements"]:
        return
    share = (dead + late) / counts["engagements"]
    letter = max(counts["dead_letters"], key=counts["dead_letters"].__getitem__, default="")
    if late > dead or letter == "too_late":
        fact = f"{share:.0%} of the engagements came after the join window and were not trained"
        change = f"use a --window longer than {config.window_ms / 1000:g} s"
    else:
        fact = f"{share:.0%} of the engagements belong to no list (mostly {letter!r})"
        change = "give engagements the request_id, user_id and session_id of their request"
    yield Reason("labels_lost", fact, change)


def _values(schema: Schema, report: Mapping[str, Any]) -> Iterator[Reason]:
    """Features of the log that are missing, and floats that are always equal."""
    sources = sources_of(schema, "ro") | sources_of(schema, "nro")
    seen = {name: f for name, f in report["log"]["features"].items() if f["share"] is not None}
    missing = {
        name: f["share"] for name, f in seen.items() if name not in sources and f["share"] < _MIN_SHARE
    }
    if missing:
        named = [f"{name!r} ({share:.0%} of rows)" for name, share in missing.items()]
        yield Reason(
            "features_missing",
            f"features are missing in the log: {_some(named)}",
            "add them to the log under these names, or remove them from the schema",
        )
    constant = {
        name: f["min"]
        for name, f in seen.items()
        if f["kind"] == "float"
        and sources.get(name) not in STATELESS_FEATURES
        and f["share"] == 1
        and f["min"] == f["max"]
    }
    if constant:
        named = [f"{name!r} is always {value:g}" for name, value in constant.items()]
        yield Reason(
            "features_constant",
            f"features never change: {_some(named)}",
            "check how the log writes them, or remove them from the schema",
        )


def _frozen(config: ReplayConfig, report: Mapping[str, Any]) -> Iterator[Reason]:
    last_ms = report["metrics"]["overall"]["last_ms"] or 0
    if 0 < config.freeze_weights_at_ms <= last_ms:
        flag = "--freeze-at" if config.freeze_at else "--freeze-weights-at"
        parts = "weights and counters" if config.freeze_at else "weights"
        yield Reason("frozen", f"{parts} stop learning during the log", f"remove {flag}")


def _counters(schema: Schema, report: Mapping[str, Any], nearest: set[str]) -> Iterator[Reason]:
    """Counters that count nothing, or that the model does not see as the baselines see them."""
    counters = declared(schema)
    wanted = {*sources_of(schema, "ro").values(), *sources_of(schema, "nro").values()} & counters.keys()
    actions = report["log"]["actions"]
    unseen = sorted({counters[name].event or schema.online.click for name in wanted} - {SHOWN, *actions})
    if report["log"]["impressions"] and unseen:
        yield Reason(
            "counted_action_missing",
            f"counters count the action {unseen[0]!r}, which the log does not have",
            f"set [online] click or the counter's event to one of {_some(sorted(actions)) or 'its actions'}",
        )
    rates = {
        name: counters[source].half_life_ms
        for name, source in sources_of(schema, "nro").items()
        if source in counters
        and "item" in counters[source].entity
        and counters[source].aggregation in ("rate", "expected")
    }
    span_ms = report["log"]["last_ms"] - report["log"]["first_ms"]
    longest_ms = max(rates.values(), default=0) if all(rates.values()) else 0  # 0 = one never forgets
    if "item" in nearest and 0 < longest_ms < span_ms / _MAX_HALF_LIVES:
        yield Reason(
            "rates_forget",
            f"click rates forget half in {longest_ms / 3_600_000:g} h at most, but the log spans "
            f"{span_ms / 3_600_000:,.0f} h and a rate that never forgets is better",
            'add longer half-lives: [[nro]] online = "{clicks,views,ctr}_24h"',
        )
    if not rates:
        yield Reason(
            "no_click_rates",
            "no feature says how often an item is clicked, which the baselines know",
            'add [[nro]] online = "{views,ctr,expected}_{1h,24h}"',
        )
    compared = {t.input for t in schema.transforms if t.op in ("rank", "share")}
    if rates and not compared & rates.keys():
        yield Reason(
            "rates_not_compared",
            "click rates are not compared within the list",
            f'add [[transform]] inputs = ["{next(iter(rates))}"], op = ["rank", "share"]',
        )


def _inputs(schema: Schema, report: Mapping[str, Any]) -> Iterator[Reason]:
    """Ids and sequences that the model does not have."""
    ro, nro = sources_of(schema, "ro"), sources_of(schema, "nro")
    log = report["log"]
    if "item_id" not in nro.values() and not any(f.kind == "ids" for f in schema.nro):
        yield Reason(
            "no_item_id",
            "no feature is the candidate itself",
            'add [[nro]] name = "item", kind = "ids", table = "item"',
        )
    has_users = log["without_user"] < log["impressions"]
    if log["impressions"] and log["without_user_and_session"] > _MIN_SHARE * log["impressions"]:
        share = log["without_user_and_session"] / log["impressions"]
        yield Reason(
            "no_user_in_log",
            f"{share:.0%} of the requests have neither user nor session",
            "log user_id (or session_id) with every impression and engagement",
        )
    elif has_users and not any(f.kind == "ids" for f in schema.ro) and "user_id" not in ro.values():
        yield Reason(
            "no_user_id",
            "the model does not know which user asks",
            'add [[ro]] name = "user", kind = "ids", table = "user"',
        )
    has_histories = log["without_user_and_session"] < log["impressions"]
    if has_histories and not any(f.kind == "sequence" for f in schema.ro):
        who, counter, online = "user", "", "history"
        if not has_users:
            who, online = "session", "session_history"
            counter = f'[[counter]] name = "{online}", entity = "session", aggregation = "history" and '
        yield Reason(
            "no_history",
            f"the model does not see what the {who} clicked before",
            f'add {counter}[[ro]] name = "history", kind = "sequence", table = "item", online = "{online}"',
        )


def _amount_of_training(config: ReplayConfig, report: Mapping[str, Any]) -> Iterator[Reason]:
    """Few requests, or few steps for them."""
    samples, training = report["counts"]["samples"], report["training"]
    if training["non_finite"]:
        yield Reason(
            "non_finite",
            f"{training['non_finite']} requests gave numbers that are not finite and were not trained",
            "look for huge values among the features, and lower --learning-rate",
        )
    rehearsed = training["rehearsed"] or 0
    if training["steps"] and samples:
        steps = training["steps"] * samples / (samples + rehearsed)  # those with new requests
        if samples > _MAX_MEAN_BATCH * steps and steps < _MANY_STEPS:
            yield Reason(
                "batches_too_large",
                f"{samples:,} requests are only {steps:,.0f} training steps, {samples / steps:.0f} a step",
                "use smaller batches: --set worker.first_batch_requests=8 --batch-requests 16",
            )
    if 0 < samples < _SHORT_LOG:
        fact = f"the log has only {samples:,} requests"
        can_rehearse = not rehearsed and not config.early_close_ms
        rehearse = "train recent requests twice: --set 'worker.rehearsal={batches=200}'"
        yield Reason("few_requests", fact, rehearse if can_rehearse else "replay a longer log")


def _priors(schema: Schema, report: Mapping[str, Any]) -> Iterator[Reason]:
    """A first label whose untrained prediction is far from its base rate."""
    label = schema.labels[0]
    rate = report["base_rates"].get(label.name, 0.0)
    prior = label.prior or float((report["training"]["model"] or {}).get("prior", 0.1))
    if report["positives"].get(label.name, 0) < _MIN_POSITIVES:
        return
    if not 1 / _FAR_FROM_PRIOR <= rate / prior <= _FAR_FROM_PRIOR:
        yield Reason(
            "prior_far_off",
            f"label {label.name!r} is positive for {rate:.2g} of the candidates, but an untrained model "
            f"predicts {prior:.2g}",
            f"set prior = {prior_of(rate)} in its [[label]]",
        )


def _some(names: list[str]) -> str:
    """The first names."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
