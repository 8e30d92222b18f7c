"""`python -m benchmarks NAME …`: what `roostream bench` does, from a checkout alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.harness import LEAST_RUNS
from benchmarks.peers import ROOT
from benchmarks.report import table, write_pages
from benchmarks.run import RESULTS, questions, run
from roo.errors import RoostreamError


def main(name: str, json_file: Path | None = None, runs: int = LEAST_RUNS, against: str = "") -> int:
    """`name`: a question, `all`, `list`, or `report`; the exit code.

    Raises:
        RoostreamError: as `benchmarks.run.run`.
    """
    known = questions()
    if name == "list":
        for question in known.values():
            print(f"{question.name:18} {question.asks}")
        return 0
    if name == "report":
        for path in write_pages(known, ROOT / RESULTS):
            print(path.relative_to(ROOT))
        return 0
    results = [run(each, runs=runs, against=against) for each in (known if name == "all" else [name])]
    for result in results:
        for row in result["rows"]:
            print(f"\n{result['question']}: {row['name']}\n{table(row)}")
    if json_file is not None:
        json_file.write_text(json.dumps(results[0] if len(results) == 1 else results, indent=1, ensure_ascii=False) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", help="a benchmark, or all, list, report")
    parser.add_argument("--json", dest="json_file", type=Path)
    parser.add_argument("--runs", type=int, default=LEAST_RUNS)
    parser.add_argument("--against", default="")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main(**vars(_arguments())))
    except RoostreamError as error:
        sys.exit(f"error: {error}")
