"""The verdict of a replay report (is the model better than simple baselines?) and the likely reasons when it
is not. Each test replays a small generated log that has one known fault."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from roostream.cli.replay.likely_reasons import MAX_REASONS, likely_reasons, reasons_of
from roostream.cli.replay.replay_run import run
from roostream.replay import jsonl_log as jsonl
from roostream.replay.config import ReplayConfig
from roostream.schema.schema_file import load_schema
from trainer.monitoring.verdict import RULES, Baseline, Comparison, Verdict

START_MS = 1_700_000_000_000
SCHEMA = """
[tables."{item,user}"]
dim = 4

[[ro]]
name = "user"
kind = "ids"
table = "user"

[[ro]]
name = "history"
kind = "sequence"
table = "item"
online = "history"

[[nro]]
name = "item"
kind = "ids"
table = "item"

[[nro]]
name = "price"

[[nro]]
online = "ctr_1h"

[[label]]
name = "click"
action = "click"

[[transform]]
inputs = ["ctr_1h"]
op = "rank"
"""
HISTORY = SCHEMA[SCHEMA.index('[[ro]]\nname = "history"') : SCHEMA.index("[[nro]]")]
USER = SCHEMA[SCHEMA.index("[[ro]]") : SCHEMA.index('[[ro]]\nname = "history"')]
ITEM = SCHEMA[SCHEMA.index("[[nro]]") : SCHEMA.index('[[nro]]\nname = "price"')]
TRANSFORM = SCHEMA[SCHEMA.index("[[transform]]") :]
Line = dict[str, Any]
ClickProbability = Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]


def make_log(
    num_requests: int, click_probability: ClickProbability, num_candidates: int = 4, delay_ms: int = 10_000
) -> list[Line]:
    """Generate a log with a request every 20 s by one of 40 users. `click_probability(rng, items, prices)`
    returns the probability of a click on each candidate.
    """
    rng, lines = np.random.default_rng(0), list[Line]()
    for n in range(num_requests):
        items_n, prices_n = (
            rng.choice(30, num_candidates, replace=False) + 1,
            rng.normal(0, 1, num_candidates),
        )
        time_ms, user = START_MS + 20_000 * n, int(rng.integers(1, 41))
        key: Line = {"request_id": f"r{n}", "user_id": user, "session_id": user}
        candidates = {"item_id": items_n.tolist(), "price": prices_n.tolist()}
        lines.append({**key, "type": "impression", "time": time_ms, "candidates": candidates})
        clicked_n = rng.random(num_candidates) < click_probability(rng, items_n, prices_n)
        for item in items_n[clicked_n].tolist():
            click = {"type": "engagement", "time": time_ms + delay_ms, "item_id": item, "action": "click"}
            lines.append({**key, **click})
    return lines


def clicks_at_random(rng: np.random.Generator, items_n: np.ndarray, prices_n: np.ndarray) -> np.ndarray:
    return np.full(len(items_n), 0.15)


def clicks_by_item(rng: np.random.Generator, items_n: np.ndarray, prices_n: np.ndarray) -> np.ndarray:
    """Users click a few items often and the others hardly ever. The baseline `item` learns this in few
    requests."""
    return np.where(items_n <= 5, 0.9, 0.01)


def clicks_by_price_distance(
    rng: np.random.Generator, items_n: np.ndarray, prices_n: np.ndarray
) -> np.ndarray:
    """Users click extreme prices. No baseline can learn this: it depends on no item or place and is not
    linear."""
    return np.where(np.abs(prices_n) > 1.2, 0.6, 0.02)


def replay_log(folder: Path, lines: list[Line], schema: str = SCHEMA, **settings: Any) -> Replayed:
    config = config_of(folder, lines, schema, **settings)
    assert run(config) == 0
    report = Path(config.report)
    return Replayed(config, json.loads((report / "report.json" if report.is_dir() else report).read_text()))


def config_of(folder: Path, lines: list[Line], schema: str, **settings: Any) -> ReplayConfig:
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "schema.toml").write_text(schema)
    return ReplayConfig(
        dataset="jsonl",
        options=jsonl.Options(log=(str(folder / "log.jsonl"),)),
        schema=str(folder / "schema.toml"),
        engine="local",
        **{"report": str(folder / "report.json"), **settings},
    )


class Replayed(NamedTuple):
    """A finished replay of a log."""

    config: ReplayConfig
    report: dict[str, Any]

    def reasons(self, nearest: str = "item") -> set[str]:
        """Return the names of all reasons, not only of the likeliest."""
        return {r.name for r in reasons_of(make_verdict(nearest), load_schema(self.config.schema), *self)}


def make_verdict(nearest: str, state: str = "behind") -> Verdict:
    """Return a verdict in which one baseline decides both metrics."""
    baselines = {name: Baseline(value=0.6, difference=-0.1, low=-0.2, high=-0.05) for name in RULES}
    auc, ne = (
        Comparison(metric=m, state=state, requests=500, model=0.5, nearest=nearest, baselines=baselines)
        for m in ("request_auc", "ne")
    )
    return Verdict(requests=500, request_auc=auc, ne=ne)


class Case(NamedTuple):
    """A log to replay, with its schema and settings."""

    lines: list[Line]
    schema: str = SCHEMA
    settings: dict[str, Any] = {}  # noqa: RUF012


GOOD = Case(make_log(300, clicks_at_random))


def change_lines(lines: list[Line], **keys: Any) -> list[Line]:
    return [{**line, **keys} for line in lines]


def spread_in_time(lines: list[Line], times: int) -> list[Line]:
    """Multiply the time between requests by `times`."""
    return [{**line, "time": START_MS + times * (line["time"] - START_MS)} for line in lines]


def replace_prices(value: Callable[[int], list[float] | None]) -> list[Line]:
    """Return the good log with the prices `value(line number)`; None removes the prices of a request."""
    lines = []
    for n, line in enumerate(GOOD.lines):
        if line["type"] == "impression":
            new_prices, item_ids = value(n), line["candidates"]["item_id"]
            new_candidates = {"item_id": item_ids, **({"price": new_prices} if new_prices else {})}
            line = {**line, "candidates": new_candidates}
        lines.append(line)
    return lines


def unknown_requests(lines: list[Line]) -> Iterator[Line]:
    """Let one click in ten name a request that does not exist."""
    clicks = 0
    for line in lines:
        clicks += line["type"] == "engagement"
        is_lost = line["type"] == "engagement" and clicks % 10 == 0
        yield {**line, "request_id": "unknown"} if is_lost else line


FAULTS = {
    "labels_lost": Case([*unknown_requests(GOOD.lines)]),
    "features_missing": Case(replace_prices(lambda n: [1.0, 2.0, 3.0, 4.0] if n % 5 == 0 else None)),
    "features_constant": Case(replace_prices(lambda n: [7.0] * 4)),
    "frozen": Case(GOOD.lines, settings={"freeze_weights_at": str(START_MS + 3_000_000)}),
    "counted_action_missing": Case(GOOD.lines, SCHEMA + '\n[online]\nclick = "klick"\n'),
    "no_click_rates": Case(GOOD.lines, SCHEMA.replace('"ctr_1h"', '"views_1h"')),
    "rates_forget": Case(spread_in_time(GOOD.lines, 60)),
    "rates_not_compared": Case(GOOD.lines, SCHEMA.replace(TRANSFORM, "")),
    "no_item_id": Case(GOOD.lines, SCHEMA.replace(ITEM, "")),
    "no_user_in_log": Case(change_lines(GOOD.lines, user_id=0, session_id=0)),
    "no_user_id": Case(GOOD.lines, SCHEMA.replace(USER, "").replace('"{item,user}"', "item")),
    "no_history": Case(GOOD.lines, SCHEMA.replace(HISTORY, "")),
    "batches_too_large": Case(GOOD.lines, settings={"set": ("worker.first_batch_requests=64",)}),
    "prior_far_off": Case(make_log(300, lambda rng, items_n, prices_n: np.full(len(items_n), 0.6))),
}


@pytest.fixture(scope="module")
def good_replay(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    return replay_log(tmp_path_factory.mktemp("good"), GOOD.lines)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reason_is_found_in_a_log_with_its_fault_and_not_in_one_without(
    fault: str, good_replay: Replayed, tmp_path: Path
) -> None:
    case = FAULTS[fault]
    assert good_replay.reasons() == {"few_requests"}
    assert replay_log(tmp_path, case.lines, case.schema, **case.settings).reasons() == {"few_requests", fault}


@pytest.mark.parametrize(
    ("nearest", "reason"), [("linear", "linear_is_better"), ("place", "positions_explain_clicks")]
)
def test_the_baseline_that_is_better_is_a_reason(nearest: str, reason: str, good_replay: Replayed) -> None:
    assert good_replay.reasons(nearest) == {"few_requests", reason}


def test_a_history_is_not_advised_where_no_request_has_a_user(tmp_path: Path) -> None:
    lines = change_lines(GOOD.lines, user_id=0, session_id=0)
    found = replay_log(tmp_path, lines, SCHEMA.replace(HISTORY, ""))
    assert found.reasons() == {"few_requests", "no_user_in_log"}


def test_a_log_of_sessions_is_advised_about_the_history_of_sessions(tmp_path: Path) -> None:
    schema = SCHEMA.replace(HISTORY, "").replace(USER, "").replace('"{item,user}"', "item")
    found = replay_log(tmp_path, [line | {"user_id": 0} for line in GOOD.lines], schema)
    assert found.reasons() == {"few_requests", "no_history"}
    reasons = likely_reasons(make_verdict("item"), load_schema(found.config.schema), *found)
    assert any('entity = "session"' in reason.change for reason in reasons)


def test_late_clicks_are_a_reason_for_a_longer_window(tmp_path: Path) -> None:
    found = replay_log(tmp_path, make_log(300, clicks_at_random, delay_ms=120_000), window_ms=60_000)
    reason = likely_reasons(make_verdict("item"), load_schema(found.config.schema), *found)[0]
    assert reason.name == "labels_lost" and "100%" in reason.fact and "--window" in reason.change


def test_requests_with_non_finite_results_are_a_reason(good_replay: Replayed) -> None:
    training = {**good_replay.report["training"], "non_finite": 3}
    assert "non_finite" in good_replay._replace(report={**good_replay.report, "training": training}).reasons()


def test_only_a_model_that_is_behind_gets_reasons_and_at_most_three(tmp_path: Path) -> None:
    schema = SCHEMA.replace(HISTORY, "").replace(USER, "").replace('"{item,user}"', "item")
    found = replay_log(tmp_path, GOOD.lines, schema.replace(TRANSFORM, ""))
    loaded = load_schema(found.config.schema)
    assert likely_reasons(make_verdict("item", "ahead"), loaded, *found) == []
    assert likely_reasons(make_verdict("item", "unknown"), loaded, *found) == []
    assert len(likely_reasons(make_verdict("item"), loaded, *found)) == MAX_REASONS
    assert len(found.reasons()) > MAX_REASONS


def test_a_model_with_less_than_a_baseline_knows_is_behind_with_a_warning(tmp_path: Path) -> None:
    schema = SCHEMA.replace(ITEM, "").replace(HISTORY, "").replace(USER, "").replace(TRANSFORM, "")
    schema = schema.replace('[[nro]]\nonline = "ctr_1h"\n', "").replace(
        '[tables."{item,user}"]\ndim = 4\n', ""
    )
    report = replay_log(tmp_path, make_log(500, clicks_by_item), schema, report=str(tmp_path)).report
    verdict = report["verdict"]
    assert verdict["state"] == verdict["request_auc"]["state"] == "behind"
    assert verdict["sentence"].startswith(f"behind {verdict['request_auc']['nearest']!r} by ")
    assert verdict["request_auc"]["baselines"]["item"]["high"] < 0
    assert verdict["ne"]["baselines"]["item"]["low"] > 0
    reasons = [r["name"] for r in verdict["likely_reasons"]]
    assert reasons == ["no_click_rates", "no_item_id", "no_user_id"]
    assert any(verdict["sentence"] in warning for warning in report["warnings"])
    page = html.unescape((tmp_path / "report.html").read_text())
    assert verdict["sentence"] in page and "minus recent" in page and "Model minus baselines" in page
    assert all(r["fact"] in page and r["change"] in page for r in verdict["likely_reasons"])


def test_a_log_of_random_clicks_is_undecided_without_a_warning(tmp_path: Path) -> None:
    report = replay_log(tmp_path, make_log(700, clicks_at_random)).report
    auc = report["verdict"]["request_auc"]
    assert (
        auc["state"] == "undecided" and auc["baselines"]["item"]["low"] < 0 < auc["baselines"]["item"]["high"]
    )
    assert auc["ahead_since"] is None


@pytest.mark.slow
def test_a_model_that_knows_more_is_ahead_without_a_warning_or_reason(tmp_path: Path) -> None:
    lines = make_log(5200, clicks_by_price_distance)
    found = replay_log(tmp_path, lines, set=("worker.learning_rate=0.005",))
    report = found.report
    verdict = report["verdict"]
    assert verdict["state"] == verdict["request_auc"]["state"] == verdict["ne"]["state"] == "ahead"
    assert 1 <= verdict["request_auc"]["ahead_since"] <= 5200 and verdict["likely_reasons"] == []
    assert all(b["low"] > 0 for b in verdict["request_auc"]["baselines"].values())
    assert all(b["high"] < 0 for b in verdict["ne"]["baselines"].values())
    assert not any("behind" in warning for warning in report["warnings"])
    assert found.reasons() == set()
