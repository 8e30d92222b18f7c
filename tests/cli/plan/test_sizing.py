"""`roostream plan` sizes a deployment for a load. Its figures come from published benchmark reports, needs
grow with the load, and each limit of the design is reported."""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.common import joiner_events
from benchmarks.common import samples as data
from joiner.config import JoinerConfig
from joiner.event_decoder import EventDecoder
from joiner.flink_job import MAX_PARALLELISM
from joiner.join import Join
from joiner.keyed_join import KeyedJoin
from joiner.state import Engagement, Impression
from param_server.eviction import ExpiryPolicy
from param_server.table import StackTable
from roostream.cli.main import cli
from roostream.cli.plan import measured
from roostream.cli.plan.cost import HOURS, Prices, cost_of
from roostream.cli.plan.plan_command import renew_tables
from roostream.cli.plan.sizing import (
    MAX_AUDITORS,
    MAX_PARTITIONS,
    MAX_TASK_MANAGERS,
    MAX_UPDATERS,
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
from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.rpc.server import MAX_CONNECTIONS
from roostream.wire.records import Record
from tests.joiner.cases import DictStore
from trainer.config import ControllerConfig
from trainer.dedupe import Dedupe

ROOT = Path(__file__).resolve().parents[3]
FIGURES = measured.read()


def needs_of(**load: float) -> dict[str, Need]:
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
        "joiner's state",
        "serving processes",
        "readers",
        "network",
    ],
)
def test_linear_costs_grow_linearly(what: str) -> None:
    small, large = needs_of(requests_per_s=20_000)[what].amount, needs_of(requests_per_s=200_000)[what].amount
    assert 9.0 < large / small < 11.0 or math.ceil(large) <= 10 * math.ceil(small)
    assert math.isinf(needs_of(requests_per_s=20_000)[what].ends_at)


def test_planned_bytes_of_the_joiners_state_match_the_join() -> None:
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
            due_ms = min(store.as_memory_state().due)
            KeyedJoin(join, store).advance(bytes(8), due_ms, due_ms)
    load = Load(
        requests_per_s=1, window_s=window_ms / 1000, history=4, engagements=num_engagements / num_requests
    )
    assert join_state_bytes(load) == pytest.approx(byte_seconds, rel=0.1)


def test_a_plan_has_the_fewest_workers_that_keep_up() -> None:
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
        needs_of(requests_per_s=1000, batch_requests=batch)["workers"].ends_at for batch in (512, 8192)
    )
    assert small < large / 2  # in small steps, the fixed cost of gradient sums and calls dominates


def test_the_bottleneck_is_found_and_an_impossible_load_is_reported() -> None:
    found = plan(Load(requests_per_s=1_000_000, rows=10**9), FIGURES)
    assert bottleneck(found).ends_at < 1_000_000
    done = CliRunner().invoke(cli, ["plan", "--requests-per-s", "1000000", "--rows", "1000000000"])
    assert f"bottleneck: {bottleneck(found).what}, limited to " in done.output
    assert "this load is higher" in done.output and done.output.count("(too little)") >= 5
    done = CliRunner().invoke(cli, ["plan", "--requests-per-s", "100"])
    assert "enough for this load" in done.output


def test_rows_determine_the_number_of_shards_and_the_memory_of_serving() -> None:
    few, many = needs_of(requests_per_s=10, rows=10**6), needs_of(requests_per_s=10, rows=10**10)
    assert few["shards"].amount == 1 and many["shards"].amount == math.ceil(
        10**10 * row_bytes(Load(requests_per_s=10)) / (64e9 * 0.6)
    )
    assert (
        "rows = replica" in few["a serving machine's memory"].why
        and "rows = cache" in many["a serving machine's memory"].why
    )


GROWING_NEEDS = (
    *("joiner's state", "dedupe ids", "feature updaters", "Redis", "Redis' memory", "auditors", "controller"),
    *("archivers", "compactors", "a compactor's memory", "readers", "row deltas from Kafka", "Kafka's disks"),
)


