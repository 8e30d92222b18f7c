"""One request from its caller to the rows that replicas get, as an OpenTelemetry collector sees it. Serving
and `roostream trace` are started as docs/http.md describes, with OpenTelemetry's own command and exporter."""

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
from tests.contract.source_tree import ROOT
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


def instrumentation_of(program: str, collector: Any) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command prefix and the environment from docs/http.md. Only the collector's address differs."""
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    lines = re.findall(rf"^export OTEL_.*$|^OTEL_SERVICE_NAME=roostream-{program} .*$", page, re.MULTILINE)
    words = [word for line in lines for word in line.partition("#")[0].split()]
    variables = dict(word.split("=", 1) for word in words if word.startswith("OTEL_"))
    assert "opentelemetry-instrument -- roostream" in lines[-1]
    assert variables["OTEL_SERVICE_NAME"] == f"roostream-{program}"
    sampled = {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}  # only the caller decides what is sampled
    prefix = (str(Path(sys.executable).with_name("opentelemetry-instrument")), "--")
    return prefix, {**variables, **sampled, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}


@pytest.fixture(scope="module")
def stack(collector: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose serving exports traces from its first start."""
    options = quick_options()
    traced = dataclasses.replace(options, overrides={**options.overrides, "serving": {"tracing": True}})
    with Stack(tmp_path_factory.mktemp("traced") / "home", traced) as running:
        serving = running.programs["serving"]
        prefix, variables = instrumentation_of("serving", collector)
        with_traces = dataclasses.replace(
            serving, command=(*prefix, *serving.command), env={**serving.env, **variables}
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


def follow(stack: Stack, collector: Any, folder: Path, request_id: str, traceparent: str) -> dict[str, Any]:
    """The answer of `roostream trace --json` for a request that is sent once the command waits for it."""
    prefix, variables = instrumentation_of("trace", collector)
    arguments = ("--home", str(stack.home.root), "--wait", "120", "--json")
    command = (*prefix, sys.executable, "-m", "roostream.cli.main", "trace", request_id, *arguments)
    errors_file, output_file = folder / "said", folder / "told"
    with errors_file.open("wb") as errors, output_file.open("wb") as out:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=out, stderr=errors)
        try:
            waiting_line = f"waiting for request {request_id}"
            wait_until(
                "the command waits for the request",
                lambda: waiting_line in errors_file.read_text() or process.poll() is not None,
                120,
            )
            rank(stack, request_id, traceparent)
            assert process.wait(180) == 0, errors_file.read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    return json.loads(output_file.read_text())


def test_a_collector_gets_one_trace_from_the_caller_to_the_row_delta(
    stack: Stack, collector: Any, tmp_path: Path
) -> None:
    """Serving → Kafka → joiner → worker → row delta: five spans. Each is a child of the previous one, and the
    first is a child of the caller's."""
    trace = follow(stack, collector, tmp_path, "followed-1", f"00-{TRACE}-{CALLER}-01")
    wait_until(
        "all spans are exported", lambda: sum(s.trace == TRACE for s in collector.spans) >= 1 + len(STEPS), 60
    )
    root_span, *steps = collector.of(TRACE)
    assert (root_span.service, root_span.name, root_span.kind, root_span.parent) == (
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
    carried, reached_ms = f"00-{TRACE}-{root_span.span}-01", 0
    for name, span in zip(STEPS, steps, strict=True):
        step, attributes = trace["steps"][name], span.attributes
        assert attributes["messaging.destination.name"] == step["topic"] and step["topic"].endswith(
            TOPICS[name]
        )
        assert attributes["messaging.kafka.offset"] == step["offset"]
        assert attributes["roostream.request_id"] == "followed-1"
        reached_ms = max(
            reached_ms, step["reached_ms"]
        )  # a record may be read before that of the step before
        assert span.end_ns == reached_ms * 1_000_000
    assert [
        trace["traceparent"],
        *(trace["steps"][name]["details"]["traceparent"] for name in ("logged", "joined")),
    ] == [carried] * 3
    assert trace["steps"]["logged"]["details"]["candidates"] == 3
    assert trace["steps"]["trained"]["details"]["became"] == "DISPOSITION_TRAINED"


def test_a_caller_without_sampling_is_logged_but_not_exported(
    stack: Stack, collector: Any, tmp_path: Path
) -> None:
    trace = follow(stack, collector, tmp_path, "followed-2", f"00-{UNSAMPLED}-{CALLER}-00")
    assert set(trace["steps"]) == set(STEPS) and trace["traceparent"] == ""
    assert "traceparent" not in trace["steps"]["joined"]["details"]


def test_only_spans_of_the_callers_trace_are_exported(stack: Stack, collector: Any) -> None:
    """Simulated users send no trace context, and no sampler selects their requests."""
    assert stack.stop_program("serving") == [], "serving must stop in time by itself"
    assert {span.trace for span in collector.spans} == {TRACE}
