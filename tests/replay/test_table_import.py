"""Importing a table of impressions as a log of requests. Requests are reassembled from rows in any order."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roostream.errors import ConfigError
from roostream.replay import table_import
from roostream.replay.events import Event, Request
from roostream.replay.import_map import ImportMap, load_map
from roostream.replay.jsonl_log import JsonlLog
from roostream.replay.log_lines import LogError, LogLineReader
from roostream.replay.table_import import ImportCounts, import_table, into_buckets
from roostream.schema.schema_file import schema_from_dict

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [
            {"name": "basket"},
            {"name": "history", "kind": "sequence", "table": "item", "columns": {"time": "time_ms"}},
            {"name": "topics", "kind": "weighted_ids", "table": "item"},
        ],
        "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "price"}],
        "label": [
            {"name": "click", "action": "click"},
            {"name": "long_read", "action": "read", "threshold": 30.0},
        ],
    }
)
MAP = """
request = ["user", "visit"]
time = "shown_at"
item = "article"
user = "user"
position = "place"
[features]
basket = "basket_value"
item = "article"
history = { item = "read_ids", time = "read_at" }
topics = { ids = "topic_ids", weights = "topic_weights" }
[actions]
click = { column = "clicked" }
read = { column = "seconds", least = 5.0, time = "left_at" }
"""
MINIMAL_MAP = 'request=["id"]\ntime="t"\nitem="item"'
ONE_ROW = {"id": "a", "t": T0, "item": 3, "price": 1.0}


def requests(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw requests of a site: the shown lists, with their clicks and reads."""
    rng = np.random.default_rng(seed)
    out = []
    for n in range(number):
        shown = int(rng.integers(1, 6))
        read = rng.integers(1, 50, int(rng.integers(0, 4))).tolist()
        out.append(
            {
                "user": int(rng.integers(1, 5)),
                "visit": n,
                "at_ms": T0 + 1000 * n,
                "basket": float(rng.integers(0, 9)) + 0.5,
                "read": read,
                "read_ms": [T0 - 5000 * (k + 1) for k in range(len(read))],
                "articles": rng.permutation(50)[:shown].tolist(),
                "prices": [float(x) for x in rng.integers(1, 99, shown)],
                "clicked": [bool(x) for x in rng.random(shown) < 0.3],
                "seconds": [float(x) for x in rng.integers(0, 10, shown)],
            }
        )
    return out


def impression_rows(shown_requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Expand the requests into one row per impression."""
    utc = datetime.UTC
    return [
        {
            "user": r["user"],
            "visit": r["visit"],
            "shown_at": datetime.datetime.fromtimestamp(r["at_ms"] / 1000, utc)
            + datetime.timedelta(milliseconds=position),
            "basket_value": r["basket"],
            "read_ids": r["read"],
            "read_at": [datetime.datetime.fromtimestamp(ms / 1000, utc) for ms in r["read_ms"]],
            "topic_ids": [7],
            "topic_weights": [0.5],
            "article": article,
            "price": r["prices"][position],
            "place": position,
            "clicked": r["clicked"][position],
            "seconds": r["seconds"][position],
            "left_at": datetime.datetime.fromtimestamp(r["at_ms"] / 1000 + 60, utc),
        }
        for r in shown_requests
        for position, article in enumerate(r["articles"])
    ]


def expected_events(shown_requests: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the events that a log of these requests has, as sorted tuples."""
    out: list[tuple[Any, ...]] = []
    for r in shown_requests:
        request_id = f"{r['user']}|{r['visit']}"
        ro = {
            "basket": r["basket"],
            "history": {"item": r["read"], "time": r["read_ms"]},
            "topics": {"ids": [7], "weights": [0.5]},
        }
        nro = {"item": r["articles"], "price": r["prices"]}
        out.append(("shown", request_id, r["user"], r["at_ms"], r["articles"], ro, nro))
        for article, clicked, seconds in zip(r["articles"], r["clicked"], r["seconds"], strict=True):
            out += [("click", request_id, r["user"], r["at_ms"] + 1000, article, 1.0)] if clicked else []
            out += (
                [("read", request_id, r["user"], r["at_ms"] + 60_000, article, seconds)]
                if seconds >= 5
                else []
            )
    return sorted(out, key=str)


def as_tuple(event: Event) -> tuple[Any, ...]:
    if isinstance(event, Request):
        head = ("shown", event.request_id, event.user_id, event.time_ms, event.items_n.tolist())
        return (*head, event.ro, {name: event.nro.get(name) for name in ("item", "price")})
    return (event.action, event.request_id, event.user_id, event.time_ms, event.item_id, event.value)


def map_of(folder: Path, text: str = MAP) -> ImportMap:
    (folder / "map.toml").write_text(text)
    return load_map(str(folder / "map.toml"), SCHEMA)


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def run_import(
    folder: Path, *tables: pa.Table, text: str = MAP, out: str = "log.jsonl", **options: Any
) -> ImportCounts:
    paths = []
    for n, table in enumerate(tables):
        paths.append(str(folder / f"{n}.parquet"))
        pq.write_table(table, paths[-1], row_group_size=7)
    return import_table(paths, SCHEMA, map_of(folder, text), folder / out, **options)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events_of(path: Path) -> list[tuple[Any, ...]]:
    return sorted(
        (as_tuple(event) for event in JsonlLog([str(path)], LogLineReader(SCHEMA)).open().events), key=str
    )


@pytest.mark.parametrize("out", ["log.jsonl", "log.jsonl.gz"])
def test_requests_are_reassembled_from_rows_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.setattr(table_import, "BUCKET_BYTES", 2000)  # several buckets
    shown_requests = requests(40)
    rows = impression_rows(shown_requests)
    mixed = [rows[n] for n in np.random.default_rng(1).permutation(len(rows))]
    progress_calls: list[tuple[int, int]] = []
    counts = run_import(
        tmp_path,
        table_of(mixed[:50]),
        table_of(mixed[50:]),
        out=out,
        progress=lambda *at: progress_calls.append(at),
    )
    assert events_of(tmp_path / out) == expected_events(shown_requests)
    assert (counts.rows, counts.requests, counts.skipped) == (len(rows), 40, 0) and progress_calls[-1] == (
        len(rows),
        len(rows),
    )
    assert counts.engagements == len(expected_events(shown_requests)) - 40
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["0.parquet", "1.parquet", "map.toml", out]
    ), "no temporary file may be left"


