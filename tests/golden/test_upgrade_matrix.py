"""docs/operations/upgrade.md names a test for every promise, and each named test exists."""

from __future__ import annotations

import ast
import re

from tests.contract.source_tree import ROOT


def test_every_test_that_the_upgrade_page_names_exists() -> None:
    page = (ROOT / "docs/operations/upgrade.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page))
    assert len(named) >= 9
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, test)


def test_every_golden_test_of_another_version_is_named() -> None:
    page = (ROOT / "docs/operations/upgrade.md").read_text(encoding="utf-8")
    for file in sorted((ROOT / "tests/golden").glob("test_golden_*.py")):
        assert f"tests/golden/{file.name}::" in page, file.name
