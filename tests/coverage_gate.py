"""How much of the project the tests run: at least 90 % of all lines, and 70 % of each file, or a reason beside it.

`make coverage` measures (all tests but e2e, chaos and slow ones; programs that they start included) and ends here. Bodies of
numba kernels are left out by rule (pyproject.toml): they run compiled, where nothing can watch their lines.
It is a target of its own: on CPython 3.11 measuring makes the tests of plain Python about 1.6 times as slow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

LEAST_OF_ALL, LEAST_OF_A_FILE = 90.0, 70.0

REASONS: dict[str, str] = {
    "command/audit/audit_command.py": "starts or asks a real broker; tests/e2e. What it counts with is accounts.py",
    "command/audit/auditor_program.py": "imports and runs a program; tests/e2e",
    "command/control.py": "starts and stops a whole stack in the background; tests/e2e",
    "command/demo.py": "a whole stack with a live table; tests/e2e and `make demo`",
    "command/replay/through_stack.py": "a replay through a whole stack; tests/e2e",
    "command/status.py": "looks at a running stack; tests/e2e. What it shows is status_table.py",
    "command/status_command.py": "looks at a running stack; tests/e2e",
    "features/main.py": "imports and runs a program; tests/e2e",
    "infra/broker_alone.py": "starts a real broker in a stopped home; the e2e test of `roostream audit`",
    "infra/kafka_broker.py": "formats and starts a broker; the tests of test_local_services.py that are marked e2e",
    "infra/prepare.py": "the steps of `make setup`, which every target runs first",
    "infra/stack.py": "starts real programs; the tests of test_local_services.py that are marked e2e, and tests/e2e",
    "joiner/job.py": "builds the Flink job in a process that Flink starts; tests/e2e",
    "joiner/local_kafka.py": "the local engine's adapter to a real broker; tests marked e2e",
    "joiner/main.py": "submits the job to a running cluster; tests/e2e",
    "joiner/operator.py": "runs in the Python that Flink embeds; tests/e2e",
    "param_server/rows_topic.py": "the adapter to a real broker; tests of test_rows_kafka.py that are marked e2e",
    "trainer/control/controller_program.py": "puts the program together over a real broker; tests/e2e",
    "trainer/main.py": "imports and runs a program; tests/e2e",
    "trainer/worker_program.py": "puts the program together over a real broker; tests/e2e",
    "traffic/main.py": "runs until it is told to stop, against a real server; tests/e2e",
}
"""File → why less of it is run than of others, and what runs it instead."""


def refusals(percent: Mapping[str, float], total: float, reasons: Mapping[str, str]) -> list[str]:
    """What is wrong with these figures (file → percent of its lines), one sentence each; [] = nothing."""
    found = [] if total >= LEAST_OF_ALL else [f"expected {LEAST_OF_ALL:g} % of all lines to be run by tests, got {total:.1f} %"]
    for name, figure in sorted(percent.items(), key=lambda item: item[1]):
        if figure < LEAST_OF_A_FILE and name not in reasons:
            found.append(
                f"{name}: expected {LEAST_OF_A_FILE:g} % of its lines to be run, got {figure:.0f} %; test it, or say why not"
            )
        if figure >= LEAST_OF_ALL and name in reasons:
            found.append(f"{name}: {figure:.0f} % of its lines are run; take its reason out")
    return found + [f"{name}: a reason for a file that isn't there; take it out" for name in sorted(set(reasons) - set(percent))]


def main(report: Path) -> int:
    """`report`: what `coverage json` wrote."""
    measured = json.loads(report.read_text(encoding="utf-8"))
    percent = {name: entry["summary"]["percent_covered"] for name, entry in measured["files"].items()}
    total = measured["totals"]["percent_covered"]
    wrong = refusals(percent, total, REASONS)
    print(
        "\n".join(wrong) or f"{total:.1f} % of all lines are run by tests, {min(percent.values()):.0f} % of the least tested file"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
