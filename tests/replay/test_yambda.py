"""Replaying Yambda: files in the published formats become requests and actions. The tests write small
ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roostream.cli.replay.replay_run import run
from roostream.errors import ConfigError, SchemaError
from roostream.replay import yambda
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import EventLog
from roostream.replay.events import Request
from roostream.schema.schema_file import load_schema, schema_from_dict
from roostream.schema.settings import SettingError

WINDOW_MS = 1_800_000
COMMON = {"uid": pa.uint32(), "timestamp": pa.uint32(), "item_id": pa.uint32(), "is_organic": pa.uint8()}
LISTENED = {"played_ratio_pct": pa.uint16(), "track_length_seconds": pa.uint32()}
LISTS = {"timestamp": "timestamps", "item_id": "item_ids"}
LONG_PAUSE = {"session_gap_ms": 600_000}
Event = dict[str, Any]


def listen(uid: int, at_s: int, item: int, pct: int = 100, organic: int = 0, length_s: int = 200) -> Event:
    return {
        "uid": uid,
        "timestamp": at_s,
        "item_id": item,
        "is_organic": organic,
        "event_type": "listen",
        "played_ratio_pct": pct,
        "track_length_seconds": length_s,
    }


def react(event_type: str, uid: int, at_s: int, item: int) -> Event:
    event = listen(uid, at_s, item) | {"event_type": event_type}
    return event | {"played_ratio_pct": None, "track_length_seconds": None}


def write(path: Path, events: list[Event], *, sequential: bool = False, types: bool = False) -> str:
    """Write events in a published format. With `types` it is multi_event.parquet, which has a column
    event_type. Otherwise the file has events of one type."""
    events = sorted(events, key=lambda e: (e["uid"], e["timestamp"]))
    kinds = {**COMMON, **({"event_type": pa.string()} if types else {})}
    kinds |= LISTENED if types or all(e["event_type"] == "listen" for e in events) else {}
    columns: dict[str, Any] = {}
    for name, kind in kinds.items():
        if sequential and name != "uid":
            lists = {uid: [e[name] for e in events if e["uid"] == uid] for uid in users(events)}
            columns[LISTS.get(name, name)] = pa.array(list(lists.values()), pa.list_(kind))
        elif sequential:
            columns[name] = pa.array(users(events), kind)
        else:
            columns[name] = pa.array([e[name] for e in events], kind)
            if name == "event_type":
                columns[name] = columns[name].dictionary_encode()
    pq.write_table(pa.table(columns), path)
    return str(path)


def users(events: list[Event]) -> list[int]:
    return list(dict.fromkeys(e["uid"] for e in events))


def multi_event_options(
    folder: Path, events: list[Event], *, sequential: bool = False, **settings: Any
) -> yambda.Options:
    path = write(folder / "multi_event.parquet", events, sequential=sequential, types=True)
    return yambda.Options(multi_event=(path,), **settings)


def open_log(options: yambda.Options) -> EventLog:
    return yambda.open(options, load_schema(yambda.Options.default_schema or ""), WINDOW_MS)


def events_as_tuples(options: yambda.Options) -> list[tuple[Any, ...]]:
    """Read the events as tuples. Times are in seconds, as in the files."""
    out: list[tuple[Any, ...]] = []
    for event in open_log(options).events:
        at_s = (event.time_ms - yambda.START_MS) / 1000
        if isinstance(event, Request):
            out.append((at_s, event.request_id, event.user_id, event.items_n.tolist()))
        else:
            out.append((at_s, event.request_id, event.action, event.item_id, event.value))
    return out


def test_consecutive_listens_are_a_request_and_those_played_to_the_half_are_positive(tmp_path: Path) -> None:
    events = [listen(7, 100, 1, 49), listen(7, 300, 2, 50), listen(9, 200, 1), listen(7, 500, 3, 120)]
    assert events_as_tuples(multi_event_options(tmp_path, events)) == [
        (100, "7-0", 7, [1, 2, 3]),
        (200, "9-0", 9, [1]),
        (200, "9-0", "listen_plus", 1, 100),
        (300, "7-0", "listen_plus", 2, 50),
        (500, "7-0", "listen_plus", 3, 120),
    ]


@pytest.mark.parametrize(
    ("events", "settings", "lists"),
    [
        (
            [listen(7, 0, 1), listen(7, 599, 2), listen(7, 1199, 3)],
            {"session_gap_ms": 600_000},
            [[1, 2], [3]],
        ),
        ([listen(7, 0, 1), listen(7, 5, 2), listen(7, 10, 1)], {}, [[1, 2], [1]]),
        ([listen(7, 0, n) for n in range(5)], {"max_candidates": 2}, [[0, 1], [2, 3], [4]]),
        ([listen(7, 0, 1), listen(7, 1795, 2), listen(7, 1800, 3)], {}, [[1, 2], [3]]),
        ([listen(7, 0, 1), listen(8, 0, 2)], {}, [[1], [2]]),
        ([listen(7, 0, 1), listen(7, 5, 2, organic=1), listen(7, 10, 3)], {}, [[1, 3]]),
        (
            [listen(7, 0, 1), listen(7, 5, 2, organic=1), listen(7, 10, 3)],
            {"organic": "candidates"},
            [[1, 2, 3]],
        ),
    ],
    ids=["a pause", "a track twice", "full", "the join window", "another user", "organic", "all listens"],
)
def test_a_new_request_starts_after_a_pause_or_a_limit(
    tmp_path: Path, events: list[Event], settings: dict[str, Any], lists: list[list[int]]
) -> None:
    log = open_log(multi_event_options(tmp_path, events, **settings))
    requests = [event for event in log.events if isinstance(event, Request)]
    assert [request.items_n.tolist() for request in requests] == lists
    assert log.num_requests == len(lists) == len({request.request_id for request in requests})


def test_a_session_may_have_several_requests(tmp_path: Path) -> None:
    events = [listen(7, 0, 1), listen(7, 5, 2), listen(7, 9000, 3)]
    requests = [
        e
        for e in open_log(multi_event_options(tmp_path, events, max_candidates=1)).events
        if isinstance(e, Request)
    ]
    first, second, third = (request.session_id for request in requests)
    assert first == second != third


def test_a_reaction_belongs_to_the_newest_request_with_its_track(tmp_path: Path) -> None:
    events = [
        listen(7, 0, 1, 10),
        listen(7, 100, 1, 10),  # a new request, because the track is repeated
        react("like", 7, 100, 1),
        react("dislike", 7, 50, 1),
        react("like", 7, 1900, 1),  # after the join window of the request
        react("like", 7, 200, 5),  # this track was not played
        react("like", 8, 200, 1),  # this user played nothing
        react("unlike", 7, 300, 1),
        react("undislike", 7, 300, 1),
    ]
    assert events_as_tuples(multi_event_options(tmp_path, events)) == [
        (0, "7-0", 7, [1]),
        (50, "7-0", "dislike", 1, 1.0),
        (100, "7-1", 7, [1]),
        (100, "7-1", "like", 1, 1.0),
    ]


def test_organic_listens_are_in_the_history_at_their_own_times(tmp_path: Path) -> None:
    events = [listen(9, 50, 4, organic=1), listen(7, 100, 1, organic=1), listen(7, 5, 2, 49, organic=1)]
    clicks = open_log(multi_event_options(tmp_path, [*events, listen(7, 0, 3)])).unlogged_clicks
    assert clicks is not None
    assert (clicks.user_N.tolist(), clicks.item_N.tolist()) == ([9, 7], [4, 1])
    assert clicks.time_ms_N.tolist() == [yambda.START_MS + 50_000, yambda.START_MS + 100_000]
    assert open_log(multi_event_options(tmp_path, events, organic="candidates")).unlogged_clicks is None


def test_features_are_those_that_the_schema_declares(tmp_path: Path) -> None:
    (request, *_) = open_log(
        multi_event_options(tmp_path, [listen(7, 0, 1, 0, length_s=215), listen(7, 5, 2, 0)])
    ).events
    assert isinstance(request, Request) and request.ro == {"user": [7]}
    assert {name: list(column) for name, column in request.nro.items()} == {
        "item": [1, 2],
        "track_length_s": [215.0, 200.0],
        "organic": [0.0, 0.0],
    }
    other = schema_from_dict({"nro": [{"name": "artist"}], "label": [{"name": "a", "action": "like"}]})
    with pytest.raises(SchemaError, match="'artist': expected an online feature or one of Yambda"):
        yambda.open(multi_event_options(tmp_path, [listen(7, 0, 1)]), other, WINDOW_MS)


def random_events(num_events: int, days: int = 4) -> list[Event]:
    """Draw events of 20 users and 60 tracks. Tracks with even numbers are mostly played to the end and
    sometimes liked."""
    random = np.random.default_rng(0)
    events = []
    times = np.sort(random.integers(0, days * 17_280, num_events)) * 5
    for at_s in times.tolist():
        uid, item = int(random.integers(1, 21)), int(random.integers(1, 61))
        is_good = random.random() < (0.9 if item % 2 == 0 else 0.1)
        events.append(listen(uid, at_s, item, 100 if is_good else 10, organic=int(random.random() < 0.3)))
        if is_good and random.random() < 0.1:
            events.append(react("like", uid, at_s + 5, item))
    return events


def test_all_published_formats_give_the_same_log(tmp_path: Path) -> None:
    events = random_events(400)
    expected = events_as_tuples(multi_event_options(tmp_path, events))
    assert len(expected) > 400
    assert events_as_tuples(multi_event_options(tmp_path, events, sequential=True)) == expected
    for sequential in (False, True):
        of_type = {
            kind: [e for e in events if e["event_type"] == kind] for kind in ("listen", "like", "dislike")
        }
        paths = {
            f"{kind}s": (write(tmp_path / f"{kind}s.parquet", typed_events, sequential=sequential),)
            for kind, typed_events in of_type.items()
            if typed_events
        }
        assert set(paths) == {"listens", "likes"} and events_as_tuples(yambda.Options(**paths)) == expected
    halves = [[e for e in events if e["uid"] % 2 == odd] for odd in (0, 1)]
    parts = tuple(write(tmp_path / f"part-{n}.parquet", half, types=True) for n, half in enumerate(halves))
    assert events_as_tuples(yambda.Options(multi_event=parts)) == expected


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"uid": [1]}, "multi_event.parquet: column 'item_id' is absent"),
        ({**listen(1, 0, 2), "event_type": "skip"}, "column 'event_type': expected listen, .*got 'skip'"),
        (
            {**listen(1, 0, 2), "played_ratio_pct": None},
            "'played_ratio_pct': expected a value for every",
        ),
        ({**listen(1, 0, 2), "uid": None}, "'uid': expected a value in every row, got 1 nulls"),
        ({**listen(1, 0, 2), "timestamp": "noon"}, "'timestamp': expected int64, got string"),
        (listen(1, -5, 2), "'timestamp': expected seconds since the start of the data, got -5"),
        (listen(1, 1_704_067_200, 2), "'timestamp': expected seconds since the start of the data, got 17"),
    ],
)
def test_other_files_are_reported_with_their_column(
    tmp_path: Path, table: dict[str, Any], message: str
) -> None:
    path = tmp_path / "multi_event.parquet"
    columns = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ConfigError, match=message):
        open_log(yambda.Options(multi_event=(str(path),)))


def test_lists_of_different_lengths_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "likes.parquet"
    columns = {"uid": [1], "item_ids": [[1, 2]], "timestamps": [[5]], "is_organic": [[0, 0]]}
    pq.write_table(pa.table(columns), path)
    listens = write(tmp_path / "listens.parquet", [listen(1, 0, 1)])
    with pytest.raises(ConfigError, match=r"likes\.parquet: column 'timestamp': expected lists as long as"):
        open_log(yambda.Options(listens=(listens,), likes=(str(path),)))


def test_either_all_events_or_files_by_type_are_needed(tmp_path: Path) -> None:
    path = (write(tmp_path / "likes.parquet", [react("like", 1, 0, 1)]),)
    with pytest.raises(SettingError, match="expected either multi_event or listens"):
        yambda.Options(likes=path)
    with pytest.raises(SettingError, match="expected no other files beside multi_event"):
        yambda.Options(multi_event=path, likes=path)


@pytest.mark.parametrize("max_candidates", [20, 1])
def test_the_streaming_protocol_of_mlperf_runs_on_yambda(tmp_path: Path, max_candidates: int) -> None:
    """A window is a day. The model is evaluated on the day after those on which it was trained."""
    report = tmp_path / "report.json"
    options = multi_event_options(
        tmp_path, random_events(1200), organic="candidates", max_candidates=max_candidates
    )
    config = ReplayConfig(
        dataset="yambda",
        options=options,
        engine="local",
        streaming_window_ms=86_400_000,
        report=str(report),
    )
    assert run(config) == 0
    result = json.loads(report.read_text())
    assert result["accounted"] and result["counts"]["candidates"] == 1200
    assert result["counts"]["corrections"] == 0 and result["counts"]["dead_letters"] == {}
    streaming = result["streaming"]
    assert [w["window"] for w in streaming["windows"]] == [1, 2, 3]
    assert streaming["mean"]["tasks"]["listen_plus"]["auc"] > 0.75, (
        "the model must know the good tracks after a day"
    )
    assert set(result["positives"]) == {"listen_plus", "like"}
