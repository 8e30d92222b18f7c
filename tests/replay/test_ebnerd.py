"""Replaying EB-NeRD: its behavior and history files become requests, clicks and reads."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roostream.errors import ConfigError, SchemaError
from roostream.replay import ebnerd
from roostream.replay.config import ReplayConfig
from roostream.replay.events import Action, Request
from roostream.replay.replay_log import open_log
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import decode_block

DAY = datetime.datetime(2023, 5, 18, 7)
WINDOW_MS = 1_800_000


def time_after(seconds: float) -> datetime.datetime:
    return DAY + datetime.timedelta(seconds=seconds)


def time_ms_after(seconds: float) -> int:
    return round(time_after(seconds).replace(tzinfo=datetime.UTC).timestamp() * 1000)


def row(number: int, seconds: float, shown: list[int], clicked: list[int], **columns: Any) -> dict[str, Any]:
    base = {
        "impression_id": number,
        "impression_time": time_after(seconds),
        "user_id": 7,
        "session_id": 70,
        "article_ids_inview": shown,
        "article_ids_clicked": clicked,
    }
    return base | columns


def write(path: Path, rows: list[dict[str, Any]], **types: pa.DataType) -> str:
    table = pa.Table.from_pylist(rows)
    for name, kind in types.items():
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
    pq.write_table(table, path)
    return str(path)


def schema(*ro: str) -> Schema:
    floats = [{"name": name} for name in ro if name not in ("user", "page", "device")]
    lists = [
        {"name": name, "kind": "ids", "table": "item"} for name in ro if name in ("user", "page", "device")
    ]
    return schema_from_dict(
        {
            "tables": {"item": {"dim": 4}},
            "ro": floats + lists,
            "nro": [{"name": "item", "kind": "ids", "table": "item"}],
            "label": [{"name": "click", "action": "click"}],
        }
    )


def test_several_files_are_merged_by_time(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", [row(3, 50, [1, 2], [2]), row(1, 0, [1], [1])])
    b = write(tmp_path / "b.parquet", [row(2, 20, [5], [])])
    events = list(ebnerd.events([a, b], schema(), WINDOW_MS))
    assert [e.request_id for e in events if isinstance(e, Request)] == ["1", "2", "3"]
    assert [e.time_ms for e in events] == sorted(e.time_ms for e in events)
    assert ebnerd.num_requests([a, b]) == 3


def test_a_click_is_a_second_after_the_request_and_every_click_is_an_event(tmp_path: Path) -> None:
    path = write(tmp_path / "b.parquet", [row(1, 0, [1, 2], [2, 1, 2])])
    clicks = [e for e in ebnerd.events([path], schema(), WINDOW_MS) if isinstance(e, Action)]
    assert [(c.action, c.item_id, c.time_ms) for c in clicks] == [
        ("click", i, time_ms_after(1)) for i in (2, 1, 2)
    ]
    assert len({c.event_id for c in clicks}) == 3


@pytest.mark.parametrize(
    ("read_s", "end_s", "reason"),
    [
        (40.0, 41.0, "reading begins with the click"),
        (0.0, 1.0, "a read of 0 s ends with the click"),
        (9999.0, 1800.0, "a longer read ends with the join window and keeps its duration"),
    ],
)
def test_a_read_ends_within_the_window(tmp_path: Path, read_s: float, end_s: float, reason: str) -> None:
    path = write(tmp_path / "b.parquet", [row(1, 0, [1, 2], [2], next_read_time=read_s)])
    (read,) = [
        e for e in ebnerd.events([path], schema(), WINDOW_MS) if isinstance(e, Action) and e.action == "read"
    ]
    assert (read.item_id, read.value, read.time_ms) == (2, read_s, time_ms_after(end_s)), reason


def test_requests_carry_the_declared_features_only(tmp_path: Path) -> None:
    rows = [
        row(1, 0, [1], [], article_id=99, device_type=2, age=None),
        row(2, 1, [1], [], article_id=None, device_type=1, age=30),
    ]
    path = write(tmp_path / "b.parquet", rows)
    first, second = (
        e for e in ebnerd.events([path], schema("front_page", "page", "age", "device"), WINDOW_MS)
    )
    assert isinstance(first, Request) and isinstance(second, Request)
    assert first.ro == {"front_page": 0.0, "page": [99], "age": None, "device": [2]}
    assert second.ro == {"front_page": 1.0, "age": 30.0, "device": [1]}
    assert first.nro["item"].tolist() == [1]


def test_optional_columns_may_be_absent(tmp_path: Path) -> None:
    (request,) = ebnerd.events(
        [write(tmp_path / "b.parquet", [row(1, 0, [4], [])])], schema("front_page", "sso"), WINDOW_MS
    )
    assert isinstance(request, Request) and request.ro == {"front_page": 1.0, "sso": None}


def test_histories_come_in_time_order_over_all_users(tmp_path: Path) -> None:
    rows = [
        {
            "user_id": 1,
            "article_id_fixed": [10, 11],
            "impression_time_fixed": [time_after(-90), time_after(-10)],
        },
        {"user_id": 2, "article_id_fixed": [20], "impression_time_fixed": [time_after(-50)]},
        {"user_id": 3, "article_id_fixed": [], "impression_time_fixed": []},
    ]
    path = write(tmp_path / "h.parquet", rows)
    clicks = list(zip(*(column.tolist() for column in ebnerd.histories([path])), strict=True))
    assert clicks == [(1, 10, time_ms_after(-90)), (2, 20, time_ms_after(-50)), (1, 11, time_ms_after(-10))]
    assert [len(column) for column in ebnerd.histories([])] == [0, 0, 0]


def test_clicks_of_a_history_file_count_from_their_own_time(tmp_path: Path) -> None:
    """The history file contains a click of the log, which counts once, and a click that is not in the log."""
    shown = [
        row(1, 0, [7, 8, 9], []),
        row(2, 2, [7, 8, 9], [7]),
        row(3, 3.5, [7, 8, 9], []),
        row(4, 5, [7, 8, 9], []),
    ]
    behaviors = write(tmp_path / "b.parquet", shown)
    user = shown[0]["user_id"]
    history_row = {
        "user_id": user,
        "article_id_fixed": [5, 7, 7, 9],
        "impression_time_fixed": [time_after(-5), time_after(-1), time_after(2), time_after(4)],
    }
    history = write(tmp_path / "h.parquet", [history_row])
    document = {
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "past", "kind": "ids", "table": "item", "online": "history"}],
        "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "clicks", "online": "clicks_24h"}],
        "label": [{"name": "click", "action": "click"}],
    }
    schema_with_history = schema_from_dict(document)
    config = ReplayConfig(
        dataset="ebnerd", options=ebnerd.Options(behaviors=(behaviors,), history=(history,)), schema=__file__
    )
    log, seen = open_log(config, schema_with_history), []
    for record in log.records:
        message = wire.decode(record.value)[1]
        if isinstance(message, pb.Impression):
            clicks = decode_block(schema_with_history, "nro", message.nro, 3)["clicks"]
            seen.append(
                (
                    decode_block(schema_with_history, "ro", message.ro, 1)["past"],
                    [round(float(c)) for c in clicks],
                )
            )
    assert seen == [
        ([7, 5], [1, 0, 0]),
        ([7, 5], [1, 0, 0]),
        ([7, 7, 5], [2, 0, 0]),
        ([9, 7, 7, 5], [2, 0, 1]),
    ]
    assert log.profile.report()["clicks_elsewhere"] == {"before": 2, "within": 1}


def test_files_without_a_request_do_not_change_the_history(tmp_path: Path) -> None:
    none = str(tmp_path / "none.parquet")
    some = write(tmp_path / "some.parquet", [row(1, 10, [1], [1])])
    pq.write_table(pq.read_table(some).slice(0, 0), none)
    history_row = {
        "user_id": 7,
        "article_id_fixed": [1, 1],
        "impression_time_fixed": [time_after(-5), time_after(20)],
    }
    clicks = ebnerd.histories([write(tmp_path / "h.parquet", [history_row])])
    assert ebnerd.without_logged_clicks(clicks, [none]).time_ms_N.tolist() == [
        time_ms_after(-5),
        time_ms_after(20),
    ]
    assert ebnerd.without_logged_clicks(clicks, [none, some]).time_ms_N.tolist() == [time_ms_after(-5)], (
        "a click from before the log stays"
    )


def test_other_files_are_rejected_with_file_and_column(tmp_path: Path) -> None:
    rows = [row(1, 0, [1], [1])]
    lacking = write(
        tmp_path / "lacking.parquet", [{k: v for k, v in rows[0].items() if k != "article_ids_inview"}]
    )
    with pytest.raises(ConfigError, match=r"lacking.parquet: column 'article_ids_inview' is absent"):
        ebnerd.events([lacking], schema(), WINDOW_MS)
    wrong = write(tmp_path / "wrong.parquet", [rows[0] | {"user_id": "seven"}])
    with pytest.raises(ConfigError, match=r"wrong.parquet: column 'user_id': expected int64, got string"):
        ebnerd.events([wrong], schema(), WINDOW_MS)
    holes = write(tmp_path / "holes.parquet", [rows[0], row(2, 0, [1], []) | {"impression_time": None}])
    with pytest.raises(ConfigError, match=r"holes.parquet: column 'impression_time': expected a value in"):
        ebnerd.events([holes], schema(), WINDOW_MS)
    text = tmp_path / "text.parquet"
    text.write_text("impression_id,user_id\n")
    with pytest.raises(ConfigError, match=r"text.parquet: expected a"):
        ebnerd.events([str(text)], schema(), WINDOW_MS)
    with pytest.raises(ConfigError, match="no such file"):
        (ebnerd.histories([str(tmp_path / "none.parquet")]))


@pytest.mark.parametrize(
    ("column", "value", "kind", "message"),
    [
        ("article_ids_inview", [5, None], None, "1 nulls"),
        ("article_ids_clicked", [None, 5, None], None, "2 nulls"),
        ("impression_time", 1_684_540_800, pa.int64(), "1684540800 ms"),  # seconds
        ("impression_time", 1_684_540_800_000_000, pa.int64(), "1684540800000000 ms"),  # µs
        ("impression_time", datetime.datetime(1960, 1, 1), None, "times from 1980"),
    ],
)
def test_missing_entries_and_times_in_another_unit_are_rejected(
    tmp_path: Path, column: str, value: Any, kind: pa.DataType | None, message: str
) -> None:
    types = {} if kind is None else {column: kind}
    path = write(tmp_path / "odd.parquet", [row(1, 0, [5, 6], [5]) | {column: value}], **types)
    with pytest.raises(ConfigError, match=rf"odd.parquet: column '{column}': .*{message}"):
        list(ebnerd.events([path], schema("user"), WINDOW_MS))


def test_uneven_histories_are_rejected(tmp_path: Path) -> None:
    path = write(
        tmp_path / "h.parquet",
        [{"user_id": 1, "article_id_fixed": [1, 2], "impression_time_fixed": [time_after(0)]}],
    )
    with pytest.raises(ConfigError, match="expected"):
        ebnerd.histories([path])


def test_an_unknown_feature_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "b.parquet", [row(1, 0, [1], [1])])
    with pytest.raises(SchemaError, match=r"'frontpage'.*did you mean 'front_page'"):
        ebnerd.events([path], schema("frontpage"), WINDOW_MS)
