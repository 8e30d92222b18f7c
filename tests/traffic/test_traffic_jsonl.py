from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roo.errors import ConfigError
from roo.ids import hash64, signed
from roo.schema_file import schema_from_dict
from traffic.events import Action, Request
from traffic.jsonl import JsonlLog, LogError

SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "hour"}],
        "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "price"}],
        "label": [{"name": "click", "action": "click"}],
    }
)
IMPRESSION: dict[str, Any] = {"type": "impression", "request_id": "r", "user_id": 5, "time": 1000, "candidates": [{"item_id": 1}]}
ENGAGEMENT: dict[str, Any] = {
    "type": "engagement",
    "request_id": "r",
    "user_id": 5,
    "time": 2000,
    "item_id": 1,
    "action": "click",
}


def log_of(path: Path, *lines: object, skip_bad: bool = False) -> JsonlLog:
    text = "".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_text(text)
    return JsonlLog([str(path)], SCHEMA, skip_bad=skip_bad)


def test_lines_are_replayed_by_time_whatever_their_order_and_file(tmp_path: Path) -> None:
    one = log_of(tmp_path / "one", ENGAGEMENT, IMPRESSION | {"time": 3000, "request_id": "late"}, "", IMPRESSION)
    two = log_of(tmp_path / "two", IMPRESSION | {"time": 2500, "request_id": "mid"})
    events = list(JsonlLog([*one.paths, *two.paths], SCHEMA).events())
    assert [(type(e), e.request_id) for e in events] == [(Request, "r"), (Action, "r"), (Request, "mid"), (Request, "late")]


def test_an_impression_comes_before_an_engagement_of_the_same_time(tmp_path: Path) -> None:
    events = list(log_of(tmp_path / "log", ENGAGEMENT | {"time": 1000}, IMPRESSION).events())
    assert isinstance(events[0], Request) and isinstance(events[1], Action)


def test_rows_and_columns_of_candidates_say_the_same(tmp_path: Path) -> None:
    rows = [{"item_id": "a", "item": "a", "price": 2.0}, {"item_id": "b", "item": "b"}]
    columns = {"item_id": ["a", "b"], "item": ["a", "b"], "price": [2.0, None]}
    both = list(log_of(tmp_path / "log", IMPRESSION | {"candidates": rows}, IMPRESSION | {"candidates": columns}).events())
    for request in both:
        assert isinstance(request, Request)
        assert request.items_n.tolist() == [signed(hash64("a")), signed(hash64("b"))]
        assert request.nro == {"item": ["a", "b"], "price": [2.0, None]}


def test_a_repeated_line_is_the_same_event_and_a_given_id_wins(tmp_path: Path) -> None:
    other = ENGAGEMENT | {"value": 7.0}
    given = ENGAGEMENT | {"event_id": "e1"}
    events = list(log_of(tmp_path / "log", ENGAGEMENT, other, given).events())
    ids = [e.event_id for e in events if isinstance(e, Action)]
    assert ids[0] == ids[1] and ids[2] == hash64("e1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"log:2: .*; correct the line, or use --skip-bad"),
        ({"type": "view", "time": 5}, r"log:2: Invalid value 'view'"),
        (IMPRESSION | {"time": "soon"}, r"log:2: time: expected a time such as"),
        (IMPRESSION | {"time": -4}, r"log:2: time: expected a time after 1970"),
        (IMPRESSION | {"candidates": [{"id": 1}]}, r"log:2: candidates\[0\]: expected an item_id, got id"),
        (IMPRESSION | {"candidates": [{"item_id": 1.5}]}, r"log:2: item_id: expected an integer or a string, got 1.5"),
        (IMPRESSION | {"candidates": {"item": [1]}}, r"log:2: candidates: expected an item_id"),
        (IMPRESSION | {"candidates": {"item_id": [1], "price": [1, 2]}}, r"log:2: price: expected 1 values"),
        (IMPRESSION | {"candidates": [{"item_id": 1, "prize": 2}]}, r"log:2: unknown nro feature 'prize'; did you mean 'price'"),
        (IMPRESSION | {"ro": {"our": 2}}, r"log:2: unknown ro feature 'our'; did you mean 'hour'"),
        (IMPRESSION | {"positions": [1, 2, 3]}, r"log:2: positions: expected 1 values"),
        (IMPRESSION | {"request_id": "x" * 65}, r"log:2: request_id: expected 1 to 64 bytes, got 65"),
        (IMPRESSION | {"userid": 3}, r"log:2: .*unknown field `userid`"),
        ({k: v for k, v in ENGAGEMENT.items() if k != "item_id"}, r"log:2: .*missing required field `item_id`"),
    ],
)
def test_a_bad_line_is_told_with_its_place_or_left_out_and_counted(tmp_path: Path, line: object, message: str) -> None:
    log = log_of(tmp_path / "log", IMPRESSION, line)
    with pytest.raises(LogError, match=message):
        list(log.events())
    patient = log_of(tmp_path / "log", IMPRESSION, line, ENGAGEMENT, skip_bad=True)
    assert len(list(patient.events())) == 2
    assert patient.num_skipped == 1 and "log:2: " in patient.first_skipped


def test_an_absent_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl: no such file"):
        list(JsonlLog([str(tmp_path / "none.jsonl")], SCHEMA).events())
