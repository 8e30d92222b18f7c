"""Files, bodies and folders stay small enough to be read."""

from __future__ import annotations

import ast
import subprocess

from tests.contract.house import FOLDERS, ROOT, place, sources, tree

MOST_FILE_LINES, MOST_BODY_LINES = 400, 60
USUAL_FILE_LINES, USUAL_BODY_LINES = 150, 25
MOST_FILES_IN_A_ROOM = 25  # more need inner rooms
MOST_TOP_FOLDERS = 16
FILES = sources(*FOLDERS, "benchmarks")


def bodies() -> list[tuple[str, int]]:
    """(place, lines) of every function, its docstring not counted."""
    found = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
                found.append((f"{place(path)}:{node.lineno} {node.name}", node.body[-1].end_lineno - first.lineno + 1))  # type: ignore[operator]
    return found


def lines() -> dict[str, int]:
    return {place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}


def test_no_file_is_longer_than_400_lines() -> None:
    assert {p: n for p, n in lines().items() if n > MOST_FILE_LINES} == {}


def test_no_body_is_longer_than_60_lines() -> None:
    assert [f"{place}: {lines}" for place, lines in bodies() if lines > MOST_BODY_LINES] == []


def test_most_files_are_under_150_lines() -> None:
    sizes = list(lines().values())
    assert sum(n <= USUAL_FILE_LINES for n in sizes) >= 0.6 * len(sizes)


def test_most_bodies_are_under_25_lines() -> None:
    sizes = [lines for _, lines in bodies()]
    assert sum(n <= USUAL_BODY_LINES for n in sizes) >= 0.95 * len(sizes)


def test_a_room_of_more_than_25_files_has_inner_rooms() -> None:
    rooms: dict[str, int] = {}
    for path in FILES:
        if path.name != "__init__.py":
            rooms[place(path.parent)] = rooms.get(place(path.parent), 0) + 1
    assert {room: n for room, n in rooms.items() if n > MOST_FILES_IN_A_ROOM} == {}


def test_the_top_level_stays_readable() -> None:
    listed = subprocess.run(("git", "ls-files"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr
    folders = {name.split("/")[0] for name in listed.stdout.splitlines() if "/" in name and name[0] != "."}
    assert {*FOLDERS, "docs", "tests"} <= folders
    assert len(folders) <= MOST_TOP_FOLDERS
