"""One word, one meaning: a type's name has one owner, and a file's name says which room it is in."""

from __future__ import annotations

import ast
import re

from tests.contract.house import ROOT, place, sources, tree

MOST_DOUBLED_TYPES = 7
MOST_DOUBLED_FILES = 7
EVERY_ROOM_HAS = {"__init__.py", "config.py", "main.py"}
PAGE = re.compile(r"[\w./-]*\b[\w-]+\.md\b")


def owners_of_types() -> dict[str, list[str]]:
    """Name of a class (a leading underscore aside) → the files that define one of it."""
    found: dict[str, list[str]] = {}
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(place(path))
    return found


def test_few_type_names_have_two_owners() -> None:
    doubled = {name: owners for name, owners in owners_of_types().items() if len(owners) > 1}
    assert len(doubled) <= MOST_DOUBLED_TYPES, doubled


def test_few_file_names_repeat() -> None:
    found: dict[str, list[str]] = {}
    for path in sources():
        if path.name not in EVERY_ROOM_HAS:
            found.setdefault(path.name, []).append(place(path))
    doubled = {name: places for name, places in found.items() if len(places) > 1}
    assert len(doubled) <= MOST_DOUBLED_FILES, doubled


def test_pages_that_the_code_refers_to_exist() -> None:
    named = [(place(p), page) for p in sources() for page in PAGE.findall(p.read_text(encoding="utf-8"))]
    assert len(named) > 5
    assert [
        f"{where}: {page}" for where, page in named if not any((ROOT / folder / page).is_file() for folder in ("", "docs"))
    ] == []
