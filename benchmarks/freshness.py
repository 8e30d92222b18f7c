"""How long until what was learned changes a score?

Time until a score changes: after a commit with a serving program alone, and after a click with a whole stack.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import samples as data
from benchmarks.common.serving_program import serving_program
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.serving_overload import DEADLINE_MS
from benchmarks.serving_swap import Commits
from infra.options import demo
from infra.stack import Stack
from roostream.runtime import scrape
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.version_follower import VersionFollower

_LOOK_S = 0.005
_PATIENCE_S = 120.0
_QUIET_S = 6.0  # without a change, before something is done that should make one
_ITEMS = list(range(1, 9))
_USER = 7_000_000
STAGES = ("engagement_to_close", "close_to_readable", "readable_to_trained", "trained_to_servable")


@contextlib.contextmanager
def committed() -> Iterator[Work]:
    """From a commit's manifest to the first answer by its version."""
    with serving_program(deadline_ms=DEADLINE_MS) as program:
        commits, url = Commits(program.store), "http://{}:{}".format(*program.address)

        def step() -> None:
            before = _told(f"{url}/")["model_version"]
            commits.commit()
            _until("another version", lambda: _told(f"{url}/")["model_version"] != before)

        yield Work(step)


@contextlib.contextmanager
def loaded() -> Iterator[Work]:
    """What a follower does with a commit, in process: reads it, checks it, builds the version."""
    with tempfile.TemporaryDirectory() as folder:
        commits = Commits(Path(folder))
        versions = LoadedVersions(first_version(commits.schema, commits.model, 0))
        follower = VersionFollower(commits.store, commits.schema, versions, 0)

        def step() -> None:
            commits.commit()
            assert follower.poll()

        yield Work(step)


@contextlib.contextmanager
def engaged(commit_ms: int, window_ms: int) -> Iterator[Work]:
    """From a click, and the user's next request, to another score of the same candidates."""
    overrides: dict[str, Mapping[str, Any]] = {
        "joiner": {"window_ms": window_ms, "lateness_ms": 500},
        "controller": {"commit_interval_ms": commit_ms},
        "shard": {"publish_interval_ms": 100},
        "serving": {"exploration": 0.0, "heartbeat_ms": 200},
    }
    with tempfile.TemporaryDirectory() as home, Stack(Path(home), demo(overrides=overrides)) as stack:
        stack.start(["all"])
        stack.wait_ready("serving", timeout_s=180)
        clicks = Clicks(stack)
        yield Work(clicks.step, figures=clicks.figures, took_s=lambda: clicks.took_s)


class Clicks:
    """A click a step, when nothing of the one before moves a score any more."""

    def __init__(self, stack: Stack) -> None:
        self.url, self.stack = stack.endpoints.serving, stack
        self.took_s = 0.0
        self._asked, self._probe = 0, _probe()

    def step(self) -> None:
        before = self._settled()
        self._asked += 1
        user = _USER + self._asked
        ranked = _post(f"{self.url}/v1/rank", _body(user))
        began_s = time.perf_counter()
        click = {
            "request_id": ranked["request_id"],
            "user_id": user,
            "session_id": 1,
            "item_id": _ITEMS[0],
            "action": "click",
        }
        _post(f"{self.url}/v1/engagements", click)
        _post(f"{self.url}/v1/rank", _body(user))  # which closes the one before
        _until("another score", lambda: self._scores() != before)
        self.took_s = time.perf_counter() - began_s

    def figures(self) -> dict[str, float]:
        """Means so far, of the stages, as the programs tell them."""
        urls = {
            name: url
            for name, url in self.stack.endpoints.metrics.items()
            if name.partition("-")[0] in _TELLERS
        }
        told = scrape.fetch_all(urls).values()
        found = {}
        for stage in STAGES:
            sums, counts = (
                [s.by(f"roostream_freshness_seconds_{what}", "stage").get(stage) for s in told]
                for what in _PARTS
            )
            total, count = (sum(v for v in values if v is not None) for values in (sums, counts))
            if count:
                found[f"{stage}, s"] = total / count
        return found

    def _scores(self) -> Any:
        """Asked for without being logged."""
        return [
            candidate["scores"] for candidate in _post(f"{self.url}/v1/explain", self._probe)["candidates"]
        ]

    def _settled(self) -> Any:
        scores, since_s = self._scores(), time.perf_counter()
        while time.perf_counter() < since_s + _QUIET_S:
            time.sleep(0.2)
            if (now := self._scores()) != scores:
                scores, since_s = now, time.perf_counter()
        return scores


_PARTS = ("sum", "count")
_TELLERS = ("worker", "serving", "joiner", "shard")


def _probe() -> dict[str, Any]:
    """With all that would be filled in, so that no score moves by time alone."""
    schema, body = data.demo_schema(), _body(_USER)
    for candidate in body["candidates"]:
        candidate["nro"] = {f.name: 1.0 for f in schema.floats("nro")}
    return {**body, "ro": {f.name: 1.0 for f in schema.floats("ro")}}


def _body(user: int) -> dict[str, Any]:
    return {"user_id": user, "session_id": 1, "candidates": [{"item_id": i} for i in _ITEMS]}


def _until(what: str, is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {_PATIENCE_S:.0f} s: {what}")
        time.sleep(_LOOK_S)


def _told(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def _post(url: str, body: object) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


_HERE = "benchmarks.freshness"

BENCHMARK = Benchmark(
    name="freshness",
    summary="How long until what was learned changes a score?",
    rows=(
        Row(
            name="from a commit to the first answer by its version",
            unit="commits",
            shows="cost",
            subjects=(
                Subject("a serving program", f"{_HERE}:committed"),
                Subject("that looks all the time", f"{_HERE}:loaded", role="limit"),
            ),
        ),
        Row(
            name="from a click to another score of the item",
            unit="clicks",
            shows="cost",
            subjects=(
                Subject(
                    "rows at once, dense weights with a commit each 10 s", f"{_HERE}:engaged", (10_000, 4000)
                ),
                Subject("a commit each second", f"{_HERE}:engaged", (1000, 4000), "limit"),
            ),
        ),
    ),
    interpretation="""\
The first row: a trainer's commit of the demo's model is linked into the store of a `roostream serving`, which looks once a
second, loads it, checks its sums and tries it with recent requests. The limit is what reading, checking and building the version
take.

The second row: a whole stack (Kafka, Flink, shards, worker, serving) without other traffic. A user is shown a list, clicks its
first item and asks for the next list, which closes the request; then a fixed request, with all of its features given, is scored
again and again (`/v1/explain`, which logs nothing) until a score differs. Its rows are published by the shards every 100 ms, so
a click is in the scores before any commit; a window of 4 s bounds what waits for heartbeats. The stages are means that the
programs tell of themselves. Scores are asked for only when those of the step before have been still for six seconds.""",
    slice_s=1.0,
    rounds=3,
)
