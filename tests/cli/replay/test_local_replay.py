"""Complete replays with `--engine local`: the real joiner, training loop and shards in this process."""

from __future__ import annotations

import datetime
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from roostream.cli.replay.local_replay import replay_in_process
from roostream.cli.replay.outcome import ReplayProgress
from roostream.cli.replay.replay_run import run
from roostream.errors import RoostreamError, UnavailableError
from roostream.replay import ebnerd
from roostream.replay import jsonl_log as jsonl
from roostream.replay.config import ReplayConfig
from roostream.replay.replay_log import open_log
from roostream.runtime.program import Stop
from roostream.schema.schema_file import load_schema
from roostream.wire.records import Record

FIXTURE = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "ebnerd_week1" / "fixture"
START = datetime.datetime(2023, 5, 18, 7)
SCHEMA = """
[tables.item]
dim = 4
[[ro]]
name = "front_page"
[[ro]]
name = "history"
kind = "sequence"
table = "item"
columns = { action = "ids", time = "time_ms" }
online = "history"
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[nro]]
name = "clicks"
online = "clicks_1h"
[[label]]
name = "click"
action = "click"
[[label]]
name = "long_read"
action = "read"
threshold = 30.0
"""


def write_week_log(folder: Path, num_requests: int = 120) -> dict[str, Any]:
    """Write a small log in EB-NeRD's format: 12 users, two days, at most one click per request."""
    rng = np.random.default_rng(0)
    shown = [rng.choice(40, size=rng.integers(2, 8), replace=False).tolist() for _ in range(num_requests)]
    table = {
        "impression_id": np.arange(num_requests),
        "impression_time": [
            START + datetime.timedelta(seconds=int(s)) for s in rng.integers(0, 172_800, num_requests)
        ],
        "user_id": rng.integers(1, 13, num_requests),
        "session_id": rng.integers(1, 50, num_requests),
        "article_ids_inview": shown,
        "article_ids_clicked": [items[: int(rng.integers(0, 2))] for items in shown],
        "next_read_time": rng.uniform(0, 3000, num_requests),
    }
    pq.write_table(pa.table(table), folder / "behaviors.parquet")
    earlier = [START - datetime.timedelta(days=1), START - datetime.timedelta(hours=1)]
    history = {
        "user_id": [1, 2],
        "article_id_fixed": [[3, 4], [5, 6]],
        "impression_time_fixed": [earlier, earlier],
    }
    pq.write_table(pa.table(history), folder / "history.parquet")
    (folder / "schema.toml").write_text(SCHEMA)
    clicks = sum(len(c) for c in table["article_ids_clicked"])  # type: ignore[arg-type]
    return {"clicks": clicks, "candidates": sum(map(len, shown))}


def options_of(folder: Path) -> ebnerd.Options:
    return ebnerd.Options(
        behaviors=(str(folder / "behaviors.parquet"),), history=(str(folder / "history.parquet"),)
    )


