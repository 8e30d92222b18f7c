"""Advice about mistakes in a log or schema that are no errors. Each mistake gives one sentence, and a log
without mistakes gives none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Action, Event, Request
from roostream.replay.log_advice import advice
from roostream.replay.log_profile import LogProfile
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict

T0 = 1_700_000_000_000
RAW: dict[str, Any] = {
    "tables": {"item": {"dim": 4}},
    "ro": [{"name": "hour"}],
    "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "ctr_1h", "online": "ctr_1h"}],
    "label": [{"name": "click", "action": "click"}],
}


def events(action: str = "click", user: int = 5) -> list[Event]:
    shown = [Request(f"r{n}", user, 0, T0 + 10 * n, np.array([1, 2]), ro={"hour": 1.0}) for n in range(3)]
    return [shown[0], Action("r0", user, 0, T0 + 1, 1, 1, action), *shown[1:]]


def profile_of(schema: Schema, log: list[Event]) -> LogProfile:
    profile = LogProfile(schema)
    encoder = ReplayEncoder(schema, profile=profile)
    for event in log:
        encoder.record(event)
    return profile


def advice_for(
    change: dict[str, Any], log: list[Event], positives: dict[str, int] | None = None
) -> list[str]:
    schema = schema_from_dict(RAW | change)
    profile = profile_of(schema, log)
    rates = {label: n / profile.num_candidates for label, n in (positives or {}).items()}
    return advice(schema, profile, positives, rates)


def test_a_log_that_fits_its_schema_has_no_advice() -> None:
    assert advice_for({}, events(), {"click": 1}) == []


CASES: list[tuple[dict[str, Any], list[Event], str]] = [
    ({}, events("clik"), "did you mean 'click'?"),
    ({}, events("clik"), "label 'click': no engagement of the log has action 'click'; did you mean 'clik'?"),
    (
        {"label": [{"name": "open", "action": "open"}]},
        events("open"),
        "[online] click = 'click': no engagement of the log has this action",
    ),
    (
        {"nro": [*RAW["nro"], {"name": "article", "kind": "ids", "table": "item"}]},
        events(),
        "feature 'article' is missing",
    ),
    ({"ro": [*RAW["ro"], {"name": "age"}]}, events(), "feature 'age' is missing"),
    ({"tables": RAW["tables"] | {"brand": {"dim": 4}}}, events(), "table 'brand': no feature uses it"),
    ({}, events(user=0), "3 impressions have neither user_id nor session_id"),
    (
        {},
        [*events(), Request("r9", 5, 0, T0 + 99, np.array([3, 3]), ro={"hour": 1.0})],
        "1 lists show an item twice",
    ),
]


@pytest.mark.parametrize(("change", "log", "sentence"), CASES)
def test_each_mistake_is_reported_in_a_sentence(
    change: dict[str, Any], log: list[Event], sentence: str
) -> None:
    assert any(sentence in text for text in advice_for(change, log)), advice_for(change, log)


def test_the_id_0_of_a_field_that_counters_use_is_reported() -> None:
    """Many logs number categories from 0, and counters would be missing for the first one."""
    category = {"name": "category", "kind": "ids", "table": "item"}
    change: dict[str, Any] = {
        "nro": [*RAW["nro"], category, {"name": "by_category", "online": "by_category"}]
    }
    change["counter"] = [
        {
            "name": "by_category",
            "entity": ["category"],
            "event": "click",
            "aggregation": "rate",
            "half_life": "1h",
        }
    ]

    def log(*ids: int) -> list[Event]:
        values: dict[str, object] = {"category": [[id_] for id_ in ids]}
        impression = Request("r0", 5, 0, T0, np.array([1, 2]), ro={"hour": 1.0}, nro=values)
        return [impression, Action("r0", 5, 0, T0 + 1, 1, 1, "click")]

    (sentence,) = advice_for(change, log(0, 3))
    assert "feature 'category' has the id 0 in 1 rows" in sentence and "by_category" in sentence
    assert advice_for(change, log(1, 3)) == []
    without_counter = {"nro": [*RAW["nro"], category]}
    assert advice_for(without_counter, log(0, 3)) == []


def test_a_label_that_was_never_positive_is_reported_when_the_log_is_joined() -> None:
    assert advice_for({}, events()) == []
    (sentence,) = advice_for({}, events(), {"click": 0})
    assert "label 'click' was never positive, though the log has action 'click'" in sentence


def test_a_prior_far_from_the_log_is_reported() -> None:
    log: list[Event] = [
        Request(f"r{n}", 5, 0, T0 + n, np.arange(1, 101), ro={"hour": 1.0}) for n in range(20)
    ]
    log.append(Action("r0", 5, 0, T0 + 50, 1, 1, "click"))
    (sentence,) = advice_for({}, log, {"click": 7})
    assert "positive for 0.0035 of the candidates" in sentence and "prior = 0.0035" in sentence
    label = {"name": "click", "action": "click", "prior": 0.0035}
    assert advice_for({"label": [label]}, log, {"click": 7}) == []
    (sentence,) = advice_for({}, log, {"click": 1999})
    prior = float(sentence.split("prior = ")[1].split()[0])
    assert schema_from_dict(RAW | {"label": [label | {"prior": prior}]}).labels[0].prior == prior
    (sentence,) = advice_for({}, log, {"click": 2000})
    assert "every candidate" in sentence
