"""Walks count what they say they count, and the same every time."""

from __future__ import annotations

from pathlib import Path

from benchmarks import walks
from roostream.schema.ids import item_id, key_bytes
from serving.request import parse_id


def test_calls_moves_and_depth_are_those_of_our_own_files() -> None:
    walk = walks.count(lambda: (parse_id(7, "$"), key_bytes(0, 3, "r"), sorted([2, 1])))
    assert walk.files == ("serving/request.py", "roostream/schema/ids.py")
    # parse_id → item_id (a move); key_bytes → hash64 (none)
    assert (walk.num_functions, walk.num_calls, walk.num_moves, walk.deepest) == (4, 4, 1, 2)


def test_what_raises_is_walked_too() -> None:
    def refused() -> None:
        try:
            item_id(None)  # type: ignore[arg-type]
        except TypeError:
            key_bytes(1, 1, "r")

    assert walks.count(refused).deepest == 1, "a frame that raised is left"


def test_every_walk_ends_where_it_should_and_is_the_same_again(tmp_path: Path) -> None:
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