def test_a_column_with_the_name_of_a_feature_needs_no_entry_in_the_map(tmp_path: Path) -> None:
    run_import(tmp_path, table_of([ONE_ROW]), text=MINIMAL_MAP)
    candidates = {"item": [3], "item_id": [3], "price": [1.0]}
    assert lines_of(tmp_path / "log.jsonl") == [
        {"type": "impression", "request_id": "a", "time": T0, "candidates": candidates}
    ]


@pytest.mark.parametrize(
    ("unit", "given"),
    [
        ("ms", T0),
        ("s", T0 // 1000),
        ("us", T0 * 1000),
        ("ns", T0 * 10**6),
        ("ms", "2023-11-14T22:13:20"),
        ("s", T0 / 1000),
    ],
)
def test_times_are_read_in_every_unit_and_type(tmp_path: Path, unit: str, given: object) -> None:
    run_import(tmp_path, table_of([{**ONE_ROW, "t": given}]), text=f'{MINIMAL_MAP}\ntime_unit="{unit}"')
    assert lines_of(tmp_path / "log.jsonl")[0]["time"] == T0


@pytest.mark.parametrize("kind", [pa.list_(pa.timestamp("us")), pa.list_(pa.timestamp("ns", "No/Where"), 1)])
def test_a_sequence_in_one_column_may_have_timestamps(tmp_path: Path, kind: pa.DataType) -> None:
    time = pa.array([[T0 * 10**3 if kind.value_type.unit == "us" else T0 * 10**6]], kind)
    history = pa.StructArray.from_arrays([pa.array([[7]]), time], ["item", "time"])
    run_import(tmp_path, table_of([ONE_ROW]).append_column("history", history), text=MINIMAL_MAP)
    assert lines_of(tmp_path / "log.jsonl")[0]["ro"] == {"history": {"item": [7], "time": [T0]}}


def test_a_request_may_be_named_by_its_time_in_any_zone(tmp_path: Path) -> None:
    rows = table_of([ONE_ROW, {**ONE_ROW, "item": 4}, {**ONE_ROW, "t": T0 + 1}])
    times = rows.column("t").cast(pa.timestamp("ms", "Nowhere/Unknown"))
    run_import(tmp_path, rows.set_column(1, "t", times), text=MINIMAL_MAP.replace('"id"', '"t"', 1))
    lines = lines_of(tmp_path / "log.jsonl")
    assert [(line["time"], line["candidates"]["item_id"]) for line in lines] == [(T0, [3, 4]), (T0 + 1, [3])]
    assert len({line["request_id"] for line in lines}) == 2


@pytest.mark.parametrize("kind", [pa.timestamp("ms"), pa.date32()])
def test_a_time_beyond_every_calendar_is_reported_with_its_row(tmp_path: Path, kind: pa.DataType) -> None:
    far = pa.array([2**62 if kind != pa.date32() else 2**30])
    far = far.cast(pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    table = table_of([ONE_ROW]).set_column(1, "t", far)
    with pytest.raises(LogError, match=r"0\.parquet:1: column 't': expected a time"):
        run_import(tmp_path, table, text=MINIMAL_MAP.replace('"id"', '"t"', 1))


def test_a_long_request_id_is_replaced_by_its_hash(tmp_path: Path) -> None:
    run_import(tmp_path, table_of([{**ONE_ROW, "id": "x" * 80}]), text=MINIMAL_MAP)
    assert len(lines_of(tmp_path / "log.jsonl")[0]["request_id"]) == 16


def test_contradicting_rows_of_a_request_are_reported_or_skipped(tmp_path: Path) -> None:
    rows = impression_rows(requests(3))
    two = next(n for n in range(1, len(rows)) if rows[n]["visit"] == rows[n - 1]["visit"])
    rows[two]["basket_value"] += 1.0
    with pytest.raises(LogError, match=r"value in all rows of request"):
        run_import(tmp_path, table_of(rows))
    assert not (tmp_path / "log.jsonl").exists(), "the log must not exist before it is complete"
    counts = run_import(tmp_path, table_of(rows), skip_bad=True)
    assert (counts.requests, counts.skipped) == (2, 1) and "basket" in counts.first_skipped[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("time = 3\nitem = 'a'\nrequest = ['a']", "map.toml:1: key 'time': expected text, got 3"),
        ("request = []\ntime = 't'\nitem = 'i'", "expected at least one column"),
        ("requests = ['id']", "unknown key 'requests'.*did you mean 'request'"),
        (
            MAP.replace("basket =", "baskte ="),
            "features.baskte: expected a feature of the schema.*did you mean 'basket'",
        ),
        (
            MAP.replace('{ item = "read_ids"', '{ itme = "read_ids"'),
            "features.history.itme: expected item and time",
        ),
        (
            MAP.replace('"basket_value"', '{ x = "basket_value" }'),
            "features.basket.x: expected one column, as text",
        ),
        (MAP.replace('"basket_value"', "3"), "expected a column, or a table of columns, got 3"),
        (
            MAP.replace("click =", "clik ="),
            "actions.clik: expected an action of the schema .*did you mean 'click'",
        ),
    ],
)
def test_an_invalid_map_is_rejected_in_one_sentence(tmp_path: Path, wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        map_of(tmp_path, wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"article": "articel"}, "column 'article' is absent.*did you mean 'articel'"),
        ({"left_at": "left"}, "column 'left_at' is absent"),
    ],
)
def test_a_missing_column_is_reported_with_its_file(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    table = table_of(impression_rows(requests(2)))
    with pytest.raises(ConfigError, match=rf"0\.parquet: {message}"):
        run_import(tmp_path, table.rename_columns([change.get(name, name) for name in table.column_names]))


def test_mixed_files_and_name_clashes_are_reported(tmp_path: Path) -> None:
    other = {name: ONE_ROW[name] for name in ("id", "t", "item")}
    with pytest.raises(ConfigError, match=r"expected the columns of .*got others"):
        run_import(tmp_path, table_of([ONE_ROW]), table_of([other]), text=MINIMAL_MAP)
    (tmp_path / "log.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="expected a"):
        run_import(tmp_path, table_of([ONE_ROW]), text=MINIMAL_MAP)
    assert (tmp_path / "log.jsonl").read_text() == "mine"


def test_requests_of_different_users_with_the_same_id_stay_apart(tmp_path: Path) -> None:
    rows = [{**ONE_ROW, "who": user, "item": item} for user in (1, 2) for item in (3, 4)]
    text = f'{MINIMAL_MAP}\nuser="who"'
    assert run_import(tmp_path, table_of(rows), text=text).requests == 2
    shown = {line["user_id"]: line["candidates"]["item_id"] for line in lines_of(tmp_path / "log.jsonl")}
    assert shown == {1: [3, 4], 2: [3, 4]}


@pytest.mark.parametrize("bucket_bytes", [1 << 26, 10])
def test_requests_of_a_user_with_the_same_id_in_other_sessions_have_other_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    """Else the joiner would take them for pages of one request."""
    monkeypatch.setattr(table_import, "BUCKET_BYTES", bucket_bytes)
    rows = [
        {**ONE_ROW, "t": T0 + visit, "who": who, "visit": visit, "item": item}
        for who in (1, 2, None)
        for visit in (7, 8, 9)
        for item in (3, 4)
    ]
    assert (
        run_import(tmp_path, table_of(rows), text=f'{MINIMAL_MAP}\nuser="who"\nsession="visit"').requests == 9
    )
    found = lines_of(tmp_path / "log.jsonl")
    assert all(line["candidates"]["item_id"] == [3, 4] for line in found)
    assert len({(line.get("user_id"), line["request_id"]) for line in found if "user_id" in line}) == 6
    kept = [(line.get("user_id"), line["session_id"]) for line in found if line["request_id"] == "a"]
    assert sorted(kept, key=str) == [(1, 7), (2, 7), (None, 7), (None, 8), (None, 9)], (
        "sessions are keys, too"
    )


def test_cells_that_give_the_same_joined_text_are_different_requests(tmp_path: Path) -> None:
    text = 'request=["id","page"]\ntime="t"\nitem="item"'
    rows = [{**ONE_ROW, "id": "a|b", "page": "c"}, {**ONE_ROW, "id": "a", "page": "b|c"}]
    run_import(tmp_path, table_of(rows), text=text)
    assert len({line["request_id"] for line in lines_of(tmp_path / "log.jsonl")}) == 2


def test_rows_of_a_request_share_a_bucket_even_if_a_column_is_empty_or_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_import, "BUCKET_BYTES", 10)
    text = 'request=["id","page"]\ntime="t"\nitem="item"'
    rows = [{**ONE_ROW, "page": page, "id": id_} for page in range(20) for id_ in (None, "")]
    assert run_import(tmp_path, table_of(rows), text=text).requests == 20


def test_buckets_are_even_if_requests_differ_in_the_last_column_only(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"site": ["one"] * 4000, "n": list(range(4000))})
    sizes = [len(table) for table in into_buckets([batch], ["site", "n"], tmp_path, 8)]
    assert len(sizes) == 8 and max(sizes) < 2 * min(sizes) and sum(sizes) == 4000


