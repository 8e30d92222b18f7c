"""The page on day-two operations, run command by command while users send requests. Nothing is lost or
trained twice, and every request is answered.

DAY_TWO_REPORT names a file for the figures. All tests share one stack and run in order, each on what the
previous tests left.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.home import Home
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from tests.chaos.day_two import DayTwo, blocks

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

BLOCKS_WITH_USERS = (
    *(
        "More serving",
        "A new version of serving",
        "Fewer serving",
        "A new version of the shards",
        "A new version of the worker",
    ),
    *("A new version of the controller", "A new version of the joiner", "More workers", "Fewer workers"),
    *("Retention is about to overrun", "A feature more"),
)
BLOCKS_WITHOUT_USERS = ("Back to an earlier commit", "More of Flink", "Kafka's disks are lost")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DayTwo]:
    running = DayTwo(tmp_path_factory.mktemp("day-two"))
    try:
        running.run("Start the stack")
        running.start_users()
        running.until("a commit with trained samples", lambda: running.applied() > 50, 240)
        running.start_watching()
        yield running
        if report := os.environ.get("DAY_TWO_REPORT"):
            Path(report).write_text(json.dumps(running.figures, indent=2) + "\n", encoding="utf-8")
    finally:
        running.close()


def test_every_block_of_the_page_is_run() -> None:
    assert list(blocks()) == ["Shell functions", "Start the stack", *BLOCKS_WITH_USERS, *BLOCKS_WITHOUT_USERS]


def test_training_continues_without_a_block(site: DayTwo) -> None:
    """Measures the pause without any operation. Samples arrive in bursts, so this is not zero."""
    assert site.watch
    began_s, before = time.monotonic(), site.applied()
    site.until("60 more samples", lambda: site.applied() >= before + 60)
    site.figures["nothing"] = {"pause_s": round(site.watch.longest_s(began_s), 1)}
    assert site.figures["nothing"]["pause_s"] < time.monotonic() - began_s, "no training was observed"


@pytest.mark.parametrize("heading", BLOCKS_WITH_USERS)
def test_training_continues_and_every_user_is_answered(site: DayTwo, heading: str) -> None:
    assert site.drill(heading) == []


def test_the_new_feature_is_trained(site: DayTwo) -> None:
    schema: Schema = load_schema(site.folder / "schema.toml")
    found = site.newest()
    assert found is not None and found.schema == f"{schema.fingerprint:016x}"


def test_every_request_is_accounted_for_and_trained_once(site: DayTwo) -> None:
    site.stop_users()
    site.stop_watching()
    site.until(
        "every request sampled",
        lambda: (found := site.audit())["state"] == "yes" and not found["pending_requests"],
        240,
    )
    sums = site.audit()
    assert sums["samples"] > 0 and (sums["requests"], sums["dead_requests"]) == (sums["samples"], 0), sums
    site.until("every sample committed", lambda: site.applied() == sums["samples"], 60)
    site.figures["lost"] = {"samples": sums["samples"] - site.applied()}


def test_a_rollback_trains_later_data_again(site: DayTwo) -> None:
    trained = site.applied()
    site.run("Back to an earlier commit")
    site.until("the discarded samples are trained again", lambda: site.applied() == trained, 240)
    site.start_users()
    site.until("training goes on", lambda: site.applied() > trained + 40, 240)
    site.stop_users()


def test_two_task_managers_continue_the_job_of_one(site: DayTwo) -> None:
    site.run("More of Flink")
    before = site.applied()
    site.start_users()
    site.until("training goes on", lambda: site.applied() > before + 40, 240)
    site.stop_users()
    site.until("every request sampled", lambda: site.audit()["state"] == "yes", 240)
    assert site.applied() <= site.audit()["samples"]


def test_a_model_continues_on_another_kafka_cluster(site: DayTwo) -> None:
    site.stop_users()
    site.stop_watching()
    site.run("Kafka's disks are lost")
    trained, lost = site.applied(), site.home
    site.home = Home(site.folder / "other")
    assert site.applied() >= trained > 0 and not (lost.root / "kafka").exists()
    site.start_users()
    site.until("training goes on", lambda: site.applied() > trained + 40, 240)
    site.stop_users()
    site.until(
        "every request sampled",
        lambda: (found := site.audit())["state"] == "yes" and not found["pending_requests"],
        240,
    )
    samples = site.audit()["samples"]
    site.until("every sample committed", lambda: site.applied() == trained + samples, 60)
