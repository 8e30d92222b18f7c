"""Reading CSV, JSON-lines and Parquet tables: types of columns, nested objects, and errors that name the
row."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roostream.errors import ConfigError
from roostream.replay.log_lines import LogError, LogLineReader
from roostream.replay.parse_time import parse_table_time_ms, parse_time_ms
from roostream.replay.table_files import LINE, as_parquet
from roostream.schema.schema_file import schema_from_dict

SCHEMA = schema_from_dict({"nro": [{"name": "price"}], "label": [{"name": "click", "action": "click"}]})


def read(folder: Path, *files: tuple[str, str], skip_bad: bool = False) -> list[dict[str, Any]]:
    """Write files from (name, content) and return their rows."""
    paths = []
    for name, content in files:
        paths.append(str(folder / name))
        data = content.encode()
        Path(paths[-1]).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    out = folder / "out"
    out.mkdir()
    reader = LogLineReader(SCHEMA, skip_bad=skip_bad)
    return [row for path in as_parquet(paths, out, reader.refuse) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("clicked", [False, True])
def test_ids_with_flags_become_two_lists(tmp_path: Path, clicked: bool) -> None:
    cells = (
        "id,shown,clicked\n7,N1-0 N2-1,5\n8,,6\n9,N3-0,7\n"
        if clicked
        else "id,shown\n7,N1-0 N2-1\n8,\n9,N3-0\n"
    )
    rows = read(tmp_path, ("a.csv", cells))
    assert [row["shown"] for row in rows] == [["N1", "N2"], None, ["N3"]]
    assert [row["shown_clicked" if clicked else "clicked"] for row in rows] == [[0, 1], None, [0]]
    assert [row.get("clicked") for row in rows] == ([5, 6, 7] if clicked else [[0, 1], None, [0]])


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "-2", ""], [1, -2, None]),
        (["1", "2.5", "1e3", ".5", "+4"], [1.0, 2.5, 1000.0, 0.5, 4.0]),
        (["1", "NA", "NULL", "nan"], [1, None, None, None]),
        (["NA", "DE"], ["NA", "DE"]),
        (["007", "8"], ["007", "8"]),
        (["18000000000000000000", "1"], [18_000_000_000_000_000_000, 1]),
        (["18446744073709551615", "1"], [(1 << 64) - 1, 1]),
        (["-9223372036854775808", "9223372036854775807"], [-(1 << 63), (1 << 63) - 1]),
        (["18446744073709551616", "1"], ["18446744073709551616", "1"]),  # a float would change the id
        (["-1", "18446744073709551615"], ["-1", "18446744073709551615"]),
        (["99999999999999999999999", "1.5"], [1e23, 1.5]),
        (["yes", "No", ""], [True, False, None]),
        (["true", "1"], ["true", "1"]),
        (["2024-03-04 10:00"], ["2024-03-04 10:00"]),
        (["", ""], [None, None]),
        (['"[1, 2]"', "[]"], [[1, 2], []]),
        (['"[""a"", ""b""]"', ""], [["a", "b"], None]),
        (['"[1"', "[2]"], ["[1", "[2]"]),
        (['"a, ""b"""', '"two\nlines"'], ['a, "b"', "two\nlines"]),
        (['"1,250"', "3"], ["1,250", "3"]),
        (["N1 N2", "N30", ""], [["N1", "N2"], ["N30"], None]),
        (["N1", "N30"], ["N1", "N30"]),
        (["N1 N2", "N30 story"], ["N1 N2", "N30 story"]),
        (["10 000", "2"], ["10 000", "2"]),
    ],
)
def test_a_text_column_gets_the_narrowest_type_that_fits(
    tmp_path: Path, cells: list[str], expected: list[Any]
) -> None:
    text = "\n".join(["user,value", *(f"u,{cell}" for cell in cells)]) + "\n"
    assert [row["value"] for row in read(tmp_path, ("a.csv", text))] == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "\ufeffuser;price\r\nann;1,5\r\n"),
        ("a.tsv", "user\tprice\nann\t1.5\n"),
        ("a.txt.gz", "user|price\nann|1.5\n"),
        ("a.csv", '"user","price"\n"ann","1.5"\n'),
        ("a.jsonl", '\n{"user": "ann", "price": 1.5}\n'),
    ],
)
def test_all_file_formats_of_a_table_are_read(tmp_path: Path, name: str, text: str) -> None:
    assert [(row["user"], row["price"]) for row in read(tmp_path, (name, text))] == [("ann", 1.5)]