@pytest.mark.parametrize("wrong", [None, float("nan"), float("inf"), 1e300, "yesterday"])
def test_a_row_without_a_time_rejects_its_request_with_file_and_row(tmp_path: Path, wrong: object) -> None:
    other = str(T0) if isinstance(wrong, str) else float(T0)
    rows = [
        {**ONE_ROW, "id": id_, "t": t} for id_, t in (("a", other), ("b", other), ("b", wrong), ("c", other))
    ]
    with pytest.raises(LogError, match=r"0\.parquet:3: column 't': expected a time"):
        run_import(tmp_path, table_of(rows), text=MINIMAL_MAP)
    counts = run_import(tmp_path, table_of(rows), text=MINIMAL_MAP, skip_bad=True)
    assert (counts.requests, counts.skipped) == (2, 1) and "0.parquet:3" in counts.first_skipped[0]


def test_rows_without_a_request_id_are_rejected_one_by_one(tmp_path: Path) -> None:
    rows = [{**ONE_ROW, "id": id_} for id_ in ("a", None, "", *[None] * 12)]
    with pytest.raises(LogError, match=r"0\.parquet:2: expected a request in 'id'"):
        run_import(tmp_path, table_of(rows), text=MINIMAL_MAP)
    counts = run_import(tmp_path, table_of(rows), text=MINIMAL_MAP, skip_bad=True)
    assert (counts.requests, counts.skipped, len(counts.first_skipped)) == (1, 14, 10)


