"""Pages of the benchmarks, made from docs/benchmarks/json/NAME*.json when the documentation is built."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import FORMAT
from roostream.errors import ConfigError

INDEX = "runs.md"


def pages(known: Mapping[str, Benchmark], results: Path) -> dict[str, str]:
    """File name → text of the pages of all benchmarks with results, and of the index.

    Raises:
        ConfigError: a result has another format or belongs to an unknown benchmark.
    """
    results_by_name: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("format") != FORMAT or result.get("question") not in known:
            raise ConfigError(
                f"{path.name}: expected a result of format {FORMAT} of a known benchmark; run the "
                "benchmark again"
            )
        results_by_name.setdefault(result["question"], []).append(result)
    made = {
        f"{name}.md": page(known[name], results_by_name[name]) for name in known if name in results_by_name
    }
    return {INDEX: _index(known, results_by_name), **made}


def page(benchmark: Benchmark, results: Sequence[Mapping[str, Any]]) -> str:
    """Summary, interpretation, then each result with hardware, commit, command and tables; newest result
    first."""
    parts = [f"# {benchmark.name}", benchmark.summary, "## What it means", benchmark.interpretation]
    for result in sorted(results, key=lambda r: (r["taken"], r["commit"]["describe"]), reverse=True):
        parts += [f"## Taken {result['taken']} at {commit_of(result)}", _circumstances(result)]
        for row in result["rows"]:
            parts += [f"### {row['name']}", table(row)]
    return "\n\n".join(parts) + "\n"


def commit_of(result: Mapping[str, Any]) -> str:
    return result["commit"]["describe"] + (
        ", with changes that are not committed" if result["commit"]["dirty"] else ""
    )


def _circumstances(result: Mapping[str, Any]) -> str:
    here = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    load = f"load average before: {here['load_before']}"
    return "\n".join(
        (
            f"- hardware: {here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, {here['system']}",
            f"- {load}: **the machine was busy with other work**; trust ratios, not speeds"
            if here["busy"]
            else f"- {load}",
            f"- versions: {versions}",
            f"- command: `{result['command']}`",
        )
    )


def table(row: Mapping[str, Any]) -> str:
    """Markdown: a line per subject with its figure, its spread, and its ratio to the first one."""
    if "skipped" in row:
        return f"Not asked: {row['skipped']}."
    unit, rate = row["unit"], row["shows"] == "rate"
    clock = row.get("time") or ("CPU time" if row["clock"] == "cpu" else "wall time")
    one = unit.removesuffix("es") if unit.endswith("ches") else unit.removesuffix("s")
    figure = f"{unit}/s" if rate else f"µs {'an' if one[0] in 'aeiou' else 'a'} {one}"
    first = row["subjects"][0]["name"]
    lines = [
        f"| | {figure} ({clock}) | least .. most | {first} is × as fast | least .. most |",
        "|---|---:|---|---:|---|",
    ]
    ratios = {ratio["to"]: ratio["times_as_fast"] for ratio in row["ratios"]}
    for subject in row["subjects"]:
        name = (
            subject["name"]
            if subject["role"] in ("ours", "stage")
            else f"{subject['name']} ({subject['role']})"
        )
        if "unavailable" in subject:
            why = (
                "was not there"
                if subject["role"] == "before"
                else f"peer unavailable: {subject['unavailable']}"
            )
            lines.append(f"| {name} | {why} | | | |")
            continue
        cost = subject[f"{row['clock']}_us"]
        ends = sorted(_shown(cost[end], rate) for end in ("least", "most"))
        ratio = ratios.get(subject["name"])
        now = "now " if subject["role"] == "before" else ""
        compared = (
            f"{now}{_number(ratio['median'])} | {_number(ratio['least'])} .. {_number(ratio['most'])}"
            if ratio
            else " | "
        )
        median = _number(_shown(cost["median"], rate))
        lines.append(f"| {name} | {median} | {_number(ends[0])} .. {_number(ends[1])} | {compared} |")
    return "\n".join([*lines, *_figures(row), *_derived(row)])


def _figures(row: Mapping[str, Any]) -> list[str]:
    """A second table of the subjects' other figures: medians with least .. most."""
    with_figures = [subject for subject in row["subjects"] if "figures" in subject]
    if not with_figures:
        return []
    names = list(dict.fromkeys(name for subject in with_figures for name in subject["figures"]))
    lines = ["", "| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for subject in with_figures:
        cells = (_middle_and_ends(subject["figures"].get(name)) for name in names)
        lines.append(f"| {subject['name']} | " + " | ".join(cells) + " |")
    return lines


def _middle_and_ends(figure: Mapping[str, float] | None) -> str:
    return (
        f"{_number(figure['median'])} ({_number(figure['least'])} .. {_number(figure['most'])})"
        if figure
        else ""
    )


def _derived(row: Mapping[str, Any]) -> list[str]:
    """A last table of the figures that are derived for the row."""
    if "figures" not in row:
        return []
    cells = [
        (name, _number(f["median"]), _number(f["least"]), _number(f["most"]))
        for name, f in row["figures"].items()
    ]
    return [
        "",
        "| | | least .. most |",
        "|---|---:|---|",
        *(f"| {n} | {m} | {least} .. {most} |" for n, m, least, most in cells),
    ]


def _shown(cost_us: float, rate: bool) -> float:
    return 1e6 / max(cost_us, 1e-9) if rate else cost_us


def _number(value: float) -> str:
    """Three significant digits, thousands apart."""
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    return f"{value:.3g}"


def _index(known: Mapping[str, Benchmark], found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = [f"| [{name}]({name}.md) | {known[name].summary} |" for name in known if name in found]
    text = (
        "Each page shows one benchmark: what it asks, how to read it, and its results, newest first. "
        "`roostream bench NAME` runs it again. The documents are in `docs/benchmarks/json`."
    )
    return (
        "\n".join(["# All measurements", "", text, "", "| benchmark | question |", "|---|---|", *rows]) + "\n"
    )
