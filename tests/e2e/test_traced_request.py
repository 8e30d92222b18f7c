"""One request, from its caller to the rows that readers get, as a collector of OpenTelemetry sees it: serving
and `roostream trace` begun as docs/http.md has it, by OpenTelemetry's own command, its exporter by its
variables, nothing of ours between."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.stack import Stack
from roostream.cli.request_trace import STEPS
from tests.contract.house import ROOT
from tests.e2e.loop_stack import applied, quick_options, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UNSAMPLED = "5b8efff798038103d269b633813fc60c"
SPANS = {
    "logged": "serving logged",
    "joined": "joiner joined",
    "trained": "worker trained",
    "published": "shard published",
}
TOPICS = {"logged": "impressions", "joined": "samples", "trained": "predictions", "published": "rows"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Any]:
    pytest.importorskip("opentelemetry.proto", reason="OpenTelemetry's SDK is not installed; make setup")
    from tests.cli.otlp_collector import Collector

    with Collector() as running:
        yield running


def as_the_page_says(program: str, collector: Any) -> tuple[tuple[str, ...], dict[str, str]]:
    """(what a command begins with, variables) of docs/http.md; the collector's place alone is another."""
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    lines = re.findall(rf"^export OTEL_.*$|^OTEL_SERVICE_NAME=roostream-{program} .*$", page, re.MULTILINE)
    told = [word for line in lines for word in line.partition("#")[0].split()]
    variables = dict(word.split("=", 1) for word in told if word.startswith("OTEL_"))
    assert "opentelemetry-instrument -- roostream" in lines[-1]
    assert variables["OTEL_SERVICE_NAME"] == f"roostream-{program}"
    sampled = {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}  # so that nobody but the caller decides
    begin = (str(Path(sys.executable).with_name("opentelemetry-instrument")), "--")
    return begin, {**variables, **sampled, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}


@pytest.fixture(scope="module")
def stack(collector: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Its serving has traces from its first start on."""
    options = quick_options()
    traced = dataclasses.replace(options, overrides={**options.overrides, "serving": {"tracing": True}})
    with Stack(tmp_path_factory.mktemp("traced") / "home", traced) as running:
        serving = running.programs["serving"]
        begin, variables = as_the_page_says("serving", collector)
        with_traces = dataclasses.replace(
            serving, command=(*begin, *serving.command), env={**serving.env, **variables}
        )
        running.programs["serving"] = with_traces
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running


def rank(stack: Stack, request_id: str, traceparent: str) -> None:
    body = {
        "request_id": request_id,
        "user_id": 7,
        "session_id": 1,
        "candidates": [{"item_id": i} for i in (1, 2, 3)],
    }
    headers = {"content-type": "application/json", "traceparent": traceparent}
    call = urllib.request.Request(f"{stack.endpoints.serving}/v1/rank", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=60) as answer:
        assert answer.status == 200


def followed(stack: Stack, collector: Any, folder: Path, request_id: str, traceparent: str) -> dict[str, Any]:
    """What `roostream trace --json` says of a request that is asked once it follows."""
    begin, variables = as_the_page_says("trace", collector)
    place = ("--home", str(stack.home.root), "--wait", "120", "--json")
    command = (*begin, sys.executable, "-m", "roostream.cli.main", "trace", request_id, *place)
    said, told = folder / "said", folder / "told"
    with said.open("wb") as errors, told.open("wb") as out:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=out, stderr=errors)
        try:
            begun = f"waiting for request {request_id}"
            wait_until("it follows", lambda: begun in said.read_text() or process.poll() is not None, 120)
            rank(stack, request_id, traceparent)
            assert process.wait(180) == 0, said.read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    return json.loads(told.read_text())


def test_a_collector_gets_one_trace_from_the_caller_to_the_row_delta(
    stack: Stack, collector: Any, tmp_path: Path
) -> None:
    """Serving → Kafka → joiner → worker → row delta: five spans, each below the one before, the first below
    the caller's."""
    told = followed(stack, collector, tmp_path, "followed-1", f"00-{TRACE}-{CALLER}-01")
    wait_until(
        "all its spans are sent", lambda: sum(s.trace == TRACE for s in collector.spans) >= 1 + len(STEPS), 60
    )
    asked, *steps = collector.of(TRACE)
    assert (asked.service, asked.name, asked.kind, asked.parent) == (
        "roostream-serving",
        "POST /v1/rank",
        "server",
        CALLER,
    )
    assert [(span.service, span.name) for span in steps] == [
        ("roostream-trace", SPANS[name]) for name in STEPS
    ]
    ends_ns = [span.end_ns for span in steps]
    assert ends_ns == sorted(ends_ns) and all(span.begin_ns <= span.end_ns for span in steps)
    carried = f"00-{TRACE}-{asked.span}-01"
    for name, span in zip(STEPS, steps, strict=True):
        said, about = told["steps"][name], span.attributes
        assert about["messaging.destination.name"] == said["topic"] and said["topic"].endswith(TOPICS[name])
        assert about["messaging.kafka.offset"] == said["offset"]
        assert about["roostream.request_id"] == "followed-1"
        assert span.end_ns == said["reached_ms"] * 1_000_000
    assert [
        told["traceparent"],
        *(told["steps"][name]["details"]["traceparent"] for name in ("logged", "joined")),
    ] == [carried] * 3
    assert told["steps"]["logged"]["details"]["candidates"] == 3
    assert told["steps"]["trained"]["details"]["became"] == "DISPOSITION_TRAINED"


def test_a_caller_without_sampling_is_logged_but_not_exported(
    stack: Stack, collector: Any, tmp_path: Path
) -> None:
    told = followed(stack, collector, tmp_path, "followed-2", f"00-{UNSAMPLED}-{CALLER}-00")
    assert set(told["steps"]) == set(STEPS) and told["traceparent"] == ""
    assert "traceparent" not in told["steps"]["joined"]["details"]


def test_only_spans_of_the_callers_trace_are_exported(stack: Stack, collector: Any) -> None:
    """Users who are simulated ask without a trace, and nobody decided for them."""
    assert stack.stop_program("serving") == [], "it ended by itself"
    assert {span.trace for span in collector.spans} == {TRACE}
