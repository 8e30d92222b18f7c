"""Reading logs of JSON lines: their order, equivalent forms, compression, and errors that name file and
line."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard

from roostream.errors import ConfigError
from roostream.replay.events import Action, Event, Request
from roostream.replay.input_files import check_files
from roostream.replay.jsonl_log import JsonlLog, Options
from roostream.replay.log_lines import LogError, LogLineReader
from roostream.schema.ids import hash64, signed
from roostream.schema.schema_file import schema_from_dict

SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "hour"}],
        "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "price"}],
        "label": [{"name": "click", "action": "click"}],
    }
)
T0 = 1_700_000_000_000
IMPRESSION: dict[str, Any] = {
    "type": "impression",
    "request_id": "r",
    "user_id": 5,
    "time": T0,
    "candidates": [{"item_id": 1}],
}
ENGAGEMENT: dict[str, Any] = {
    "type": "engagement",
    "request_id": "r",
    "user_id": 5,
    "time": T0 + 1000,
    "item_id": 1,
    "action": "click",
}


def write(path: Path, *lines: object) -> str:
    path.write_text(
        "".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return str(path)


def events_of(*paths: str) -> list[Event]:
    return list(JsonlLog(paths, LogLineReader(SCHEMA)).open().events)


def log_of(path: Path, *lines: object) -> list[Event]:
    return events_of(write(path, *lines))


def test_lines_of_all_files_are_replayed_in_time_order(tmp_path: Path) -> None:
    one = write(
        tmp_path / "one", ENGAGEMENT, IMPRESSION | {"time": T0 + 2000, "request_id": "late"}, "", IMPRESSION
    )
    two = write(tmp_path / "two", IMPRESSION | {"time": T0 + 1500, "request_id": "mid"})
    events = events_of(one, two)
    assert [(type(e), e.request_id) for e in events] == [
        (Request, "r"),
        (Action, "r"),
        (Request, "mid"),
        (Request, "late"),
    ]


def test_an_impression_comes_before_an_engagement_of_the_same_time(tmp_path: Path) -> None:
    events = log_of(tmp_path / "log", ENGAGEMENT | {"time": T0}, IMPRESSION)
    assert isinstance(events[0], Request) and isinstance(events[1], Action)


def test_candidates_as_rows_and_as_columns_are_equivalent(tmp_path: Path) -> None:
    rows = [{"item_id": "a", "item": "a", "price": 2.0}, {"item_id": "b", "item": "b"}]
    columns = {"item_id": ["a", "b"], "item": ["a", "b"], "price": [2.0, None]}
    nested = [
        {"item_id": "a", "nro": {"item": "a", "price": 2.0}},
        {"item_id": "b", "item": "b", "nro": None},
    ]
    under = {"item_id": ["a", "b"], "nro": {"item": ["a", "b"], "price": [2.0, None]}}
    forms = [IMPRESSION | {"candidates": form} for form in (rows, columns, nested, under)]
    for request in log_of(tmp_path / "log", *forms):
        assert isinstance(request, Request)
        assert request.items_n.tolist() == [signed(hash64("a")), signed(hash64("b"))]
        assert request.nro == {"item": ["a", "b"], "price": [2.0, None]}


def test_event_ids_are_equal_for_equal_lines_only_unless_the_line_has_an_id(
    tmp_path: Path,
) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"value": 7.0},
        {"session_id": 3},
        {"surface": "home"},
        {"time": T0 + 1001},
    ]
    changes += [{"action": "click/1"}, {"item_id": 11}, {"user_id": 6}, {"request_id": "r/5"}]
    lines = [ENGAGEMENT | change for change in changes]
    ids = [e.event_id for e in log_of(tmp_path / "log", *lines, *lines) if isinstance(e, Action)]
    assert len(ids) == 2 * len(changes) and len(set(ids)) == len(changes)
    (engagement,) = log_of(tmp_path / "log", ENGAGEMENT | {"event_id": "e1"})
    assert isinstance(engagement, Action) and engagement.event_id == hash64("e1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"log:2: .*; correct the line, or use --skip-bad"),
        ({"type": "view", "time": T0}, r"log:2: Invalid value 'view'"),
        (IMPRESSION | {"time": "soon"}, r"log:2: time: expected a time such as"),
        (IMPRESSION | {"candidates": [{"id": 1}]}, r"log:2: candidates\[0\]: expected an item_id, got id"),
        (
            IMPRESSION | {"candidates": [{"item_id": 1.5}]},
            r"log:2: item_id: expected an integer or a string, got 1.5",
        ),
        (IMPRESSION | {"candidates": {"item": [1]}}, r"log:2: candidates: expected an item_id"),
        (IMPRESSION | {"candidates": {"item_id": [1], "price": [1, 2]}}, r"log:2: price: expected 1 values"),
        (
            IMPRESSION | {"candidates": [{"item_id": 1, "prize": 2}]},
            r"log:2: unknown nro feature 'prize'; did you mean 'price'",
        ),
        (IMPRESSION | {"ro": {"our": 2}}, r"log:2: unknown ro feature 'our'; did you mean 'hour'"),
        (IMPRESSION | {"positions": [1, 2, 3]}, r"log:2: positions: expected 1 values"),
        (IMPRESSION | {"request_id": "x" * 65}, r"log:2: request_id: expected 1 to 64 bytes, got 65"),
        (IMPRESSION | {"userid": 3}, r"log:2: .*unknown field `userid`"),
        (IMPRESSION | {"positions": [-1]}, r"log:2: positions: expected"),
        (IMPRESSION | {"propensities": [0]}, r"log:2: propensities: expected"),
        (
            IMPRESSION | {"weight": -1},
            r"log:2: weight: expected a number above 0 and at most 1000000, got -1",
        ),
        (IMPRESSION | {"weight": 1e-60}, r"log:2: weight: expected a number above 0 .* got 1e-60"),
        (IMPRESSION | {"propensities": [1e-60]}, r"log:2: propensities: expected .* got 1e-60"),
        (IMPRESSION | {"surface": "x" * 65}, r"log:2: surface: expected at most 64 bytes, got 65"),
        (IMPRESSION | {"user_id": ""}, r"log:2: user_id: expected an id, got an empty string; leave"),
        (
            IMPRESSION | {"candidates": [{"item_id": 1, "nro": 5}]},
            r"log:2: candidates\[0\].nro: expected features by name",
        ),
        (IMPRESSION | {"candidates": [{"item_id": 1, "price": 1, "nro": {"price": 2}}]}, r"log:2:"),
        (
            IMPRESSION | {"candidates": {"item_id": [1], "price": 2}},
            r"log:2: candidates.price: expected a list",
        ),
        (IMPRESSION | {"ro": {"price": 2}}, r"log:2: unknown ro feature 'price'; it is declared as nro"),
        (
            '{"type": "impression", "time": 1700000000000, "candidates": ' + "[" * 10**5,
            r"log:2: brackets nested too deep",
        ),
        (ENGAGEMENT | {"action": ""}, r"log:2: action: expected 1 to 64 bytes, got 0"),
        (ENGAGEMENT | {"value": 1e39}, r"log:2: value: expected a finite 32-bit float"),
        (IMPRESSION | {"\x1b[31mred": 1}, r"log:2: [ -~]*unknown field `\[31mred`"),
        (
            {k: v for k, v in ENGAGEMENT.items() if k != "item_id"},
            r"log:2: .*missing required field `item_id`",
        ),
    ],
)
def test_an_invalid_line_is_reported_with_its_number_or_skipped_and_counted(
    tmp_path: Path, line: object, message: str
) -> None:
    with pytest.raises(LogError, match=message):
        log_of(tmp_path / "log", IMPRESSION, line)
    skipping_reader = LogLineReader(SCHEMA, skip_bad=True)
    log = JsonlLog([write(tmp_path / "log", IMPRESSION, line, ENGAGEMENT)], skipping_reader).open()
    assert len(list(log.events)) == 2
    skipped = log.skipped()
    assert skipped.number == 1 and "log:2: " in skipped.first[0]


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, IMPRESSION, ENGAGEMENT)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(events_of(str(path))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"type": "impression", "time": NaN}', r"log:1: .*no NaN; write null"),
        (b'{"type": "impression", "time": \xff"1"}', r"log:1: .*invalid character \(byte 31\): '.\"1\"}'"),
        (b'{"type": "impression", "time": "\xe9"}', r"log:1: expected text in UTF-8"),
        (b'[{"type": "impression"}]', r"log:1: expected an object, got a list; .*`jq -c '\.\[\]'"),
        (b'{\n "type": "impression"}', r"log:1: expected a whole object.*`jq -c \."),
    ],
)
def test_a_line_that_is_not_json_is_reported_with_its_text(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(line + b"\n")
    with pytest.raises(LogError, match=message):
        events_of(str(path))


def test_an_absent_log_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl: no such file"):
        events_of(str(tmp_path / "none.jsonl"))


def test_the_number_of_requests_is_known_before_events_are_read(tmp_path: Path) -> None:
    log = JsonlLog(
        [write(tmp_path / "log", ENGAGEMENT, IMPRESSION, IMPRESSION | {"time": T0 + 9})],
        LogLineReader(SCHEMA),
    ).open()
    assert log.num_requests == 2 and len(list(log.events)) == 3


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".GZ", ".Zst"])
def test_a_compressed_log_is_read_and_a_damaged_one_is_reported(tmp_path: Path, suffix: str) -> None:
    plain = Path(write(tmp_path / "log", ENGAGEMENT, IMPRESSION)).read_bytes()
    data = gzip.compress(plain) if suffix.lower() == ".gz" else zstandard.compress(plain)
    compressed = tmp_path / f"log.jsonl{suffix}"
    compressed.write_bytes(data)
    assert [type(e) for e in events_of(str(compressed))] == [Request, Action]
    for damaged in (data[:-9], b"no such thing" * 9):
        compressed.write_bytes(damaged)
        with pytest.raises((ConfigError, LogError), match=r"log.jsonl\.(?i:gz|zst)"):
            events_of(str(compressed))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_compressed_log_without_the_suffix_is_reported(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(pack(json.dumps(IMPRESSION).encode()))
    with pytest.raises(ConfigError, match=r"log.jsonl: .*end in \.(gz|zst)"):
        events_of(str(path))


def test_a_log_may_be_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = json.dumps(ENGAGEMENT) + "\n" + json.dumps(IMPRESSION) + "\n"
    check_files("log", (str(pipe),), needed=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(pipe.write_text, text)
        assert [type(e) for e in events_of(str(pipe))] == [Request, Action]


@pytest.mark.parametrize("name", ["log.tsv", "log.CSV", "log.csv.gz", "log.CSV.GZ", "log.parquet"])
def test_a_table_is_not_read_as_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"expected files of JSON lines.* as --impressions"):
        Options(log=(str(tmp_path / name),))
