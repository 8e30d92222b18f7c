"""Walks count what they say they count, and the same every time."""

from __future__ import annotations

from pathlib import Path

from benchmarks import walks
from roostream.schema.ids import item_id, key_bytes
from serving.request import parse_id


def test_walks_count_calls_moves_and_depth_in_project_files_only() -> None:
    walk = walks.count(lambda: (parse_id(7, "$"), key_bytes(0, 3, "r"), sorted([2, 1])))
    assert walk.files == ("serving/request.py", "roostream/schema/ids.py")
    # parse_id → item_id (a move); key_bytes → hash64 (none)
    assert (walk.num_functions, walk.num_calls, walk.num_moves, walk.deepest) == (4, 4, 1, 2)


def test_calls_that_raise_are_counted() -> None:
    def refused() -> None:
        try:
            item_id(None)  # type: ignore[arg-type]
        except TypeError:
            key_bytes(1, 1, "r")

    assert walks.count(refused).deepest == 1, "a frame that raised is left"


def test_every_walk_reaches_its_end_and_is_reproducible(tmp_path: Path) -> None:
    last = {
        "rank": "serving/answer.py",
        "join": "joiner/outputs.py",
        "train": "param_server/table.py",
        "publish": "param_server/replica/replica.py",
    }
    for name, walk in walks.WALKS.items():
        one, other = (walk(str(tmp_path / f"{name}{i}")) for i in range(2))
        assert last[name] in one.files and one.num_moves > 0
        assert one.files == other.files and one.num_functions == other.num_functions, name
