"""Checkpoint segments of format 1 stay readable. Their directories do not list which buckets are complete."""

from __future__ import annotations

import json
from pathlib import Path

from param_server.key_value_store import MemoryKeyValueStore
from param_server.segment_parts import FORMAT, Segment
from param_server.segments import Segments

FOLDER = Path(__file__).parent / "format_1"
STACK = "d2-adagrad"


def test_segments_of_format_1_are_read_and_continued_in_the_current_format() -> None:
    golden = json.loads((FOLDER / "segments.json").read_text(encoding="utf-8"))
    store = MemoryKeyValueStore()
    store.data = {key.encode(): bytes.fromhex(data) for key, data in golden["parts"].items()}
    segments = Segments(store, {STACK: (2, 2)}, 8)
    state = tuple(Segment(**segment) for segment in golden["segments"])
    assert json.loads(store.data[b"d/1-1"])["format"] == 1 and FORMAT == 2
    rows: dict[int, float] = {}
    for part in segments.read(state):
        for block in reversed(part.blocks):
            rows |= dict(zip(block.live.id_U.tolist(), block.rows_LD[:, 0].tolist(), strict=True))
            rows = {id_: row for id_, row in rows.items() if id_ not in block.gone.id_U.tolist()}
    assert rows == {2: 20.0, 3: 3.0, 4: 4.0} and segments.policy_states(state) == {STACK: b"seen"}
    again = segments.write("3-1", {}, state, {}, frozenset({0}))
    assert json.loads(store.data[b"d/3-1"])["format"] == FORMAT and again[-1].name == "3-1"