def test_files_of_one_table_share_their_types(tmp_path: Path) -> None:
    rows = read(tmp_path, ("a.csv", "item,price\n1,2\n"), ("b.csv", "price,item\n2.5,x1\n"))
    assert [(row["item"], row["price"]) for row in rows] == [("1", 2.0), ("x1", 2.5)]


def test_a_list_of_objects_becomes_rows(tmp_path: Path) -> None:
    line = (
        '{"id": "r1", "user": {"id": 7, "country": "DE"}, '
        '"items": [{"id": "a", "tags": ["x"]}, {"id": "b", "clicked": true, "price": 2}]}\n'
    )
    rows = read(tmp_path, ("a.jsonl", line))
    outer = {"id": "r1", "user_id": 7, "user_country": "DE", LINE: 1}
    assert rows == [
        {**outer, "item_id": "a", "tags": ["x"], "clicked": None, "price": None},
        {**outer, "item_id": "b", "tags": None, "clicked": True, "price": 2},
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, (1 << 64) - 1], [1, (1 << 64) - 1]),
        ([-(1 << 63), 1], [-(1 << 63), 1]),
        ([-1, 1 << 63], ["-1", str(1 << 63)]),
        ([1 << 64, 1], [str(1 << 64), "1"]),
        ([0.5, 1 << 60], ["0.5", str(1 << 60)]),
    ],
)
def test_whole_numbers_of_json_stay_exact(tmp_path: Path, values: list[Any], expected: list[Any]) -> None:
    text = "".join(f'{{"user": 1, "value": {value}}}\n' for value in values)
    assert [row["value"] for row in read(tmp_path, ("a.jsonl", text))] == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "user,value\nu,\n", [None]),
        ("a.csv", "user,value\n", []),
        ("a.jsonl", '{"user": "u", "value": ""}\n{"user": "u", "value": null}\n', [None, None]),
        ("a.jsonl", '{"user": "u", "value": []}\n{"user": "u"}\n', [[], None]),
    ],
)
def test_a_column_without_values_has_no_type(tmp_path: Path, name: str, text: str, expected: Any) -> None:
    assert [row["value"] for row in read(tmp_path, (name, text))] == expected
    kind = pq.read_schema(tmp_path / "out" / "table-0.parquet").field("value").type
    assert pa.types.is_null(kind.value_type if pa.types.is_list(kind) else kind)


def parquet_rows(folder: Path, rows: list[dict[str, Any]], skip_bad: bool = False) -> list[dict[str, Any]]:
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=2)
    reader = LogLineReader(SCHEMA, skip_bad=skip_bad)
    (path,) = as_parquet([str(folder / "a.parquet")], folder, reader.refuse)
    return list(pq.read_table(path).to_pylist())


def test_a_list_of_objects_in_parquet_becomes_rows(tmp_path: Path) -> None:
    history = {"item": [3, 4], "time": [5, 6]}
    rows = [
        {"id": f"r{n}", "user": {"id": n, "geo": {"country": "DE"}}, "read": history, "items": items}
        for n, items in enumerate([[{"id": "a", "price": 1.5}], [{"id": "b", "price": None}, {"id": "c"}]], 1)
    ]
    found = parquet_rows(tmp_path, [*rows, {**rows[0], "items": [{"id": "d"}], "user": None}])
    ids = {"user_id": 1, "user_geo_country": "DE"}
    assert found == [
        {"id": "r1", **ids, "read": history, "item_id": "a", "price": 1.5, LINE: 1},
        {"id": "r2", **ids, "user_id": 2, "read": history, "item_id": "b", "price": None, LINE: 2},
        {"id": "r2", **ids, "user_id": 2, "read": history, "item_id": "c", "price": None, LINE: 2},
        {"id": "r1", **dict.fromkeys(ids), "read": history, "item_id": "d", "price": None, LINE: 3},
    ]


@pytest.mark.parametrize("nothing", [None, []])
def test_a_parquet_row_without_shown_items_is_reported_with_its_number(tmp_path: Path, nothing: Any) -> None:
    rows: list[dict[str, Any]] = [{"ads": [{"id": 1}]}, {"ads": nothing}, {"ads": [{"id": 2}]}]
    with pytest.raises(LogError, match=r"a\.parquet:2: ads: expected"):
        parquet_rows(tmp_path, rows)
    found = parquet_rows(tmp_path, rows, skip_bad=True)
    assert [(row["item_id"], row[LINE]) for row in found] == [(1, 1), (2, 3)]