def test_an_action_needs_a_time_only_where_it_happened(tmp_path: Path) -> None:
    text = f'{MINIMAL_MAP}\n[actions]\nclick = {{ column = "clicked", time = "at" }}'
    good = [{**ONE_ROW, "clicked": True, "at": T0 + 5}, {**ONE_ROW, "item": 4, "clicked": False, "at": None}]
    assert run_import(tmp_path, table_of(good), text=text).engagements == 1
    bad = [*good, {**ONE_ROW, "id": "b", "clicked": True, "at": None}]
    with pytest.raises(LogError, match="action 'click': expected a time in column 'at'"):
        run_import(tmp_path, table_of(bad), text=text, out="other.jsonl")


def test_decimals_and_booleans_are_read_as_numbers(tmp_path: Path) -> None:
    rows = [{**ONE_ROW, "item": Decimal(3), "price": Decimal("2.50"), "basket": True}]
    run_import(tmp_path, table_of(rows), text=MINIMAL_MAP)
    (line,) = lines_of(tmp_path / "log.jsonl")
    assert line["candidates"] == {"item": [3], "item_id": [3], "price": [2.5]}
    assert line["ro"] == {"basket": 1.0}
    assert len(events_of(tmp_path / "log.jsonl")) == 1


@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("item", pa.int32()),
        ("item", pa.float64()),
        ("price", pa.int64()),
        ("price", pa.null()),
        ("t", pa.timestamp("ms")),
        ("t", pa.timestamp("us", "Europe/Berlin")),
        ("who", pa.dictionary(pa.int32(), pa.string())),
        ("who", pa.large_string()),
        ("who", pa.null()),
        ("did", pa.int8()),
    ],
)
def test_files_may_hold_a_column_in_several_types(tmp_path: Path, column: str, other: pa.DataType) -> None:
    utc = datetime.UTC
    row = {**ONE_ROW, "t": datetime.datetime(2026, 1, 2, tzinfo=utc), "who": "ann", "did": True}
    first = table_of([{**row, "price": 2.0}])
    second = table_of([{**row, "price": 2.0, "id": "b"}])
    at, cells = second.column_names.index(column), second[column]
    cells = pa.nulls(1) if pa.types.is_null(other) else cells.cast(other)
    text = f'user = "who"\n{MINIMAL_MAP}\n[actions]\nclick = {{ column = "did" }}'
    for n, tables in enumerate(([first, second.set_column(at, column, cells)],) * 2):
        run_import(tmp_path, *(tables if n else tables[::-1]), text=text, out=f"{n}.jsonl")
        found = [line for line in lines_of(tmp_path / f"{n}.jsonl") if line["type"] == "impression"]
        assert {line["request_id"] for line in found} == {"a", "b"} and len(
            {line["time"] for line in found}
        ) == 1
        assert all(line["candidates"]["item_id"] == [3] for line in found)
        missing = [line for line in found if "user_id" not in line or "price" not in line["candidates"]]
        assert len(missing) == pa.types.is_null(other)


