"""How long until what was learned changes a score?

Time until a score changes: after a commit with a serving program alone, and after a click with a whole stack.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import samples as data
from benchmarks.common.serving_program import serving_program
from benchmarks.common.training_stack import until
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn, Work
from benchmarks.serving_overload import DEADLINE_MS
from benchmarks.serving_swap import Commits
from infra.options import demo
from infra.stack import Stack
from roostream.runtime import scrape
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.version_follower import VersionFollower

_POLL_S = 0.005
_LIMIT_S = 120.0
_QUIET_S = 6.0  # without a change of scores, before the next click
_ITEMS = list(range(1, 9))
_USER = 7_000_000
STAGES = ("engagement_to_close", "close_to_readable", "readable_to_trained", "trained_to_servable")


@contextlib.contextmanager
def committed() -> Iterator[Work]:
    """From a commit's manifest to the first answer by its version."""
    with serving_program(deadline_ms=DEADLINE_MS) as program:
        commits, url = Commits(program.store), "http://{}:{}".format(*program.address)

        def step() -> None:
            before = _get(f"{url}/")["model_version"]
            commits.commit()
            until("another version", lambda: _get(f"{url}/")["model_version"] != before, _LIMIT_S, _POLL_S)

        yield Work(step)


@contextlib.contextmanager
def loaded() -> Iterator[Work]:
    """A version follower in this process: reads and checks a commit, and builds the version."""
    with tempfile.TemporaryDirectory() as folder:
        commits = Commits(Path(folder))
        versions = LoadedVersions(first_version(commits.schema, commits.model, 0))
        follower = VersionFollower(commits.store, commits.schema, versions, 0)

        def step() -> None:
            commits.commit()
            assert follower.poll()

        yield Work(step)


@contextlib.contextmanager
def engaged(commit_ms: int, window_ms: int) -> Iterator[WholeTurn]:
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
        url, probe, users = stack.endpoints.serving, _probe(), itertools.count(_USER + 1)

        def scores() -> Any:
            """Of a request that is not logged."""
            return [candidate["scores"] for candidate in _post(f"{url}/v1/explain", probe)["candidates"]]

        def turn() -> TurnResult:
            before, user = _settled(scores), next(users)
            request_id = _post(f"{url}/v1/rank", _body(user))["request_id"]
            began_s = time.perf_counter()
            click = {"request_id": request_id, "user_id": user, "session_id": 1, "item_id": _ITEMS[0]}
            _post(f"{url}/v1/engagements", {**click, "action": "click"})
            _post(f"{url}/v1/rank", _body(user))  # closes the request before
            until("another score", lambda: scores() != before, _LIMIT_S, _POLL_S)
            return TurnResult(1.0, time.perf_counter() - began_s, _stage_means(stack))

        yield WholeTurn(turn, warm_up=turn)


def _settled(scores: Callable[[], Any]) -> Any:
    """Wait until the scores have not changed for _QUIET_S; returns them."""
    current, since_s = scores(), time.perf_counter()
    while time.perf_counter() < since_s + _QUIET_S:
        time.sleep(0.2)
        if (new := scores()) != current:
            current, since_s = new, time.perf_counter()
    return current


def _stage_means(stack: Stack) -> dict[str, float]:
    """Means of the stages so far, from the programs' metrics."""
    urls = {n: url for n, url in stack.endpoints.metrics.items() if n.partition("-")[0] in _PROGRAMS}
    scraped = scrape.fetch_all(urls).values()
    means = {}
    for stage in STAGES:
        total, count = (
            sum(s.by(name, "stage").get(stage) or 0.0 for s in scraped)
            for name in ("roostream_freshness_seconds_sum", "roostream_freshness_seconds_count")
        )
        if count:
            means[f"{stage}, s"] = total / count
    return means


_PROGRAMS = ("worker", "serving", "joiner", "shard")


def _probe() -> dict[str, Any]:
    """A request with all features given, so that its scores do not change with time alone."""
    schema, body = data.demo_schema(), _body(_USER)
    for candidate in body["candidates"]:
        candidate["nro"] = {f.name: 1.0 for f in schema.floats("nro")}
    return {**body, "ro": {f.name: 1.0 for f in schema.floats("ro")}}


def _body(user: int) -> dict[str, Any]:
    return {"user_id": user, "session_id": 1, "candidates": [{"item_id": i} for i in _ITEMS]}


def _get(url: str) -> Any:
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
First row: a commit of the demo's model is linked into the store of `roostream serving`, which polls once a
second, loads and checks the version and tries it with recent requests. The limit is reading, checking and
building the version in process. Second row: in a complete stack without other traffic, a user clicks the
first item of a list and requests the next list, which closes the request; then a fixed request is scored by
`/v1/explain` until a score differs. Shards publish rows every 100 ms, so a click reaches the scores before
any commit. The stages are means that the programs measure themselves. Each click waits until the scores
have not changed for six seconds.""",
    slice_s=1.0,
    rounds=3,
)