def test_everything_that_grows_has_a_line() -> None:
    small = needs_of(requests_per_s=5_000, users=10**5, rows=10**9)
    large = needs_of(requests_per_s=500_000, users=10**7, rows=10**9)
    assert {what for what in GROWING_NEEDS if not small[what].amount < large[what].amount} == set()
    # More task managers need more partitions, up to the most partitions that the programs support.
    largest = needs_of(requests_per_s=5_000_000, users=10**8, rows=10**9)
    amounts = [needs["partitions"].amount for needs in (small, large, largest)]
    assert amounts == sorted(set(amounts)) and amounts[-1] == MAX_PARTITIONS


@pytest.mark.parametrize("rate", [1.0, 100.0, 10_000.0, 10**6, 10**8])
def test_a_plan_promises_nothing_beyond_a_cap(rate: float) -> None:
    """A plan has no more processes than the programs support. Where a cap is reached, the reported limit is
    below the load.
    """
    found = needs_of(requests_per_s=rate, rows=10**9)
    caps = {
        "workers": MAX_WORKERS,
        "task managers": MAX_TASK_MANAGERS,
        "partitions": MAX_PARTITIONS,
        "archivers": MAX_PARTITIONS,
        "compactors": MAX_PARTITIONS,
        "feature updaters": MAX_UPDATERS,
        "auditors": MAX_AUDITORS,
    }
    assert MAX_TASK_MANAGERS == MAX_PARALLELISM
    for what, cap in caps.items():
        assert found[what].amount <= cap, what
    assert (found["Redis"].amount > Load(requests_per_s=1).busy) == (found["Redis"].ends_at < rate)
    assert (found["controller"].amount > MAX_CONNECTIONS) <= (found["controller"].ends_at < rate)


@pytest.mark.parametrize("load", [{}, {"core": 4.0, "flink_share": 1.0}, {"updater_us": 2000.0}])
@pytest.mark.parametrize("rate", [1, 3000, 8000, 10_000, 20_000, 50_000, 1e6])
def test_there_is_a_partition_for_each_process_that_shares_them(rate: float, load: dict[str, float]) -> None:
    """Programs refuse more workers, updaters or archivers than partitions."""
    needs = needs_of(requests_per_s=rate, **load)
    partitions = int(needs["partitions"].amount)
    for what in ("workers", "feature updaters", "auditors", "archivers", "compactors"):
        assert needs[what].amount <= partitions, what
    assert partitions % int(needs["auditors"].amount) == 0


def test_limits_do_not_depend_on_the_planned_load() -> None:
    """The rate at which a part reaches its limit is the same in a plan for a tenth of that rate and for ten
    times it. The limits of workers and shards are exceptions: a worker calls as many shards as the load
    needs.
    """
    for need in plan(Load(requests_per_s=10_000, rows=10**9), FIGURES):
        if math.isfinite(need.ends_at) and need.what not in ("shards", "workers"):
            limits = (
                needs_of(requests_per_s=need.ends_at * share, rows=10**9)[need.what] for share in (0.1, 10)
            )
            assert [found.ends_at for found in limits] == pytest.approx([need.ends_at] * 2, rel=0.02), (
                need.what
            )


def test_each_serving_machine_reads_all_row_deltas() -> None:
    found = needs_of(requests_per_s=100_000, rows=10**8)
    machines = found["serving machines"].amount
    assert machines > 5
    assert found["row deltas from Kafka"].amount == pytest.approx(found["row deltas"].amount * machines)


def test_planned_bytes_of_dedupe_ids_match_the_memory_they_take() -> None:
    num_ids, dedupe = 50_000, Dedupe(3_600_000)
    tracemalloc.start()
    rng = np.random.default_rng(0)
    for begin in range(0, num_ids, 512):
        ids = rng.integers(-(1 << 63), (1 << 63) - 1, min(512, num_ids - begin))
        dedupe.claim(ids, np.full(len(ids), begin))
        dedupe.settle()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = needs_of(requests_per_s=num_ids / 3600)["dedupe ids"]
    assert planned.amount * 1e9 == pytest.approx(used, rel=0.5) and num_ids == dedupe.cut().num_ids