def replay(folder: Path, data: Path | None = None, **settings: Any) -> dict[str, Any]:
    report = folder / "report.json"
    config = {
        "dataset": "ebnerd",
        "options": options_of(data or folder),
        "schema": str(folder / "schema.toml"),
        "engine": "local",
        "report": str(report),
        "batch_requests": 32,
        **settings,
    }
    assert run(ReplayConfig(**config)) == 0
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def news_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log of `write_week_log`."""
    folder = tmp_path_factory.mktemp("news")
    write_week_log(folder)
    return folder


@pytest.fixture(scope="module")
def first_report(news_folder: Path) -> dict[str, Any]:
    """The report of a replay of that log with default settings."""
    return replay(news_folder, measure_from="2023-05-19")


def test_every_event_of_a_log_is_accounted_for(first_report: dict[str, Any], tmp_path: Path) -> None:
    expected, report = write_week_log(tmp_path), first_report
    counts = report["counts"]
    assert report["accounted"]
    assert counts["requests"] == counts["samples"] == counts["predicted"] == 120
    assert counts["candidates"] == expected["candidates"]
    assert counts["actions"] == {"click": expected["clicks"], "read": expected["clicks"]}
    assert counts["engagements"] == counts["folded"] == 2 * expected["clicks"]
    assert counts["closed_by"] == {"window": 120} and counts["dead_letters"] == {}
    assert counts["pending"] == counts["duplicates"] == counts["corrections"] == counts["untrained"] == 0


def test_a_report_has_stable_keys(first_report: dict[str, Any]) -> None:
    report = first_report
    assert {"counts", "accounted", "metrics", "wall_s", "features_digest", "settings", "warnings"} <= set(
        report
    )
    assert set(report["baselines"]) == {"random", "place", "item", "recent", "linear"} and set(
        report["positives"]
    ) == {"click", "long_read"}
    assert report["verdict"]["state"] in ("ahead", "undecided", "behind", "unknown")
    assert report["verdict"]["sentence"].startswith(report["verdict"]["state"])
    assert set(report["verdict"]["request_auc"]["baselines"]) == {"place", "item", "recent", "linear"}
    assert report["training"]["steps"] == 15 and report["training"]["non_finite"] == 0
    assert report["training"]["rows"] == {"d4-adagrad": 40} and report["training"]["dense_parameters"] > 1000
    assert report["settings"]["batch_requests"] == report["settings"]["worker"]["batch_requests"] == 32
    assert report["log"]["features"]["item"]["share"] == 1.0 and report["log"]["impressions"] == 120
    keys = "requests candidates engagements samples closed_by corrections duplicates pending dead_letters"
    assert {*keys.split()} <= set(report["counts"])
    metrics = report["metrics"]
    assert set(metrics) == {"overall", "measured", "by_day", "curve"}
    assert set(metrics["by_day"]) == {"2023-05-18", "2023-05-19", "2023-05-20"}
    assert metrics["overall"]["requests"] == 120 > metrics["measured"]["requests"] > 0
    m = {"requests", "candidates", "base_rate", "ne", "auc", "request_auc", "mrr", "ndcg@10", "calibration"}
    assert m <= set(metrics["overall"]) and set(metrics["overall"]["tasks"]) == {"click", "long_read"}
    points = [(point["after"], point["requests"]) for point in metrics["curve"]]
    assert points == [(32, 32), (64, 32), (96, 32), (120, 24)]


def test_features_depend_only_on_the_log_and_the_label_delay(
    news_folder: Path, first_report: dict[str, Any]
) -> None:
    again, delayed = (
        replay(news_folder, seed=7, batch_requests=16),
        replay(news_folder, label_delay_ms=3_600_000),
    )
    frozen = replay(news_folder, freeze_at="2023-05-19")
    assert first_report["features_digest"] == again["features_digest"]
    assert len({r["features_digest"] for r in (first_report, delayed, frozen)}) == 3
    assert delayed["accounted"] and delayed["counts"] == first_report["counts"]


def config_of(folder: Path, log: str, schema: str = SCHEMA) -> ReplayConfig:
    """Return the settings of a replay of a log given as text."""
    (folder / "log.jsonl").write_text(log)
    (folder / "schema.toml").write_text(schema)
    return ReplayConfig(
        dataset="jsonl",
        options=jsonl.Options(log=(str(folder / "log.jsonl"),)),
        schema=str(folder / "schema.toml"),
        engine="local",
        report=str(folder / "out"),
    )


def write_log(folder: Path, *lines: dict[str, Any]) -> ReplayConfig:
    return config_of(folder, "".join(json.dumps(line) + "\n" for line in lines))


REQUEST_KEY, T0 = {"request_id": "r", "user_id": 5}, 1_700_000_000_000
IMPRESSION = {**REQUEST_KEY, "type": "impression", "time": T0, "candidates": [{"item_id": 1}]}
ENGAGEMENT = {**REQUEST_KEY, "type": "engagement", "time": T0 + 1000, "item_id": 1, "action": "[/b]"}


def test_markup_and_control_characters_of_a_log_are_printed_as_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(write_log(tmp_path, IMPRESSION, ENGAGEMENT, ENGAGEMENT | {"action": "[red]\x1b[31mx"})) == 0
    output = capfd.readouterr().out
    assert "[/b] 1" in output and "[red]" in output and "\x1b" not in output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["log"]["actions"] == {"[/b]": 1, "[red][31mx": 1}
    assert any("'[/b]' (1)" in warning for warning in report["warnings"])


def test_a_folder_gets_the_report_and_a_page_with_figures(tmp_path: Path) -> None:
    assert (
        run(write_log(tmp_path, IMPRESSION, ENGAGEMENT | {"action": "click"}, ENGAGEMENT | {"action": "<b>"}))
        == 0
    )
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2 and "&lt;b&gt;" in page and "<b>" not in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creative", ""
    )
    assert "by place alone" in page and "<td>item</td>" in page


def test_an_amount_is_shown_with_its_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_log(tmp_path, IMPRESSION, ENGAGEMENT | {"action": "read", "value": 30.0})
    text = '[[label]]\nname = "seconds"\naction = "read"\nfold = "max"\nobjective = "amount"\nscale = 60.0\n'
    Path(config.schema).write_text(f"{SCHEMA}{text}")
    assert run(config) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    mae = f"{report['metrics']['overall']['tasks']['seconds']['mae']:.4f}"
    assert f"mae {mae}" in " ".join(capfd.readouterr().out.replace("│", "").split())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<th>mae</th>" in page and f"<td>{mae}</td>" in page


def test_the_first_dead_letter_of_each_reason_names_its_line(tmp_path: Path) -> None:
    assert (
        run(
            write_log(
                tmp_path,
                IMPRESSION,
                ENGAGEMENT | {"item_id": 7, "action": "click"},
                ENGAGEMENT | {"request_id": "no"},
            )
        )
        == 0
    )
    first_report = json.loads((tmp_path / "out" / "report.json").read_text())["first_dead_letters"]
    assert (
        first_report["item_not_shown"]["where"].endswith("log.jsonl:2")
        and "did not show item 7" in first_report["item_not_shown"]["error"]
    )
    assert first_report["no_request"]["where"].endswith("log.jsonl:3")


@pytest.mark.parametrize("lines", [[], [ENGAGEMENT]])
def test_a_log_without_impressions_is_rejected(
    tmp_path: Path, lines: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(write_log(tmp_path, *lines)) == 2
    assert "at least one usable impression" in capfd.readouterr().err


def test_frozen_weights_score_and_do_not_learn(news_folder: Path, first_report: dict[str, Any]) -> None:
    frozen = replay(news_folder, freeze_weights_at="2023-05-18", as_served=True)
    assert frozen["features_digest"] == first_report["features_digest"]
    assert frozen["accounted"] and frozen["counts"]["predicted"] == 120
    assert frozen["metrics"]["overall"]["ne"] != first_report["metrics"]["overall"]["ne"]
    assert frozen["metrics_as_served"]["overall"] == frozen["metrics"]["overall"], (
        "with frozen weights, the time at which labels arrive makes no difference"
    )


def test_the_documented_jsonl_log_is_replayed(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "bring-your-own-data.md").read_text()
    log, schema = (page.split(f"```{language}\n")[1].split("```")[0] for language in ("jsonl", "toml"))
    assert run(config_of(tmp_path, log, schema)) == 0
    counts = json.loads((tmp_path / "out" / "report.json").read_text())["counts"]
    assert counts["requests"] == counts["samples"] == 2 and counts["candidates"] == 6
    assert counts["actions"] == {"click": 2, "order": 1} and counts["folded"] == 3


def test_bad_input_ends_in_one_sentence_and_exit_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_week_log(tmp_path)
    (tmp_path / "history.parquet").write_text("not parquet")
    config = ReplayConfig(
        dataset="ebnerd", options=options_of(tmp_path), schema=str(tmp_path / "schema.toml"), engine="local"
    )
    assert run(config) == 2
    output = capfd.readouterr().err
    assert "history.parquet: expected a" in output and "Traceback" not in output


@pytest.mark.skipif(
    not FIXTURE.is_dir(), reason="the evaluation data (../shared/data) are not on this machine"
)
def test_a_thousand_real_requests_are_replayed_without_loss(tmp_path: Path) -> None:
    report = replay(tmp_path, FIXTURE, schema="", batch_requests=64)
    counts = report["counts"]
    assert report["accounted"]
    assert (counts["samples"], counts["actions"]["click"], counts["predicted"]) == (1046, 1047, 1046)


# Tests of labels that come late


def test_as_served_scores_are_worse_and_cover_the_same_requests(
    first_report: dict[str, Any], tmp_path: Path
) -> None:
    expected = write_week_log(tmp_path)
    report = replay(tmp_path, as_served=True, measure_from="2023-05-19")
    served, trained = report["metrics_as_served"], report["metrics"]
    for period in ("overall", "measured"):
        for name in ("requests", "candidates", "base_rate"):
            assert served[period][name] == trained[period][name], "the same candidates and labels"
    assert served["overall"]["candidates"] == expected["candidates"]
    assert served["overall"]["ne"] != trained["overall"]["ne"] and "metrics_as_served" not in first_report


def test_corrections_complete_requests_that_close_early_and_no_event_is_lost(tmp_path: Path) -> None:
    expected = write_week_log(tmp_path)
    on_time = replay(tmp_path, as_served=True, engagement_delay_ms=300_000)
    early = replay(tmp_path, as_served=True, engagement_delay_ms=300_000, early_close_ms=60_000)
    counts = early["counts"]
    assert counts["closed_by"] == {"early": 120} and counts["samples"] == counts["predicted"] == 120
    assert (
        counts["folded"] + counts["corrected"] == counts["engagements"] == 2 * expected["clicks"]
        and counts["folded"] > 0
    )
    assert early["training"]["corrections"] > 0 == on_time["training"]["corrections"]
    assert (
        early["positives"] == on_time["positives"] and early["features_digest"] == on_time["features_digest"]
    )
    labels = [r["metrics_as_served"]["overall"]["tasks"]["click"]["base_rate"] for r in (early, on_time)]
    assert labels[0] == labels[1] > early["metrics"]["overall"]["base_rate"], (
        "after all corrections, the labels are the same"
    )


def test_a_stopped_replay_trains_nothing_more(news_folder: Path) -> None:
    config = ReplayConfig(
        dataset="ebnerd",
        options=options_of(news_folder),
        schema=str(news_folder / "schema.toml"),
        engine="local",
        window_ms=86_400_000 * 3,  # nothing closes before the end of the log
    )
    stop, progress = Stop(), ReplayProgress(Console(file=io.StringIO()), 0)
    schema = load_schema(config.schema_path)

    def records() -> Iterator[Record]:
        yield from itertools.islice(open_log(config, schema).records, 100)
        stop.set()

    with pytest.raises(UnavailableError, match="stopped before the end of the log"):
        replay_in_process(config, schema, records(), progress, stop)


def test_scores_as_served_need_the_local_engine(tmp_path: Path) -> None:
    write_week_log(tmp_path)
    with pytest.raises(RoostreamError, match="'as_served': expected --engine local"):
        ReplayConfig(dataset="ebnerd", options=options_of(tmp_path), as_served=True)