def test_a_flat_parquet_table_may_have_other_lists_of_objects(tmp_path: Path) -> None:
    rows = [{"item": 1, "prices": [{"shop": "a"}, {"shop": "b"}]}]
    assert parquet_rows(tmp_path, rows) == rows


def test_values_of_several_types_become_text_or_numbers(tmp_path: Path) -> None:
    text = (
        '{"a": 1, "b": 1, "c": [1, null], "d": true}\n{"a": "x", "b": 2.5, "c": 3, "d": null, "e": "new"}\n'
    )
    first, second = read(tmp_path, ("a.jsonl", text))
    assert (first["a"], first["b"], first["c"], first["d"], first["e"]) == ("1", 1.0, [1], True, None)
    assert (second["a"], second["b"], second["c"], second["d"], second["e"]) == ("x", 2.5, [3], None, "new")


def test_a_byte_order_mark_is_ignored_in_tables(tmp_path: Path) -> None:
    rows = read(tmp_path, ("a.jsonl", '\ufeff{"user": "ann"}\n'), ("b.jsonl", '\ufeff{"user": "bob"}\n'))
    assert [row["user"] for row in rows] == ["ann", "bob"]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["0.5", '"NaN"', '""', "2"], [0.5, None, None, 2.0]),
        (["true", '""'], [True, None]),
        (["[1]", '["NaN", 2]', '""'], [[1], [2], None]),
        (['"x"', '"NaN"', "1"], ["x", "NaN", "1"]),
    ],
)
def test_nan_and_empty_text_are_missing_in_a_json_column_that_is_not_text(
    tmp_path: Path, cells: list[str], expected: list[Any]
) -> None:
    text = "".join(f'{{"value": {cell}}}\n' for cell in cells)
    assert [row["value"] for row in read(tmp_path, ("a.jsonl", text))] == expected


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", "user,price\nann,1\nbob\ncid,3\n", 3),
        ("a.jsonl", '{"user": "ann"}\n{broken\n{"user": "cid"}\n', 2),
        ("a.jsonl", '{"user": "ann", "items": [{"id": 1}]}\n{"user": "bob", "items": []}\n'
         '{"user": "cid", "items": [{"id": 2}]}\n', 2),
    ],
)  # fmt: skip
def test_an_invalid_row_is_reported_with_its_line_or_skipped(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    with pytest.raises(LogError, match=f"{name}:{line}: .*expected"):
        read(tmp_path, (name, text))
    (tmp_path / "out").rmdir()
    rows = read(tmp_path, (name, text), skip_bad=True)
    assert [(row["user"], row[LINE]) for row in rows] == [("ann", line - 1), ("cid", line + 1)]


def test_lines_are_counted_also_with_line_breaks_in_cells_and_empty_lines(tmp_path: Path) -> None:
    cells = '"ann\nlee",1\n\nbob,2\n"cid\nor so"\n"dan\n\nx",4\neve\nfay,6\n'
    with pytest.raises(LogError, match=r"a\.csv:6: expected 2 cells"):
        read(tmp_path, ("a.csv", f"user,price\n{cells}"))
    (tmp_path / "out").rmdir()
    rows = read(tmp_path, ("a.csv", f"user,price\n{cells}"), skip_bad=True)
    assert [(row["user"][:3], row[LINE]) for row in rows] == [("ann", 2), ("bob", 5), ("dan", 8), ("fay", 12)]


@pytest.mark.parametrize(
    ("name", "content", "message_part"),
    [
        ("a.csv", b"", "names of the columns"),
        ("a.csv", b"1772352020,u1,3\n", "names of the columns.* such as 'user,item,time,click'"),
        ("a.tsv", b"1\tU8\t11/11/2019 9:05:58 AM\tN5 N4\tN6-1 N3-0\n",
         r"such as 'impression_id\\tuser_id\\ttime\\thistory\\timpressions'"),
        ("a.csv", b"user\nann\n", "separated"),
        ("a.csv", b"5::7::3::978300760\n", "such as with `sed.*line of names"),
        ("a.csv", b"user,user\n1,2\n", "'user'"),
        ("a.csv", "user,city\nann,M\xfcnchen\n".encode("latin-1"), "UTF-8"),
        ("a.csv", "user,st\xe4dte\nann,1\n".encode("latin-1"), "UTF-8"),
        ("a.csv", b"user,price\rann,1\r", "alone"),
        ("a.csv", b'user,city\nann,Rome\nbob,"Oslo\ncid,Bonn\n', "a.csv:3: expected a quote that ends"),
        ("a.csv", b'user,city\nann,Rome\n"bob,Oslo\ncid,Bonn', "a.csv:3: expected a quote that ends"),
        ("a.csv", b'user,city\nann,"' + b"Rome\n" * (2 << 20), "MiB.*quotes"),
        ("a.csv", "user,price\nann,1\n".encode("utf-16"), "-f UTF-16"),
        ("a.jsonl", b'{"shown_a": [{"id": 1}], "shown_b": [{"id": 1}]}\n', "'shown_b'"),
        ("a.xlsx", b"", "csv"),
        ("absent/a.csv", b"", "no such file"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_table_is_rejected_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, message_part: str
) -> None:
    path = tmp_path / name
    if path.parent == tmp_path:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message_part) as error:
        as_parquet([str(path)], tmp_path, LogLineReader(SCHEMA).refuse)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "rows",
    [
        'bob,"Oslo,5\ncid,"Bonn",6\n',  # as many cells as one row has
        'bob,5,"Oslo\ncid,6,"Bonn"\n',
        'bob,5,"Oslo\ncid,6,Bonn\ndan,7,"Rome"\n',
        'bob,5,"Oslo\r\ncid,6,"Bonn"\r\n',
    ],
)
def test_a_quote_that_only_ends_in_a_later_row_makes_a_bad_row(tmp_path: Path, rows: str) -> None:
    good = 'ann,1,"Bergen\nNorway"\n'
    content = f"user,age,city\n{good * 900}{rows}{good}"
    with pytest.raises(LogError, match=r"a\.csv:1802: expected a quote that ends"):
        read(tmp_path, ("a.csv", content))
    (tmp_path / "out").rmdir()
    found = read(tmp_path, ("a.csv", content), skip_bad=True)
    assert [row["city"] for row in found] == ["Bergen\nNorway"] * 901
    assert found[-1][LINE] == 1802 + rows.count("\n")


@pytest.mark.parametrize("last", ['"Oslo\nfjord"', '"a ""quote"""', 'a "quote', '"Oslo"'])
def test_quotes_and_line_breaks_in_the_last_cell_are_read(tmp_path: Path, last: str) -> None:
    for n, end in enumerate(("", "\n", "\r\n\r\n")):
        (folder := tmp_path / str(n)).mkdir()
        rows = read(folder, ("a.csv", f"user,city\nann,Rome\nbob,{last}{end}"))
        quoted = last.startswith('"')
        expected = last[1:-1].replace('""', '"') if quoted else last
        assert [row["city"] for row in rows] == ["Rome", expected]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_table_without_rows_may_lack_the_line_break(tmp_path: Path, end: str) -> None:
    assert read(tmp_path, ("a.csv", f"user,price{end}")) == []


def test_files_of_several_formats_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="csv and parquet"):
        as_parquet(["a.csv", "b.parquet"], tmp_path, LogLineReader(SCHEMA).refuse)


@pytest.mark.parametrize(
    ("text", "day_first", "expected"),
    [
        ("2024/03/04 10:00", False, "2024-03-04T10:00:00"),
        ("04.03.2024 10:00:05", False, "2024-03-04T10:00:05"),
        ("4.3.24", False, "2024-03-04T00:00:00"),
        ("3/4/2024 10:00:00 AM", False, "2024-03-04T10:00:00"),
        ("3/4/2024 12:05 pm", True, "2024-04-03T12:05:00"),
        ("2024-03-04 10:00:00 UTC", True, "2024-03-04T10:00:00"),
        ("2024-03-04 10:00:00.5 +0200", False, "2024-03-04T08:00:00.500"),
        ("13/13/2024", True, ""),
        ("soon", False, ""),
    ],
)
def test_common_formats_of_times_in_tables_are_read(text: str, day_first: bool, expected: str) -> None:
    if expected:
        assert parse_table_time_ms(text, day_first) == parse_time_ms(expected)
    else:
        with pytest.raises(ValueError, match="expected a time"):
            parse_table_time_ms(text, day_first)
