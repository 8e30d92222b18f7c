"""Whole replays in this process: the real joiner, training loop and shards."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command.replay.run import run
from roo.errors import RoostreamError
from traffic import ebnerd, jsonl
from traffic.config import ReplayConfig

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


def week(folder: Path, num_requests: int = 120) -> dict[str, Any]:
    """A small log in EB-NeRD's form: 12 users, two days, one click or none a request."""
    rng = np.random.default_rng(0)
    shown = [rng.choice(40, size=rng.integers(2, 8), replace=False).tolist() for _ in range(num_requests)]
    table = {
        "impression_id": np.arange(num_requests),
        "impression_time": [START + datetime.timedelta(seconds=int(s)) for s in rng.integers(0, 172_800, num_requests)],
        "user_id": rng.integers(1, 13, num_requests),
        "session_id": rng.integers(1, 50, num_requests),
        "article_ids_inview": shown,
        "article_ids_clicked": [items[: int(rng.integers(0, 2))] for items in shown],
        "next_read_time": rng.uniform(0, 3000, num_requests),
    }
    pq.write_table(pa.table(table), folder / "behaviors.parquet")
    earlier = [START - datetime.timedelta(days=1), START - datetime.timedelta(hours=1)]
    history = {"user_id": [1, 2], "article_id_fixed": [[3, 4], [5, 6]], "impression_time_fixed": [earlier, earlier]}
    pq.write_table(pa.table(history), folder / "history.parquet")
    (folder / "schema.toml").write_text(SCHEMA)
    clicks = sum(len(c) for c in table["article_ids_clicked"])  # type: ignore[arg-type]
    return {"clicks": clicks, "candidates": sum(map(len, shown))}


def options_of(folder: Path) -> ebnerd.Options:
    return ebnerd.Options(behaviors=(str(folder / "behaviors.parquet"),), history=(str(folder / "history.parquet"),))


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


def test_every_event_of_a_log_is_accounted_for(tmp_path: Path) -> None:
    expected = week(tmp_path)
    report = replay(tmp_path, measure_from="2023-05-19")
    counts = report["counts"]
    assert report["accounted"]
    assert counts["requests"] == counts["samples"] == counts["predicted"] == 120
    assert counts["candidates"] == expected["candidates"]
    assert counts["actions"] == {"click": expected["clicks"], "read": expected["clicks"]}
    assert counts["engagements"] == counts["folded"] == 2 * expected["clicks"]
    assert counts["closed_by"] == {"window": 120} and counts["dead_letters"] == {}
    assert counts["pending"] == counts["duplicates"] == counts["corrections"] == counts["untrained"] == 0


def test_a_report_has_its_stable_keys(tmp_path: Path) -> None:
    week(tmp_path)
    report = replay(tmp_path, measure_from="2023-05-19")
    assert {"counts", "accounted", "metrics", "wall_s", "features_digest"} <= set(report)
    keys = {
        "requests",
        "candidates",
        "engagements",
        "samples",
        "closed_by",
        "corrections",
        "duplicates",
        "pending",
        "dead_letters",
    }
    assert keys <= set(report["counts"])
    metrics = report["metrics"]
    assert set(metrics) == {"overall", "measured", "by_day"}
    assert set(metrics["by_day"]) == {"2023-05-18", "2023-05-19", "2023-05-20"}
    assert metrics["overall"]["requests"] == 120 > metrics["measured"]["requests"] > 0
    m = {"requests", "candidates", "base_rate", "ne", "auc", "request_auc", "mrr", "ndcg@10", "calibration"}
    assert m <= set(metrics["overall"]) and set(metrics["overall"]["tasks"]) == {"click", "long_read"}


def test_the_same_log_has_the_same_features_and_a_label_delay_others(tmp_path: Path) -> None:
    week(tmp_path)
    first, again = replay(tmp_path), replay(tmp_path, seed=7, batch_requests=16)
    delayed, frozen = replay(tmp_path, label_delay_ms=3_600_000), replay(tmp_path, freeze_at="2023-05-19")
    assert first["features_digest"] == again["features_digest"]
    assert len({r["features_digest"] for r in (first, delayed, frozen)}) == 3
    assert delayed["accounted"] and delayed["counts"] == first["counts"]


def test_frozen_weights_score_and_do_not_learn(tmp_path: Path) -> None:
    week(tmp_path)
    live, frozen = replay(tmp_path), replay(tmp_path, freeze_weights_at="2023-05-18")
    assert frozen["features_digest"] == live["features_digest"]
    assert frozen["accounted"] and frozen["counts"]["predicted"] == 120
    assert frozen["metrics"]["overall"]["ne"] != live["metrics"]["overall"]["ne"]


def test_the_documented_jsonl_log_is_replayed(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "bring-your-own-data.md").read_text()
    for language in ("jsonl", "toml"):
        (tmp_path / f"shop.{language}").write_text(page.split(f"```{language}\n")[1].split("```")[0])
    report = tmp_path / "report.json"
    config = ReplayConfig(
        dataset="jsonl",
        options=jsonl.Options(log=(str(tmp_path / "shop.jsonl"),)),
        schema=str(tmp_path / "shop.toml"),
        engine="local",
        report=str(report),
    )
    assert run(config) == 0
    counts = json.loads(report.read_text())["counts"]
    assert counts["requests"] == counts["samples"] == 2 and counts["candidates"] == 6
    assert counts["actions"] == {"click": 2, "order": 1} and counts["folded"] == 3


def test_bad_input_ends_in_one_sentence_and_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    week(tmp_path)
    (tmp_path / "history.parquet").write_text("not parquet")
    config = ReplayConfig(
        dataset="ebnerd",
        options=options_of(tmp_path),
        schema=str(tmp_path / "schema.toml"),
        engine="local",
    )
    assert run(config) == 2
    told = capfd.readouterr().err
    assert "history.parquet: expected a parquet file" in told and "Traceback" not in told


@pytest.mark.skipif(not FIXTURE.is_dir(), reason="the evaluation data (../shared/data) are not on this machine")
def test_a_thousand_real_requests_are_replayed_without_loss(tmp_path: Path) -> None:
    report = replay(tmp_path, FIXTURE, schema="", batch_requests=64)
    counts = report["counts"]
    assert report["accounted"]
    assert (counts["samples"], counts["actions"]["click"], counts["predicted"]) == (1046, 1047, 1046)


def test_a_missing_file_is_told_when_the_command_line_is_read() -> None:
    with pytest.raises(RoostreamError, match="no such file"):
        ebnerd.Options(behaviors=("nowhere.parquet",))