def test_a_cost_is_its_parts_times_their_prices() -> None:
    load = Load(requests_per_s=2000)
    found = plan(load, FIGURES)
    free_storage = {"disk_gb_month": 0.0, "object_gb_month": 0.0, "network_gb": 0.0}
    cost = cost_of(load, found, Prices(machine_hour=2.0, **free_storage))
    assert cost.month == cost.machines_month == (cost.machines + cost.broker_machines) * 2.0 * HOURS
    more = cost_of(
        load, found, Prices(machine_hour=0.0, disk_gb_month=1.0, object_gb_month=0.0, network_gb=0.0)
    )
    assert more.month == more.disk_gb >= needs_of(requests_per_s=2000)["Kafka's disks"].amount * 1000
    few, many = (
        cost_of(one, plan(one, FIGURES), Prices()).object_gb
        for one in (Load(requests_per_s=10, rows=10**6), Load(requests_per_s=10, rows=10**9))
    )
    num_copies = (
        ControllerConfig.keep_hours + ControllerConfig.keep_days
    )  # as many complete copies of all rows are kept in the store
    assert many - few == pytest.approx(num_copies * (10**9 - 10**6) * 8 * Load(requests_per_s=1).dim / 1e9)
    sent_gb = cost.network_mb * 3600 * HOURS / 1000
    paid = cost_of(
        load, found, Prices(machine_hour=0.0, zone_share=1.0, **(free_storage | {"network_gb": 1.0}))
    )
    assert paid.month == pytest.approx(sent_gb)


def test_a_price_is_an_option_and_a_wrong_price_is_rejected() -> None:
    arguments = ["plan", "--requests-per-s", "2000", "--json"]
    monthly_costs = [
        json.loads(CliRunner().invoke(cli, [*arguments, "--machine-hour", price]).stdout)["cost"]["month"]
        for price in ("0", "1")
    ]
    assert monthly_costs[0] < monthly_costs[1]
    done = CliRunner().invoke(cli, [*arguments, "--machine-hour", "-1"])
    assert isinstance(done.exception, ConfigError) and "--machine-hour: expected" in str(done.exception)


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
    report = json.loads(done.stdout)
    assert report["load"] == dataclasses.asdict(Load(requests_per_s=20_000, candidates=50))
    assert {need["what"] for need in report["needs"]} == set(needs_of(requests_per_s=1))
    assert report["fits"] is (
        report["needs"][[n["what"] for n in report["needs"]].index(report["bottleneck"])]["ends_at"] >= 20_000
    )


def test_a_machine_that_is_too_small_for_a_compactor_limits_the_load_to_nothing() -> None:
    needs = needs_of(requests_per_s=100, machine_gb=1)
    assert needs["a compactor's memory"].ends_at == 0
    assert all(need.ends_at >= 0 for need in needs.values())


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
    assert renew_tables(text, FIGURES) == text
    faster = renew_tables(text, FIGURES | {"serve_20_us": 1.0, "serve_200_us": 2.0})
    assert faster != text and len(faster.splitlines()) == len(text.splitlines())


def test_counts_are_printed_exactly() -> None:
    """Printed counts are exact, because users copy them into settings: 1,020 partitions are no multiple of 64
    auditors.
    """
    done = CliRunner().invoke(cli, ["plan", "--requests-per-s", "1000000"])
    printed = {line[:26].strip(): line[26:].split() for line in done.output.splitlines()}
    assert printed["partitions"][:3] == ["1,024", "per", "topic"]
    assert 1024 % int(printed["auditors"][0]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--requests-per-s", "2000"), ""),
        (("--requests-per-s", "20000"), "the price of this load is unknown"),
        (("--requests-per-s", "10", "--candidates", "900"), "extrapolated"),
    ],
)
def test_a_price_beyond_the_figures_says_so(arguments: tuple[str, ...], sentence: str) -> None:
    printed = CliRunner().invoke(cli, ["plan", *arguments]).stdout.partition("a month at the given prices")[2]
    in_json = json.loads(CliRunner().invoke(cli, ["plan", "--json", *arguments]).stdout)["cost"]["caveats"]
    assert len(in_json) == bool(sentence)
    assert printed.splitlines()[1:] == in_json
    assert all(sentence in caveat for caveat in in_json)
    if "unknown" in sentence:
        assert "Redis" in in_json[0], "which reaches its limit before"
