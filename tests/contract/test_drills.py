"""Drills of the page of day two: each is there, and what it cost is written down."""

from __future__ import annotations

import re

from tests.chaos.day_two import blocks
from tests.contract.house import ROOT

PAGE, FIGURES = ROOT / "docs/operations/day-two.md", ROOT / "docs/benchmarks/day-two.md"
NOBODY_ASKS = {"Words", "Begin", "Back to an earlier commit", "More of Flink", "Kafka's disks are lost"}


def drills() -> list[str]:
    """The last cell of each case."""
    rows = re.findall(r"^\| .* \| .* \| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows[0] == "drill"
    return rows[1:]


def test_every_drill_is_a_test_that_there_is() -> None:
    named = {name for cell in drills() for name in re.findall(r"`([\w/]+(?:\.py)?)`", cell)}
    assert len(named) >= 7
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "tests/chaos" / name).exists(), name


def test_every_drill_of_chaos_has_its_figures_or_it_is_said_that_it_has_none() -> None:
    told = FIGURES.read_text(encoding="utf-8")
    for cell in drills():
        for name in re.findall(r"\btest_\w+\.py", cell):
            assert name in told or "test_coordinator" in name, name


def test_what_every_block_cost_is_told_and_nobody_was_left_without_an_answer_or_a_sample() -> None:
    told = FIGURES.read_text(encoding="utf-8")
    rows = {name: cells.split(" | ") for name, cells in re.findall(r"^\| ([A-Z][\w ]+) \| (.*) \|$", told, re.MULTILINE)}
    for heading in blocks().keys() - NOBODY_ASKS:
        took_s, pause_s, asked, failed = rows[heading]
        assert float(took_s) > 0 and float(pause_s) > 0 and int(asked) > 10 and failed == "0", heading
    assert "Lost: 0 samples" in told
    assert all(f"*{heading}*" in told for heading in NOBODY_ASKS - {"Words", "Begin"})