def test_categories_may_differ_between_files(tmp_path: Path) -> None:
    """Together they have more values than their 8-bit codes can count."""
    tables = []
    for n in range(4):
        names = pa.array([f"{n}-{k}" for k in range(100)])
        who = names.cast(pa.dictionary(pa.int8(), pa.string()))
        tables.append(pa.table({"id": names, "t": [T0] * 100, "item": range(100), "who": who}))
    run_import(tmp_path, *tables, text=f'user = "who"\n{MINIMAL_MAP}')
    lines = lines_of(tmp_path / "log.jsonl")
    assert len(lines) == 400 and all(line["user_id"] == line["request_id"] for line in lines)


def test_lists_of_categories_are_read_or_refused_in_one_sentence(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "t": T0, "item": [f"i{n}", "all"]} for n in range(8)]
    kind = pa.list_(pa.dictionary(pa.int8(), pa.string()))
    table = table_of(rows)
    table = table.set_column(2, "item", table["item"].combine_chunks().cast(kind))
    text = f'lists = ["item"]\n{MINIMAL_MAP}'
    run_import(tmp_path, table.slice(0, 4), table.slice(4, 4), text=text)
    found = {line["request_id"]: line["candidates"]["item_id"] for line in lines_of(tmp_path / "log.jsonl")}
    assert found == {row["id"]: row["item"] for row in rows}
    with pytest.raises(ConfigError, match="lists of text"):  # Arrow cannot join those of two row groups
        run_import(tmp_path, table, text=text, out="other.jsonl")


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (3, "3", "the type of the other files, int64, got string"),
        (-3, (1 << 64) - 1, "expected int64, as in the other files, got uint64"),
    ],
)
def test_files_with_incompatible_types_of_a_column_are_rejected(
    tmp_path: Path, one: Any, other: Any, message: str
) -> None:
    second = table_of([{**ONE_ROW, "id": "b"}]).drop_columns(["item"])
    with pytest.raises(ConfigError, match=rf"1\.parquet: column 'item': .*{message}"):
        run_import(
            tmp_path,
            table_of([{**ONE_ROW, "item": one}]),
            second.append_column("item", pa.array([other], None if type(other) is str else pa.uint64())),
            text=MINIMAL_MAP,
        )


def test_a_feature_named_item_id_is_rejected(tmp_path: Path) -> None:
    pq.write_table(table_of([{"id": "a", "t": T0, "item": 3, "item_id": 9}]), tmp_path / "a.parquet")
    features = [{"name": "item_id", "kind": "ids", "table": "item"}]
    schema = schema_from_dict(
        {"tables": {"item": {"dim": 4}}, "nro": features, "label": [{"name": "click", "action": "click"}]}
    )
    (tmp_path / "map.toml").write_text(MINIMAL_MAP)
    with pytest.raises(ConfigError, match="feature 'item_id': expected another name"):
        import_table(
            [str(tmp_path / "a.parquet")],
            schema,
            load_map(str(tmp_path / "map.toml"), schema),
            tmp_path / "log.jsonl",
        )


def test_ids_that_pandas_wrote_as_floats_are_read_as_integers(tmp_path: Path) -> None:
    rows = [
        {**ONE_ROW, "item": 3.0, "who": 7.0, "place": 1.0},
        {**ONE_ROW, "item": 4.0, "who": 7.0, "place": 0.0},
    ]
    rows += [{**ONE_ROW, "id": "b", "item": 3.0, "who": float("nan"), "place": 0.0}]
    run_import(tmp_path, table_of(rows), text=f'user = "who"\nposition = "place"\n{MINIMAL_MAP}')
    first, second = lines_of(tmp_path / "log.jsonl")
    assert (first["user_id"], first["candidates"]["item_id"]) == (7, [4, 3])
    assert "user_id" not in second and second["candidates"]["item_id"] == [3]


