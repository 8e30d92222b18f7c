"""`roostream plan`: the sizes that a load needs, the bottleneck, the cost; the tables of
docs/operations/scale.md."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import click

from roostream.cli.options import json_option, settings_flags
from roostream.cli.output import print_json
from roostream.cli.plan import measured
from roostream.cli.plan.cost import Cost, Prices, cost_of
from roostream.cli.plan.sizing import MAX_CANDIDATES, Load, Need, bottleneck, plan
from roostream.errors import ConfigError
from roostream.schema.settings import SettingError


@click.command("plan", params=[*settings_flags(Load), *settings_flags(Prices)])
@json_option
def plan_command(as_json: bool, **values: Any) -> None:
    """Compute the sizes that a load needs, and the bottleneck, from the figures of committed benchmarks.

    \b
    Example:
      roostream plan --requests-per-s 10000 --candidates 20 --rows 10000000
    """
    names = {field.name for field in dataclasses.fields(Prices)}
    try:
        load = Load(**{name: value for name, value in values.items() if name not in names})
        prices = Prices(**{name: value for name, value in values.items() if name in names})
    except SettingError as error:
        raise ConfigError(f"--{error.key.replace('_', '-')}: {error.reason}") from None
    try:
        needs = plan(load, measured.read())
        cost = cost_of(load, needs, prices)
        if not math.isfinite(cost.month):
            raise OverflowError
        caveats = caveats_of(load, needs)
        text = "\n".join([*lines(load, needs), "", *cost_lines(cost), *caveats])
    except ArithmeticError:
        raise ConfigError(
            "expected a load and prices that can be computed with, got extreme numbers; give smaller "
            "numbers, but not nearly 0"
        ) from None
    if as_json:
        print_json(
            {**as_plain(load, needs), "cost": {**cost._asdict(), "month": cost.month, "caveats": caveats}}
        )
    else:
        click.echo(text)


def as_plain(load: Load, needs: list[Need]) -> Mapping[str, Any]:
    """Plain values with stable keys; an unlimited load is null."""
    parts = [
        {**need._asdict(), "ends_at": need.ends_at if math.isfinite(need.ends_at) else None} for need in needs
    ]
    first = bottleneck(needs)
    return {
        "load": dataclasses.asdict(load),
        "needs": parts,
        "bottleneck": first.what,
        "fits": first.ends_at >= load.requests_per_s,
    }


def lines(load: Load, needs: list[Need]) -> list[str]:
    """One line per part, the bottleneck, and the reasons."""
    first = bottleneck(needs)
    rows = [(need.what, f"{_number(need.amount)} {need.unit}".strip(), _end(need, load)) for need in needs]
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    table = [f"{what:{wide[0]}}  {count:{wide[1]}}  {end}".rstrip() for what, count, end in rows]
    enough = "enough for this load" if first.ends_at >= load.requests_per_s else "this load is higher"
    limit = f"bottleneck: {first.what}, limited to {_number(first.ends_at)} requests/s; {enough}"
    why = [f"{need.what}: {need.why}" for need in needs]
    return [*table, "", limit, "", *why]


def cost_lines(cost: Cost) -> list[str]:
    """What the plan needs of machines, disks and network, and its price."""
    return [
        f"machines: {cost.machines} for {_number(cost.cores)} cores and {_number(cost.memory_gb)} GB, and "
        f"{cost.broker_machines} for brokers",
        f"disks: {_number(cost.disk_gb)} GB; object store: {_number(cost.object_gb)} GB; "
        f"network: {_number(cost.network_mb)} MB/s",
        f"a month at the given prices: {_number(cost.month)} = machines {_number(cost.machines_month)} + "
        f"disks {_number(cost.disks_month)} + objects {_number(cost.objects_month)} + network "
        f"{_number(cost.network_month)}",
    ]


def caveats_of(load: Load, needs: list[Need]) -> list[str]:
    """A sentence for each reason why the cost is not that of this load."""
    found = []
    if full := [need.what for need in needs if need.ends_at < load.requests_per_s]:
        parts = " and ".join(filter(None, (", ".join(full[:-1]), full[-1])))
        found.append(
            f"the price of this load is unknown, because {parts} cannot grow that far; it is higher than this"
        )
    if load.candidates > MAX_CANDIDATES:
        found.append(
            f"the figures are extrapolated to {load.candidates:,} candidates; at most {MAX_CANDIDATES} a "
            "request were measured"
        )
    return found


def _end(need: Need, load: Load) -> str:
    limit = f"limit {_number(need.ends_at)} requests/s{_mark(need, load)}"
    return limit if math.isfinite(need.ends_at) else ""


def _mark(need: Need, load: Load) -> str:
    return " (too little)" if need.ends_at < load.requests_per_s else ""


def _number(value: float) -> str:
    """With thousands separators: a count as it is, another value with three significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{float(f'{value:.3g}'):g}"


