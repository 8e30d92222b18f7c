"""`roostream plan`: the sizes that a load needs, the bottleneck; the table of docs/operations/scale.md."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import click

from roostream.cli.options import json_option
from roostream.cli.plan import measured
from roostream.cli.plan.sizing import Load, Need, bottleneck, plan
from roostream.errors import ConfigError
from roostream.schema.settings import SettingError


def _options(command: Any) -> Any:
    """One flag for each setting of `Load`."""
    for field in reversed(dataclasses.fields(Load)):
        needed = field.default is dataclasses.MISSING
        kind = int if field.type == "int" else float
        shown = {} if needed else {"default": field.default, "show_default": True}
        flag = f"--{field.name.replace('_', '-')}"
        command = click.option(
            flag, field.name, type=kind, required=needed, help=field.metadata["help"], **shown
        )(command)
    return command


@click.command("plan")
@_options
@json_option
def plan_command(as_json: bool, **values: Any) -> None:
    """Compute the sizes that a load needs, and the bottleneck, from the figures of committed benchmarks.

    \b
    Example:
      roostream plan --requests-per-s 10000 --candidates 20 --rows 10000000
    """
    try:
        load = Load(**values)
    except SettingError as error:
        raise ConfigError(f"--{error.key.replace('_', '-')}: {error.reason}") from None
    needs = plan(load, measured.read())
    print(json.dumps(as_plain(load, needs), indent=1) if as_json else "\n".join(lines(load, needs)))


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
    rows = [(need.what, f"{_number(need.amount)} {need.unit}".strip(), _end(need)) for need in needs]
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    table = [f"{what:{wide[0]}}  {count:{wide[1]}}  {end}".rstrip() for what, count, end in rows]
    enough = "enough for this load" if first.ends_at >= load.requests_per_s else "this load is higher"
    limit = (
        f"bottleneck: {first.what}, limited to {_number(first.ends_at)} requests/s however many there "
        f"are; {enough}"
    )
    why = [f"{need.what}: {need.why}" for need in needs]
    return [*table, "", limit, "", *why]


def _end(need: Need) -> str:
    return f"limit {_number(need.ends_at)} requests/s" if math.isfinite(need.ends_at) else ""


def _number(value: float) -> str:
    """Three significant digits, with thousands separators."""
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
_TABLE = re.compile(r"^\| requests/s \| rows \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)


def scale_table(figures: Mapping[str, float]) -> str:
    """Markdown with one row per load."""
    head = ["requests/s", "rows", "requests a step", *_COLUMNS.values(), "ends first"]
    lines = [_markdown_row(head), "|" + "---:|" * (len(head) - 1) + "---|"]
    for load in LOADS:
        needs = plan(load, figures)
        amounts, first = {need.what: need.amount for need in needs}, bottleneck(needs)
        load_cells = [f"{number:,.0f}" for number in (load.requests_per_s, load.rows, load.batch_requests)]
        cells = [*load_cells, *(_number(amounts[name]) for name in _COLUMNS)]
        lines.append(_markdown_row([*cells, f"{first.what} at {_number(first.ends_at)}"]))
    return "\n".join(lines) + "\n"


def renew_scale_table(text: str, figures: Mapping[str, float]) -> str:
    """The page with its table replaced."""
    assert _TABLE.search(text)
    return _TABLE.sub(lambda _: scale_table(figures), text, count=1)


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