def test_an_empty_text_is_missing_as_in_a_text_file(tmp_path: Path) -> None:
    rows = [{**ONE_ROW, "who": "", "what": "boot"}, {**ONE_ROW, "who": "", "item": 4, "what": ""}]
    run_import(tmp_path, table_of(rows), text=f'user = "who"\n{MINIMAL_MAP}\n[features]\nitem = "what"')
    (line,) = lines_of(tmp_path / "log.jsonl")
    assert "user_id" not in line and line["candidates"]["item"] == ["boot", None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"price": float("inf")}, "feature 'price': expected finite 32-bit floats, got inf"),
        ({"price": 1e300}, "feature 'price': expected finite 32-bit floats, got 1e\\+300"),
        ({"topics": {"ids": [1, None], "weights": [0.5, 0.5]}}, "feature 'topics': expected ids"),
        ({"item": None}, "column 'item': expected an item's id"),
    ],
)
def test_a_value_that_a_replay_would_reject_is_rejected_with_file_and_row(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    rows = [dict.fromkeys(change) | ONE_ROW, {**ONE_ROW, "id": "b", **change}]
    with pytest.raises(LogError, match=rf"0\.parquet:2: {message}"):
        run_import(tmp_path, table_of(rows), text=MINIMAL_MAP)
    assert run_import(tmp_path, table_of(rows), text=MINIMAL_MAP, skip_bad=True).skipped == 1


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"id": {"a": [1]}}, "", r"column 'id' \(request\): expected text or numbers, got struct"),
        ({"id": b"x"}, "", r"column 'id' \(request\): expected text or numbers, got binary"),
        ({"item": 1.5}, "", r"column 'item': expected whole numbers.*, got 1\.5"),
        ({"item": 2.0**60}, "", r"column 'item': expected whole numbers up to 2\^53"),
        ({"t": [T0]}, "", r"column 't' \(time\): expected timestamps, numbers or text, got list"),
        ({"price": "2.50"}, "", r"column 'price' \(features.price\): expected numbers, got string"),
        ({"did": "yes"}, '[actions]\nclick = { column = "did" }', r"actions.click.column.*got string"),
        (
            {"did": True, "worth": "x"},
            '[actions]\nclick = { column = "did", value = "worth" }',
            r"actions.click.value.*got string",
        ),
        ({"place": 1.5}, 'position = "place"', r"column 'place': expected whole numbers.*, got 1\.5"),
        ({"basket": [1.0]}, "", r"features.basket\): expected numbers, got list"),
        ({"topics": 5}, "", r"features.topics\): expected structs or lists, got int64"),
    ],
)
def test_a_column_of_an_unusable_type_is_rejected_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], more: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"0\.parquet: .*{message}"):
        run_import(tmp_path, table_of([{**ONE_ROW, **change}]), text=f"{MINIMAL_MAP}\n{more}")
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize("cells", ["['a', 'b']", "[a, b]"])
def test_a_list_of_ids_that_is_no_json_is_rejected_with_its_line(tmp_path: Path, cells: str) -> None:
    """pandas writes a column of lists to CSV like this."""
    (tmp_path / "a.csv").write_text(f'id;t;item;tags\nr1;{T0};5;"{cells}"\n')
    schema = schema_from_dict(
        {
            "tables": {"tag": {"dim": 4}},
            "nro": [{"name": "tags", "kind": "ids", "table": "tag"}],
            "label": [{"name": "click", "action": "click"}],
        }
    )
    (tmp_path / "map.toml").write_text('request = ["id"]\ntime = "t"\nitem = "item"\n')
    column_map = load_map(str(tmp_path / "map.toml"), schema)
    with pytest.raises(LogError, match=r"a\.csv:2: tags: expected an id, or a list"):
        import_table([str(tmp_path / "a.csv")], schema, column_map, tmp_path / "log.jsonl")


@pytest.mark.parametrize("name", ["log.JSONL", "log.jsonl.GZ"])
def test_a_log_is_compressed_if_its_name_says_so_in_any_case(tmp_path: Path, name: str) -> None:
    run_import(tmp_path, table_of([ONE_ROW]), text=MINIMAL_MAP, out=name)
    assert len(list(JsonlLog([str(tmp_path / name)], LogLineReader(SCHEMA)).open().events)) > 0


@pytest.mark.parametrize("name", ["log.jsonl.zst", "log.csv", "log"])
def test_a_log_is_written_under_a_name_that_can_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.jsonl or \.jsonl\.gz"):
        run_import(tmp_path, table_of([ONE_ROW]), text=MINIMAL_MAP, out=name)


@pytest.mark.parametrize("unit", ["s", "us"])
def test_a_wrong_unit_of_times_names_the_setting(tmp_path: Path, unit: str) -> None:
    given = T0 // 1000 if unit == "s" else T0 * 1000
    with pytest.raises(LogError, match=r"0\.parquet:1: column 't': .* correct it in the map"):
        run_import(tmp_path, table_of([{**ONE_ROW, "t": given}]), text=MINIMAL_MAP)


@pytest.mark.parametrize("cell", ["3.50 EUR", "inf", "1'000"])
def test_the_cell_that_makes_a_column_text_is_named(tmp_path: Path, cell: str) -> None:
    rows = "".join(f"r1,{T0},{n},{price}\n" for n, price in enumerate(("1.5", "NA", "2", cell, "3")))
    (tmp_path / "a.csv").write_text(f"id,t,item,price\n{rows}")
    column_map = map_of(tmp_path, MINIMAL_MAP)
    with pytest.raises(
        ConfigError, match=r"'price'.*expected numbers, got string, such as .* in line 5"
    ) as error:
        import_table([str(tmp_path / "a.csv")], SCHEMA, column_map, tmp_path / "log.jsonl")
    assert repr(cell) in str(error.value)


def test_two_parquet_columns_of_one_name_are_rejected(tmp_path: Path) -> None:
    table = table_of([ONE_ROW])
    two = pa.Table.from_arrays([*table.columns, table["price"]], names=[*table.column_names, "price"])
    with pytest.raises(ConfigError, match="two columns are named 'price'"):
        run_import(tmp_path, two, text=MINIMAL_MAP)