LOADS = (
    Load(requests_per_s=25, rows=10**5, batch_requests=512),
    Load(requests_per_s=1000, rows=10**6),
    Load(requests_per_s=10**4, rows=10**7),
    Load(requests_per_s=10**5, rows=10**8, batch_requests=16_384),
    Load(requests_per_s=10**6, rows=10**9, batch_requests=65_536),
)
_COLUMNS = {
    "serving processes": "serving processes",
    "task managers": "task managers",
    "workers": "workers",
    "shards": "shards",
    "brokers": "brokers",
    "Kafka's disks": "Kafka's disks, TB",
    "row deltas": "row deltas, MB/s",
}
_COST_LOADS = (
    Load(requests_per_s=100, rows=10**6),
    Load(requests_per_s=2000, rows=10**6),
    Load(requests_per_s=20_000, rows=10**7),
)
_LIMITS_LOAD = Load(requests_per_s=10_000, rows=10**7)
_REMEDIES = {
    "auditors": "a smaller `compare_share`, or none: training does not need them",
    "feature updaters": "none: programs refuse more",
    "Redis": "a faster core; none yet beyond it, since all keys are in one Redis",
    "compactors": "none: one per partition",
    "a compactor's memory": "larger machines",
    "controller": "larger shards (`--machine-gb`), so that there are fewer",
    "workers": "larger steps (`--batch-requests`), a device per worker (`--core 0.05`), a selection",
    "task managers": "a shorter `late_horizon_ms`, larger disks; then cores that join faster",
    "row deltas": 'a larger `publish_interval_ms`, or `rows = "cache"` with `rows_buckets`',
    "row deltas from Kafka": "the same, or more brokers",
    "partitions": "none: programs refuse more",
    "archivers": "none: one per partition",
    "shards": "none: one per bucket",
    "dedupe ids": "a shorter `dedupe_horizon_ms`",
}


def scale_table(figures: Mapping[str, float]) -> str:
    """Markdown with one row per load. A number that is a limit and does not suffice is marked."""
    head = ["requests/s", "rows", "requests a step", *_COLUMNS.values(), "ends first"]
    lines = [_markdown_row(head), "|" + "---:|" * (len(head) - 1) + "---|"]
    for load in LOADS:
        needs = plan(load, figures)
        found, first = {need.what: need for need in needs}, bottleneck(needs)
        load_cells = [f"{number:,.0f}" for number in (load.requests_per_s, load.rows, load.batch_requests)]
        cells = [*load_cells, *(_number(found[name].amount) + _mark(found[name], load) for name in _COLUMNS)]
        lines.append(_markdown_row([*cells, f"{first.what} at {_number(first.ends_at)}"]))
    return "\n".join(lines) + "\n"


def limits_table(figures: Mapping[str, float]) -> str:
    """Markdown with one row per limit, the lowest first."""
    needs = [need for need in plan(_LIMITS_LOAD, figures) if math.isfinite(need.ends_at)]
    lines = [_markdown_row(["part", "limit, requests/s", "what moves it"]), "|---|---:|---|"]
    for need in sorted(needs, key=lambda need: need.ends_at):
        lines.append(_markdown_row([need.what, _number(need.ends_at), _REMEDIES[need.what]]))
    return "\n".join(lines) + "\n"


def cost_table(figures: Mapping[str, float]) -> str:
    """Markdown with one row per load, at the default prices."""
    head = (
        "requests/s, rows, machines, brokers, disk GB, object store GB, network MB/s, a month, of it machines"
    )
    lines = [_markdown_row(head.split(", ")), "|" + "---:|" * len(head.split(", "))]
    for load in _COST_LOADS:
        needs = plan(load, figures)
        cost = cost_of(load, needs, Prices())
        month = _number(cost.month) + _mark(bottleneck(needs), load)
        disks = (cost.disk_gb, cost.object_gb, cost.network_mb)
        sizes = [f"{load.requests_per_s:,.0f}", f"{load.rows:,.0f}", str(cost.machines)]
        sizes += [str(cost.broker_machines), *map(_number, disks), month, _number(cost.machines_month)]
        lines.append(_markdown_row(sizes))
    return "\n".join(lines) + "\n"


_TABLES = (
    ("| requests/s | rows | requests a step |", scale_table),
    ("| part | limit, requests/s |", limits_table),
    ("| requests/s | rows | machines |", cost_table),
)


def renew_tables(text: str, figures: Mapping[str, float]) -> str:
    """The page with its tables replaced."""
    for head, table in _TABLES:
        found = re.compile(rf"^{re.escape(head)}.*?\n(?=\n)", re.MULTILINE | re.DOTALL)
        assert found.search(text), head
        text = found.sub(lambda _, table=table: table(figures), text, count=1)  # type: ignore[misc]
    return text


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
