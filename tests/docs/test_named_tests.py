"""Every test that the documentation names as evidence exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TEST = re.compile(r"`(test_\w+)`")


def test_every_test_that_the_documentation_names_exists() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    existing = {
        name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for page in (ROOT / "docs").rglob("*.md"):
        assert set(_TEST.findall(page.read_text())) <= existing, page


def test_every_cell_of_what_survives_what_names_a_test() -> None:
    page = (ROOT / "docs/operations/backup.md").read_text()
    table = page.partition("## What survives what\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows
    for _, *cells in rows:
        assert cells[-1] and all(_TEST.search(cell) for cell in cells if cell), cells
