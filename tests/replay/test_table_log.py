"""Logs in Parquet and CSV give the same events as the same log in JSON lines."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from roostream.errors import ConfigError
from roostream.replay import csv_log, parquet_log
from roostream.replay.datasets import EventLog
from roostream.replay.events import Action, Event, Request
from roostream.replay.log_lines import EngagementLine, ImpressionLine, LogError, LogLineReader
from roostream.replay.parse_time import parse_time_ms
from roostream.schema.schema_file import load_schema, schema_from_dict

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "basket"}, {"name": "tags", "kind": "ids", "table": "item"}],
        "nro": [{"name": "price"}, {"name": "brands", "kind": "ids", "table": "item"}],
        "label": [{"name": "click", "action": "click"}],
    }
)
IMPRESSIONS_CSV = """request_id,time,user_id,item_id,basket,tags,price,brands,position
r1,1700000000000,ann,1,2.5,"[""x"", 3]",80,7,0
r2,2023-11-14T22:13:21,17,sock,,,5,b,0
r1,1700000000000,ann,2,2.5,"[""x"", 3]",,"[8, 9]",4
"""
ENGAGEMENTS_CSV = """request_id,time,user_id,item_id,action,value
r2,1700000002000,17,sock,click,
r1,1700000000000,ann,2,order,9.5
"""


def expected_events() -> list[Event]:
    reader = LogLineReader(SCHEMA)
    ann = {"basket": 2.5, "tags": ["x", 3]}
    first: dict[str, Any] = {"item_id": [1, 2], "price": [80.0, None], "brands": [7, [8, 9]]}
    second: dict[str, Any] = {"item_id": ["sock"], "price": [5.0], "brands": ["b"]}
    lines = (
        ImpressionLine("r1", T0, first, "ann", ro=ann, positions=[0, 4]),
        EngagementLine("r1", T0, 2, "order", "ann", value=9.5),
        ImpressionLine("r2", T0 + 1000, second, 17, positions=[0]),
        EngagementLine("r2", T0 + 2000, "sock", "click", 17),
    )
    return [reader.event(line, "") for line in lines]


def as_dict(event: Event) -> dict[str, Any]:
    names = event.__slots__
    found = {n: getattr(event, n) for n in names if n != "where"}
    return found | ({"items_n": event.items_n.tolist()} if isinstance(event, Request) else {})


def open_csv(
    folder: Path, shown: str = IMPRESSIONS_CSV, done: str = ENGAGEMENTS_CSV, **settings: Any
) -> EventLog:
    (folder / "shown.csv").write_text(shown)
    (folder / "done.csv").write_text(done)
    files = {"impressions": (str(folder / "shown.csv"),), "engagements": (str(folder / "done.csv"),)}
    return csv_log.open(csv_log.Options(**files, **settings), SCHEMA, 0)


def test_csv_gives_the_events_of_json_lines(tmp_path: Path) -> None:
    log = open_csv(tmp_path)
    assert log.num_requests == 2
    events = list(log.events)
    assert [as_dict(e) for e in events] == [as_dict(e) for e in expected_events()]
    assert [e.where.rpartition("/")[2] for e in events] == [
        "shown.csv:2",
        "done.csv:3",
        "shown.csv:3",
        "done.csv:2",
    ]


def test_engagements_may_repeat_columns_of_the_shown_items(tmp_path: Path) -> None:
    first, *rows = ENGAGEMENTS_CSV.splitlines()
    done = "\n".join([f"{first},price,position", *(f"{row},5,0" for row in rows)]) + "\n"
    assert [as_dict(e) for e in open_csv(tmp_path, done=done).events] == [
        as_dict(e) for e in expected_events()
    ]
    with pytest.raises(ConfigError, match="'note' is not a feature"):
        open_csv(tmp_path, done=done.replace(",price", ",note"))


@pytest.mark.parametrize("compressed", [False, True])
def test_parquet_gives_the_events_of_json_lines(tmp_path: Path, compressed: bool) -> None:
    moment = datetime.datetime.fromtimestamp(T0 / 1000, datetime.UTC).replace(tzinfo=None)
    shown = {
        "request_id": ["r1", "r2", "r1"],
        "time": [moment, moment + datetime.timedelta(seconds=1), moment],
        "user_id": pa.array(["ann", "17", "ann"]).dictionary_encode(),
        "item_id": ["a", "sock", "b"],
        "basket": [2.5, None, 2.5],
        "tags": [["x"], None, ["x"]],
        "price": [80.0, 5.0, None],
        "brands": [[7], [3], [8, 9]],
        "position": [0, 0, 4],
    }
    done = {
        "request_id": ["r2"],
        "time": [T0 + 2000],
        "item_id": ["sock"],
        "action": ["click"],
        "user_id": ["17"],
    }
    files = []
    for name, table in (("shown", shown), ("done", done)):
        files.append(tmp_path / f"{name}.parquet{'.zst' if compressed else ''}")
        pq.write_table(pa.table(table), tmp_path / "plain.parquet")
        data = (tmp_path / "plain.parquet").read_bytes()
        files[-1].write_bytes(zstandard.compress(data) if compressed else data)
    options = parquet_log.Options(impressions=(str(files[0]),), engagements=(str(files[1]),))
    events = list(parquet_log.open(options, SCHEMA, 0).events)
    assert [(type(e), e.request_id, e.time_ms) for e in events] == [
        (Request, "r1", T0),
        (Request, "r2", T0 + 1000),
        (Action, "r2", T0 + 2000),
    ]
    first = events[0]
    assert isinstance(first, Request) and first.nro == {"price": [80.0, None], "brands": [[7], [8, 9]]}
    assert first.ro == {"basket": 2.5, "tags": ["x"]} and first.positions == [0, 4]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_truth_values_decimals_and_categories_are_numbers_and_texts(tmp_path: Path, form: str) -> None:
    rows = {
        "request_id": pa.array(["r", "r", "r"]).dictionary_encode(),
        "time": [T0] * 3,
        "item_id": [1, 2, 3],
        "basket": [decimal.Decimal("2.50")] * 3,
        "price": [True, None, False],
    }
    file = tmp_path / f"shown.{form}"
    if form == "csv":
        file.write_text("request_id,time,item_id,basket,price\n" + "".join(
            f"r,{T0},{item},2.50,{price}\n" for item, price in ((1, "yes"), (2, ""), (3, "False"))
        ))  # fmt: skip
    else:
        pq.write_table(pa.table(rows), file)
    module: Any = csv_log if form == "csv" else parquet_log
    (request,) = module.open(module.Options(impressions=(str(file),)), SCHEMA, 0).events
    assert (request.request_id, request.ro, request.nro["price"]) == ("r", {"basket": 2.5}, [1.0, None, 0.0])


def test_parquet_times_in_ns_and_of_any_zone_are_read(tmp_path: Path) -> None:
    moment = pa.array([T0 * 10**6 + 1], pa.timestamp("ns", "Nowhere/Unknown"))
    table = pa.table({"request_id": ["r1"], "time": moment, "item_id": [1]})
    pq.write_table(table, tmp_path / "shown.parquet")
    options = parquet_log.Options(impressions=(str(tmp_path / "shown.parquet"),))
    assert [event.time_ms for event in parquet_log.open(options, SCHEMA, 0).events] == [T0]


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.timestamp("ms"), 2**62), (pa.timestamp("ns"), T0), (pa.date32(), 2**30)]
)
@pytest.mark.parametrize("name", ["price", "user_id", "brands"])
def test_a_parquet_column_of_times_that_is_not_the_time_is_refused_or_ignored(
    tmp_path: Path, kind: pa.DataType, value: int, name: str
) -> None:
    of_kind = pa.array([value], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    table = pa.table({"request_id": ["r1"], "time": [T0], "item_id": [1], name: of_kind})
    pq.write_table(table, tmp_path / "shown.parquet")
    file = str(tmp_path / "shown.parquet")
    with pytest.raises(
        ConfigError, match=rf"shown\.parquet: column '{name}': expected numbers, ids or lists"
    ):
        parquet_log.open(parquet_log.Options(impressions=(file,)), SCHEMA, 0)
    options = parquet_log.Options(impressions=(file,), ignore=(name,))
    assert [event.time_ms for event in parquet_log.open(options, SCHEMA, 0).events] == [T0]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Nowhere/Unknown"])
def test_parquet_times_in_a_sequence_are_read_in_every_unit_and_zone(
    tmp_path: Path, unit: str, zone: str | None
) -> None:
    history = {"name": "history", "kind": "sequence", "table": "item", "columns": {"time": "time_ms"}}
    schema = schema_from_dict(
        {"tables": {"item": {"dim": 4}}, "ro": [history], "label": [{"name": "click", "action": "click"}]}
    )
    per_unit = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    kind = pa.struct([("item", pa.list_(pa.int64())), ("time", pa.list_(pa.timestamp(unit, zone)))])
    read = pa.array([{"item": [7], "time": [T0 // 1000 * per_unit[unit]]}], kind)
    table = pa.table({"request_id": ["r1"], "time": [T0], "item_id": [1], "history": read})
    pq.write_table(table, tmp_path / "shown.parquet")
    options = parquet_log.Options(impressions=(str(tmp_path / "shown.parquet"),))
    (request,) = parquet_log.open(options, schema, 0).events
    assert isinstance(request, Request) and request.ro == {"history": {"item": [7], "time": [T0]}}


@pytest.mark.parametrize("text", ["['x', 'y']", '["x", "y"]', "[1 2 3]", "[x, y]"])
def test_a_list_of_ids_that_is_text_is_refused(tmp_path: Path, text: str) -> None:
    """As one id it would be trained without a word."""
    table = pa.table({"request_id": ["r1"], "time": [T0], "item_id": [1], "brands": [text]})
    pq.write_table(table, tmp_path / "shown.parquet")
    options = parquet_log.Options(impressions=(str(tmp_path / "shown.parquet"),))
    with pytest.raises(LogError, match=r"shown\.parquet:1: brands: expected an id, or a list"):
        list(parquet_log.open(options, SCHEMA, 0).events)


def test_an_id_in_brackets_is_one_id(tmp_path: Path) -> None:
    table = pa.table({"request_id": ["r1"], "time": [T0], "item_id": [1], "brands": ["[not set]"]})
    pq.write_table(table, tmp_path / "shown.parquet")
    options = parquet_log.Options(impressions=(str(tmp_path / "shown.parquet"),))
    (request,) = parquet_log.open(options, SCHEMA, 0).events
    assert isinstance(request, Request) and request.nro["brands"] == ["[not set]"]


def test_an_empty_text_of_parquet_is_missing(tmp_path: Path) -> None:
    row = {"request_id": "r", "time": T0, "item_id": 1, "user_id": "", "brands": ""}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "shown.parquet")
    options = parquet_log.Options(impressions=(str(tmp_path / "shown.parquet"),))
    (request,) = parquet_log.open(options, SCHEMA, 0).events
    assert isinstance(request, Request) and request.user_id == 0 and "brands" not in request.nro


def test_compressed_csv_files_are_read_in_any_order(tmp_path: Path) -> None:
    head, *rows = IMPRESSIONS_CSV.splitlines(keepends=True)
    paths = []
    for n, row in enumerate(reversed(rows)):
        paths.append(tmp_path / f"{n}.csv.gz")
        paths[-1].write_bytes(gzip.compress((head + row).encode()))
    events = list(csv_log.open(csv_log.Options(impressions=tuple(map(str, paths))), SCHEMA, 0).events)
    assert [(e.request_id, len(e.items_n)) for e in events if isinstance(e, Request)] == [
        ("r1", 2),
        ("r2", 1),
    ]


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ("request_id,time,item\nr,1,1\n", r"shown.csv: column 'item_id' is absent"),
        ("request_id,time,item_id,prize\nr,1,1,1\n", r"did you mean 'price'"),
        ("request_id,time,item_id,action\nr,1,1,view\n", r"'action' .* with --engagements"),
        ("", r"shown.csv: expected a"),
        (
            'request_id,time,item_id,basket\nr,1700000000000,1,"2\nr,1700000000000,2,2\n',
            r"shown.csv:2: .*quote",
        ),
        ("request_id,time,item_id,price,price\nr,1,1,1,1\n", r"column 'price'"),
    ],
)
def test_a_table_with_other_columns_is_reported(tmp_path: Path, shown: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_csv(tmp_path, shown)


ROW = "r9,1700000003000,5,1,1,,1,,0\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("r9,1700000003,5,1,1,,1,,0\n", r"shown.csv:5: time:"),
        ("r9,,5,1,1,,1,,0\n", r"shown.csv:5: time: expected a time as text, or ms"),
        ("r9,1700000003000,5,1,dear,,1,,0\n", r"shown.csv:5: basket: expected a number, got 'dear'"),
        ("r9,1700000003000,5,1,1,[3,1,,0\n", r"shown.csv:5: tags: expected JSON"),
        ("r9,1700000003000,5,1,1,,1,,-1\n", r"shown.csv:5: positions: expected"),
        ("r9,1700000003000,5,,1,,1,,0\n", r"shown.csv:5: candidates: expected an item_id"),
        ("r9,1700000003000,5\n", r"shown.csv:5: expected 9 cells"),
        (ROW + ROW.replace(",1,,1", ",2,,1"), r"value in all rows of request 'r9'"),
    ],
)
def test_an_invalid_row_is_reported_with_its_line_or_skipped_and_counted(
    tmp_path: Path, row: str, message: str
) -> None:
    with pytest.raises(LogError, match=message):
        list(open_csv(tmp_path, IMPRESSIONS_CSV + row).events)
    skipping_log = open_csv(tmp_path, IMPRESSIONS_CSV + row + "\n" + ROW.replace("r9", "good"), skip_bad=True)
    assert [e.request_id for e in skipping_log.events if isinstance(e, Request)] == ["r1", "r2", "good"]
    assert skipping_log.skipped().number == 1


def test_a_column_without_a_name_can_be_ignored(tmp_path: Path) -> None:
    shown = "".join(
        f"{n},{line}\n" if n else f",{line}\n" for n, line in enumerate(IMPRESSIONS_CSV.splitlines())
    )
    with pytest.raises(ConfigError, match="'column_1'"):
        open_csv(tmp_path, shown)
    log = open_csv(tmp_path, shown, ignore=("column_1",))
    assert [as_dict(event) for event in log.events] == [as_dict(event) for event in expected_events()]


@pytest.mark.parametrize(
    "time", ["1970-01-01T00:00:00.001", "1979-12-31", "2300-01-01", "9999-12-31T23:59:59.999"]
)
def test_a_time_as_text_may_be_in_any_year(tmp_path: Path, time: str) -> None:
    done = f"request_id,time,item_id,action\nr,{time},1,click\n"
    log = open_csv(tmp_path, f"request_id,time,item_id\nr,{time},1\n", done)
    assert [event.time_ms for event in log.events] == [parse_time_ms(time)] * 2


def test_rows_that_are_empty_in_every_column_are_counted(tmp_path: Path) -> None:
    """Spreadsheets write such rows below a table."""
    log = open_csv(tmp_path, IMPRESSIONS_CSV + ",,,,,,,,\n\n")
    assert [as_dict(event) for event in log.events] == [as_dict(event) for event in expected_events()]
    skipped = log.skipped()
    assert (skipped.number, skipped.empty_rows) == (0, 2) and "2 rows" in skipped.warnings()[0]


def test_every_row_without_a_readable_time_is_counted(tmp_path: Path) -> None:
    bad = "r9,soon,5,1,1,,1,,0\n"
    log = open_csv(tmp_path, IMPRESSIONS_CSV + bad + bad, skip_bad=True)
    assert sum(isinstance(event, Request) for event in log.events) == 2
    assert log.skipped().number == 2


@pytest.mark.parametrize("bad", ["1700000000000,ann,3,2.5,,dear,7,5", "soon,ann,3,2.5,,80,7,5"])
def test_a_request_with_an_unreadable_row_is_skipped_as_a_whole(tmp_path: Path, bad: str) -> None:
    """The remaining rows would not be the list that was shown."""
    log = open_csv(tmp_path, f"{IMPRESSIONS_CSV}r1,{bad}\n", skip_bad=True)
    assert [event.request_id for event in log.events if isinstance(event, Request)] == ["r2"]
    assert log.skipped().number == 1 and "shown.csv:5" in log.skipped().first[0]


@pytest.mark.parametrize("user", ['"[17]"', '"{""id"": 17}"'])
def test_a_user_that_is_a_list_or_an_object_makes_a_bad_row(tmp_path: Path, user: str) -> None:
    """Its request is left out as a whole, because its other rows are not the list that was shown."""
    row = f"r1,1700000000000,{user},3,2.5,,80,7,5\n"
    with pytest.raises(LogError, match=r"shown\.csv:5: user_id: expected an integer or text"):
        list(open_csv(tmp_path, IMPRESSIONS_CSV + row).events)
    log = open_csv(tmp_path, IMPRESSIONS_CSV + row, skip_bad=True)
    assert [event.request_id for event in log.events if isinstance(event, Request)] == ["r2"]
    assert log.skipped().number == 1


@pytest.mark.parametrize("column", ["request_id", "user_id", "session_id", "surface"])
@pytest.mark.parametrize("wrong", [["a"], {"id": "a"}])
def test_a_parquet_column_of_ids_with_lists_or_objects_is_reported_with_its_row(
    tmp_path: Path, column: str, wrong: Any
) -> None:
    row = {"request_id": "r", "time": T0, "item_id": 1, column: wrong}
    pq.write_table(pa.Table.from_pylist([row, row | {"time": None}]), tmp_path / "shown.parquet")
    options = parquet_log.Options(impressions=(str(tmp_path / "shown.parquet"),), skip_bad=True)
    log = parquet_log.open(options, SCHEMA, 0)
    assert list(log.events) == [] and log.skipped().number == 2
    assert f"shown.parquet:1: {column}: expected" in log.skipped().first[1]


def test_a_parquet_column_without_request_ids_is_reported_with_its_row(tmp_path: Path) -> None:
    table = pa.table({"request_id": pa.nulls(1), "time": [T0], "item_id": [1]})
    pq.write_table(table, tmp_path / "shown.parquet")
    options = parquet_log.Options(impressions=(str(tmp_path / "shown.parquet"),))
    with pytest.raises(LogError, match=r"shown\.parquet:1: request_id: expected text or an integer"):
        list(parquet_log.open(options, SCHEMA, 0).events)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters_give_the_same_events(tmp_path: Path, delimiter: str) -> None:
    def with_delimiter(text: str) -> str:
        out = io.StringIO()
        rows = [[cell.replace("2.5", "2,5") if delimiter == ";" else cell for cell in row]
                for row in csv.reader(text.splitlines())]  # fmt: skip
        csv.writer(out, delimiter=delimiter).writerows(rows)
        return out.getvalue()

    log = open_csv(tmp_path, with_delimiter(IMPRESSIONS_CSV), with_delimiter(ENGAGEMENTS_CSV))
    assert [as_dict(event) for event in log.events] == [as_dict(event) for event in expected_events()]


def test_a_line_break_in_a_cell_does_not_end_the_row(tmp_path: Path) -> None:
    row = f'r{{n}},{T0},u,1,1,,1,"{"x" * 100}\ny",0\n'
    shown = IMPRESSIONS_CSV.split("\n")[0] + "\n" + "".join(row.format(n=n) for n in range(20_000))
    assert len(list(open_csv(tmp_path, shown, ENGAGEMENTS_CSV.split("\n")[0] + "\n").events)) == 20_000


@pytest.mark.parametrize(
    ("content", "message_part"),
    [
        (b"request_id,time,item_id\rr,1700000000000,1\r", r"\\r alone"),
        ("request_id,time,item_id\nr,1700000000000,1\n".encode("utf-16"), "-f UTF-16"),
        ("request_id,time,item_id\nr,1700000000000,\xe9\n".encode("cp1252"), "-f WINDOWS-1252"),
        (b"PAR1\xff\xff", "parquet"),
    ],
)
def test_a_file_that_is_not_utf8_text_is_rejected_with_the_command_to_convert_it(
    tmp_path: Path, content: bytes, message_part: str
) -> None:
    file = tmp_path / "shown.csv"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message_part):
        csv_log.open(csv_log.Options(impressions=(str(file),)), SCHEMA, 0)


def test_columns_may_be_ignored_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    shown = "request_id,time,item_id,note\n\nr,1700000000000,1,x\n\nr,1700000000000,2,y\n"
    (request,) = open_csv(tmp_path, shown, "request_id,time,item_id,action\n", ignore=("note",)).events
    assert isinstance(request, Request)
    assert request.items_n.tolist() == [1, 2]
    assert request.where.endswith("shown.csv:3")


def test_a_column_to_ignore_that_no_table_has_is_reported(tmp_path: Path) -> None:
    assert list(open_csv(tmp_path, ignore=("value", "user_id")).events)
    with pytest.raises(ConfigError, match="'bask'; did you mean 'basket'"):
        open_csv(tmp_path, ignore=("bask",))


@pytest.mark.parametrize("module", [csv_log, parquet_log])
def test_a_file_that_is_not_a_table_is_refused(tmp_path: Path, module: Any) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a,b\n\xff\xfe,1\n" if module is csv_log else b"nothing of the kind")
    with pytest.raises(ConfigError, match=r"expected"):
        module.open(module.Options(impressions=(str(file),)), SCHEMA, 0)


def test_the_tables_of_the_documentation_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bring-your-own-data.md").read_text()
    for language in ("csv", "toml"):
        (tmp_path / f"shop.{language}").write_text(page.split(f"```{language}\n")[1].split("```")[0])
    options = csv_log.Options(impressions=(str(tmp_path / "shop.csv"),))
    (request,) = csv_log.open(options, load_schema(tmp_path / "shop.toml"), 0).events
    assert isinstance(request, Request)
    assert request.nro == {"price": [80.0, 5.0]}
    assert request.ro == {"basket_value": 12.5}
