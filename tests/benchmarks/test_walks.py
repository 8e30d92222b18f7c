"""benchmarks/walks.py traces the function calls that one request makes. Its counts are right and
reproducible."""

from __future__ import annotations

from pathlib import Path

from benchmarks import walks
from roostream.schema.ids import item_id, key_bytes
from serving.request import parse_id


def test_walks_count_calls_moves_and_depth_in_project_files_only() -> None:
    walk = walks.count(lambda: (parse_id(7, "$"), key_bytes(0, 3, "r"), sorted([2, 1])))
    assert walk.files == ("serving/request.py", "roostream/schema/ids.py")
    # parse_id calls item_id in another file (a move); key_bytes calls hash64 in its own file (no move)
    assert (walk.num_functions, walk.num_calls, walk.num_moves, walk.deepest) == (4, 4, 1, 2)


def test_calls_that_raise_are_counted() -> None:
    def refused() -> None:
        try:
            item_id(None)  # type: ignore[arg-type]
        except TypeError:
            key_bytes(1, 1, "r")

    assert walks.count(refused).deepest == 1, "the depth decreases again after a call that raised"


def test_every_walk_reaches_its_end_and_is_reproducible(tmp_path: Path) -> None:
    last = {
        "rank": "serving/answer.py",
        "join": "joiner/outputs.py",
        "train": "param_server/table.py",
        "publish": "param_server/replica/replica.py",
    }
    for name, walk in walks.WALKS.items():
        first, second = (walk(str(tmp_path / f"{name}{i}")) for i in range(2))
        assert last[name] in first.files and first.num_moves > 0
        assert first.files == second.files and first.num_functions == second.num_functions, name