EVENTS = """
request = ["visitor", "seen_at"]
time = "seen_at"
item = "article"
user = "visitor"
event = "kind"
shown = ["view", "show"]
"""


def import_event_rows(
    folder: Path, text: str, skip_bad: bool = False
) -> tuple[ImportCounts, list[tuple[Any, ...]]]:
    (folder / "events.csv").write_text("kind;visitor;article;seen_at\n" + text)
    out = folder / "log.jsonl"
    counts = import_table(
        [str(folder / "events.csv")], SCHEMA, map_of(folder, EVENTS), out, skip_bad=skip_bad
    )
    return counts, [event[:2] + event[3:5] for event in events_of(out) if event[0] != "shown"]


def test_rows_of_actions_belong_to_the_newest_earlier_row_with_the_item(tmp_path: Path) -> None:
    """The row must be of the same user. It may come after the row of the action in the file."""
    text = (
        "click;ann;5;2024-03-04 10:00:09\n"
        "view;ann;5;2024-03-04 10:00:00\n"
        "show;ann;5;2024-03-04 10:00:05\n"
        "view;bob;5;2024-03-04 10:00:08\n"
        "read;ann;5;2024-03-04 10:00:05\n"
        "read;bob;5;2024-03-04 11:00:00 UTC\n"
    )
    counts, actions = import_event_rows(tmp_path, text)
    ms = 1_709_546_400_000
    assert (counts.requests, counts.engagements, counts.rows) == (3, 3, 6)
    assert actions == [
        ("click", "ann|2024-03-04 10:00:05", ms + 9000, 5),
        ("read", "ann|2024-03-04 10:00:05", ms + 5000, 5),
        ("read", "bob|2024-03-04 10:00:08", ms + 3_600_000, 5),
    ]


def test_a_row_of_an_action_may_have_a_value(tmp_path: Path) -> None:
    """An empty cell means 1, as if there were no column of values."""
    text = "kind;visitor;article;seen_at;paid\n"
    for row in ("view;ann;5;2024-03-04 10:00:00;", "order;ann;5;2024-03-04 10:00:09;12.5"):
        text += f"{row}\n"
    (tmp_path / "events.csv").write_text(text + "click;ann;5;2024-03-04 10:00:03;\n")
    column_map = map_of(tmp_path, f'event_value = "paid"\n{EVENTS}')
    out = tmp_path / "log.jsonl"
    import_table([str(tmp_path / "events.csv")], SCHEMA, column_map, out)
    values = {line["action"]: line["value"] for line in lines_of(out) if line["type"] == "engagement"}
    assert values == {"order": 12.5, "click": 1.0}


def test_without_a_user_an_action_belongs_to_a_row_of_its_session(tmp_path: Path) -> None:
    text = "kind;visitor;visit;article;seen_at\n"
    for row in ("view;;7;5", "view;;8;5", "view;bob;7;5", "click;;7;5", "click;;;5"):
        text += f"{row};2024-03-04 10:00:00\n"
    (tmp_path / "events.csv").write_text(text)
    column_map = map_of(tmp_path, EVENTS.replace("[", '["visit", ', 1) + 'session = "visit"')
    out = tmp_path / "log.jsonl"
    counts = import_table([str(tmp_path / "events.csv")], SCHEMA, column_map, out, skip_bad=True)
    assert (counts.requests, counts.engagements, counts.skipped) == (3, 1, 1)
    (click,) = [event for event in events_of(out) if event[0] == "click"]
    assert click[1] == "7||2024-03-04 10:00:00"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("click;ann;6;2024-03-04 10:00:09", "action 'click': expected an earlier row"),
        ("click;bob;5;2024-03-04 10:00:09", "action 'click': expected an earlier row"),
        ("click;ann;5;2024-03-04 09:00:00", "action 'click': expected an earlier row"),
        ("click;ann;5;soon", "'seen_at': expected a time"),
        (";ann;5;2024-03-04 10:00:09", "'kind': expected 'view' or 'show'"),
    ],
)
def test_an_action_without_a_matching_row_is_reported_with_its_line_or_skipped(
    tmp_path: Path, row: str, reason: str
) -> None:
    text = f"view;ann;5;2024-03-04 10:00:00\n{row}\n"
    with pytest.raises(LogError, match=f"events.csv:3: .*{reason}"):
        import_event_rows(tmp_path, text)
    counts, actions = import_event_rows(tmp_path, text, skip_bad=True)
    assert (counts.requests, counts.skipped, actions) == (1, 1, [])


@pytest.mark.parametrize(
    ("text", "message_part"),
    [
        (EVENTS.replace('shown = ["view", "show"]', ""), "shown"),
        (EVENTS.replace('user = "visitor"', ""), "user"),
        (f'event_value = "paid"\n{MINIMAL_MAP}', "event_value"),
    ],
)
def test_a_map_with_rows_of_actions_names_shown_values_and_a_user(
    tmp_path: Path, text: str, message_part: str
) -> None:
    with pytest.raises(ConfigError, match=message_part):
        map_of(tmp_path, text)


