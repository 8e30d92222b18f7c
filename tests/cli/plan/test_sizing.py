"""What a load needs follows from committed figures, grows where it should, and ends where something ends."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.common import joiner_events
from benchmarks.common import samples as data
from joiner.config import JoinerConfig
from joiner.event_decoder import EventDecoder
from joiner.join import Join
from joiner.keyed_join import KeyedJoin
from joiner.state import Engagement, Impression
from param_server.eviction import ExpiryPolicy
from param_server.table import StackTable
from roostream.cli.main import cli
from roostream.cli.plan import measured
from roostream.cli.plan.plan_command import renew_scale_table
from roostream.cli.plan.sizing import (
    Costs,
    Load,
    Need,
    bottleneck,
    join_state_bytes,
    plan,
    row_bytes,
    shards_for,
    step_s,
    workers_for,
)
from roostream.errors import ConfigError
from roostream.wire.records import Record
from tests.joiner.cases import DictStore

ROOT = Path(__file__).resolve().parents[3]
FIGURES = measured.read()


def needs(**load: float) -> dict[str, Need]:
    return {need.what: need for need in plan(Load(**load), FIGURES)}  # type: ignore[arg-type]


def test_every_figure_equals_the_one_in_the_committed_report() -> None:
    assert measured.of_reports(ROOT / "docs" / "benchmarks" / "json") == FIGURES


def test_a_report_that_lacks_a_figure_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"docs/benchmarks/serving-request\.md, 'a request of 20"):
        measured.of_reports(tmp_path)


@pytest.mark.parametrize(
    "what",
    [
        "brokers",
        "Kafka's disks",
        "task managers",
        "joiner's state",
        "serving processes",
        "readers",
        "network",
    ],
)
def test_linear_costs_grow_linearly(what: str) -> None:
    small, large = needs(requests_per_s=20_000)[what].amount, needs(requests_per_s=200_000)[what].amount
    assert 9.0 < large / small < 11.0 or math.ceil(large) <= 10 * math.ceil(small)
    assert math.isinf(needs(requests_per_s=20_000)[what].ends_at)


def test_the_joiners_state_is_what_the_join_stores_of_the_demos_requests() -> None:
    schema, window_ms, num_requests = data.demo_schema(), 20_000, 100
    decoder = EventDecoder({schema.fingerprint: schema}.get, schema.limits)
    join = Join(JoinerConfig(window_ms=window_ms).rules, {schema.fingerprint: schema}.get, schema.limits)
    stores: dict[str, DictStore] = {}  # one user a request
    opened_ms: dict[str, int] = {}
    num_engagements = 0
    for n, e in enumerate(joiner_events.events(schema, num_requests)):
        found = decoder.decode(Record(e.topic, 0, n, e.time_ms, e.key, e.value))
        assert isinstance(found, (Impression, Engagement))
        store = stores.setdefault(found.request_id, DictStore())
        KeyedJoin(join, store).apply(e.key, found, 0)
        num_engagements += isinstance(found, Engagement)
        if isinstance(found, Impression):
            opened_ms[found.request_id] = min(opened_ms.get(found.request_id, found.time_ms), found.time_ms)
    byte_seconds = 0.0
    for windows in (1, 10, 10):  # open, closed, expired
        stored = sum(len(name) + len(value) for store in stores.values() for name, value in store.items())
        byte_seconds += stored / num_requests * windows * window_ms / 1000
        for store in stores.values():
            due_ms = min(store.whole().due)
            KeyedJoin(join, store).advance(bytes(8), due_ms, due_ms)
    load = Load(
        requests_per_s=1, window_s=window_ms / 1000, history=4, engagements=num_engagements / num_requests
    )
    assert join_state_bytes(load) == pytest.approx(byte_seconds, rel=0.1)


def test_as_many_workers_as_keep_up_and_no_more() -> None:
    load = Load(requests_per_s=10_000)
    costs = Costs(load, FIGURES)
    shards = shards_for(load, costs)
    workers = workers_for(costs, shards)
    wanted_s = load.batch_requests / load.requests_per_s * load.busy
    assert (
        step_s(costs, load.batch_requests, workers, shards)
        <= wanted_s
        < step_s(costs, load.batch_requests, workers - 1, shards)
    )


def test_workers_are_limited_by_the_fixed_cost_of_a_step() -> None:
    small, large = (
        needs(requests_per_s=1000, batch_requests=batch)["workers"].ends_at for batch in (512, 8192)
    )
    assert small < large / 2  # small steps are all sum and calls


def test_the_bottleneck_is_found_and_an_impossible_load_is_reported() -> None:
    found = plan(Load(requests_per_s=1_000_000, rows=10**9), FIGURES)
    assert bottleneck(found).what == "workers" and bottleneck(found).ends_at < 1_000_000
    done = CliRunner().invoke(cli, ["plan", "--requests-per-s", "1000000", "--rows", "1000000000"])
    assert "bottleneck: workers, limited to " in done.output and "this load is higher" in done.output
    done = CliRunner().invoke(cli, ["plan", "--requests-per-s", "100"])
    assert "enough for this load" in done.output


def test_rows_determine_the_number_of_shards_and_the_memory_of_serving() -> None:
    few, many = needs(requests_per_s=10, rows=10**6), needs(requests_per_s=10, rows=10**10)
    assert few["shards"].amount == 1 and many["shards"].amount == math.ceil(
        10**10 * row_bytes(Load(requests_per_s=10)) / (64e9 * 0.6)
    )
    assert (
        "rows = shared" in few["a serving machine's memory"].why
        and "rows = cache" in many["a serving machine's memory"].why
    )


@pytest.mark.parametrize(("candidates", "history"), [(5, 30), (20, 30), (20, 100), (200, 30), (11, 50)])
def test_estimated_bytes_of_a_sample_are_close_to_the_encoder(candidates: int, history: int) -> None:
    records = data.sample_records(data.demo_schema(), 20, candidates=candidates, history=history)
    made = sum(len(record.value or b"") for record in records) / len(records)
    assert Load(requests_per_s=1, candidates=candidates, history=history).sample_bytes == pytest.approx(
        made, rel=0.1
    )


def test_estimated_bytes_of_a_row_equal_the_shards_table() -> None:
    schema = data.demo_schema()
    tables = [table for table in schema.tables if table.dim == 16]
    table = StackTable("s", tables, seed=0, num_buckets=64, eviction=ExpiryPolicy)
    per_row = table.num_bytes / table.index.capacity
    assert per_row <= row_bytes(Load(requests_per_s=1, dim=16)) <= 2 * per_row


def test_json_and_text_plans_agree() -> None:
    done = CliRunner().invoke(cli, ["plan", "--requests-per-s", "20000", "--candidates", "50", "--json"])
    told = json.loads(done.stdout)
    assert told["load"] == dataclasses.asdict(Load(requests_per_s=20_000, candidates=50))
    assert {need["what"] for need in told["needs"]} == set(needs(requests_per_s=1))
    assert told["fits"] is (
        told["needs"][[n["what"] for n in told["needs"]].index(told["bottleneck"])]["ends_at"] >= 20_000
    )


def test_every_figure_names_its_source() -> None:
    for need in plan(Load(requests_per_s=1000), FIGURES):
        assert need.why
    cited = " ".join(need.why for need in plan(Load(requests_per_s=1000), FIGURES))
    assert cited.count("docs/benchmarks/") >= 10 and "assumed" in cited


def test_an_invalid_flag_is_rejected_by_name() -> None:
    done = CliRunner().invoke(cli, ["plan", "--requests-per-s", "0"])
    assert (
        isinstance(done.exception, ConfigError)
        and str(done.exception) == "--requests-per-s: expected above 0, got 0.0"
    )


def test_the_table_of_the_page_equals_the_plan() -> None:
    text = (ROOT / "docs" / "operations" / "scale.md").read_text(encoding="utf-8")
    assert renew_scale_table(text, FIGURES) == text
    faster = renew_scale_table(text, FIGURES | {"serve_20_us": 1.0, "serve_200_us": 2.0})
    assert faster != text and len(faster.splitlines()) == len(text.splitlines())
