"""`roostream bench`: list the questions, ask them, make the pages."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness import MIN_RUNS
from benchmarks.peers import ROOT
from benchmarks.report import table, write_pages
from benchmarks.run import RESULTS, questions, run
from roostream.cli.plan import measured, scale_page


def main(name: str, json_file: Path | None = None, runs: int = MIN_RUNS, against: str = "") -> int:
    """`name`: a question, `all`, `list`, or `report`; the exit code.

    Raises:
        RoostreamError: as `benchmarks.run.run` and `benchmarks.report.pages`.
    """
    known = questions()
    if name == "list":
        for question in known.values():
            print(f"{question.name:18} {question.asks}")
        return 0
    if name == "report":
        figures = measured.write(ROOT / RESULTS / "json")
        scale = scale_page.renew(ROOT / "docs" / "operations" / "scale.md", measured.read())
        for path in (*write_pages(known, ROOT / RESULTS), figures, scale):
            print(path.relative_to(ROOT))
        return 0
    results = []
    for each in known if name == "all" else [name]:
        result = run(each, runs=runs, against=against)
        results.append(result)
        for row in result["rows"]:
            print(f"\n{each}: {row['name']}\n{table(row)}")
    if json_file is not None:
        text = json.dumps(results[0] if len(results) == 1 else results, indent=1, ensure_ascii=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    return 0