def test_times_may_have_the_day_first(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user,article,shown_at\n1,5,03/04/2024 10:00:00\n")
    for day_first, ms in ((False, 1_709_546_400_000), (True, 1_712_138_400_000)):
        text = 'request = ["user"]\nuser = "user"\nitem = "article"\ntime = "shown_at"\nday_first = '
        text += str(day_first).lower()
        out = tmp_path / f"{ms}.jsonl"
        import_table([str(tmp_path / "rows.csv")], SCHEMA, map_of(tmp_path, text), out)
        assert events_of(out)[0][3] == ms


LISTS = """
request = ["id"]
time = "t"
item = "items"
lists = ["price", "items"]
[actions]
click = { items = "chosen" }
"""


def import_lists(
    tmp_path: Path, rows: list[dict[str, Any]], **options: Any
) -> tuple[ImportCounts, list[Any]]:
    """The counts, and the lines of the log."""
    (tmp_path / "map.toml").write_text(LISTS)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    out = tmp_path / "log.jsonl"
    column_map = load_map(str(tmp_path / "map.toml"), SCHEMA)
    counts = import_table([str(path)], SCHEMA, column_map, out, **options)
    return counts, [json.loads(line) for line in out.read_text().splitlines()]


def test_lists_of_equal_length_become_the_candidates(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "t": T0, "items": [3, 4], "price": [1.0, None], "chosen": [4]},
        {"id": "b", "t": T0 + 1, "items": [5], "price": None, "chosen": []},
    ]
    counts, lines = import_lists(tmp_path, rows)
    assert (counts.requests, counts.engagements) == (2, 1)
    assert lines[0]["candidates"] == {"item_id": [3, 4], "price": [1.0, None]}
    assert (lines[1]["item_id"], lines[1]["action"], lines[1]["value"]) == (4, "click", 1.0)
    assert lines[2]["candidates"]["item_id"] == [5]


def test_an_item_of_an_action_that_its_row_does_not_show_is_kept_once(tmp_path: Path) -> None:
    """`check` and a replay report one that no row shows as a dead letter."""
    row = {"id": "a", "t": T0, "items": [3, 4], "price": [1.0, 1.0], "chosen": [9, 4, 9, None]}
    page = {"id": "a", "t": T0, "items": [5], "price": [1.0], "chosen": [3, 9]}
    counts, lines = import_lists(tmp_path, [row, page])
    assert [(line["item_id"], line["action"]) for line in lines[1:]] == [
        (4, "click"),
        (9, "click"),
        (3, "click"),
    ]
    assert counts.engagements == 3


def test_a_list_may_be_missing_in_every_row(tmp_path: Path) -> None:
    rows = [{"id": id_, "t": T0, "items": [3, 4], "price": None, "chosen": [4]} for id_ in "ab"]
    counts, lines = import_lists(tmp_path, rows)
    assert (counts.requests, counts.engagements, counts.skipped) == (2, 2, 0)
    assert [line["candidates"] for line in lines[::2]] == [{"item_id": [3, 4]}] * 2


def test_files_without_rows_are_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl: expected rows, got none"):
        import_lists(tmp_path, [])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"items": [3, 4], "price": [1.0]}, "rows.jsonl:2: column 'price': expected 2 entries"),
        ({"items": [], "price": []}, "rows.jsonl:2: column 'items': expected a list of shown items"),
        ({"items": None, "price": [1.0]}, "rows.jsonl:2: column 'items': expected a list of shown items"),
    ],
)
def test_a_row_with_lists_of_other_lengths_is_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    good = {"id": "a", "t": T0, "items": [3], "price": [1.0], "chosen": None}
    rows = [good, {**good, "id": "b", **row}, {**good, "id": "c"}]
    with pytest.raises(LogError, match=message):
        import_lists(tmp_path, rows)
    counts, lines = import_lists(tmp_path, rows, skip_bad=True)
    assert [line["request_id"] for line in lines] == ["a", "c"]
    assert counts.skipped == 1 and message in counts.first_skipped[0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lists", '["price"]', "expected item = 'items' among them"),
        ("lists", '["items", "t"]', r"column 't' \(lists\): expected lists, got int64"),
        ("lists", '["items", "prices"]', "column 'prices' is absent; did you mean 'price'"),
        ("click", '{ items = "chosen", column = "price" }', "expected either column or items"),
        ("click", "{}", "expected either column or items"),
    ],
)
def test_a_map_whose_lists_do_not_fit_is_refused(
    tmp_path: Path, key: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in LISTS.splitlines()]
    monkeypatch.setattr("tests.replay.test_table_import.LISTS", "\n".join(changed))
    with pytest.raises(ConfigError, match=message):
        import_lists(tmp_path, [{"id": "a", "t": T0, "items": [3], "price": [1.0], "chosen": [3]}])
