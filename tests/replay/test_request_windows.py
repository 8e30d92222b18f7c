"""`request_windows` reads the requests of a log without their candidates, one window at a time.
`detect_replay` finds the format of a log from its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError
from roostream.replay.config import CheckConfig, ReplayConfig
from roostream.replay.detect_dataset import detect_replay
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.jsonl_log import JsonlLog
from roostream.replay.log_lines import LogLineReader
from roostream.replay.replay_log import records
from roostream.replay.request_windows import RequestWindow, request_windows
from roostream.schema.ids import hash64, signed
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.records import Record

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "hour"}, {"name": "seen", "kind": "ids", "table": "item"}],
        "nro": [{"name": "item", "kind": "ids", "table": "item"}],
        "label": [{"name": "click", "action": "click"}],
    }
)


def line(number: int, user: int, session: int, shown: int, **changes: Any) -> dict[str, Any]:
    candidates = {"item_id": list(range(1, shown + 1)), "item": list(range(1, shown + 1))}
    fields = {
        "request_id": f"r{number}",
        "user_id": user,
        "session_id": session,
        "time": T0 + number,
        "candidates": candidates,
    }
    return {"type": "impression", **fields, "ro": {"hour": float(number), "seen": [number, 9]}, **changes}


def log_of(folder: Path, *lines: dict[str, Any]) -> list[Record]:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return list(
        records(
            JsonlLog([str(path)], LogLineReader(SCHEMA)).open().events, ReplayEncoder(SCHEMA), settle_ms=1000
        )
    )


def windows(folder: Path, *lines: dict[str, Any], **options: Any) -> list[RequestWindow]:
    return list(request_windows(log_of(folder, *lines), SCHEMA, **options))


def test_a_window_has_the_features_and_length_of_its_request(tmp_path: Path) -> None:
    (window,) = windows(tmp_path, line(1, 5, 50, 3), line(2, 6, 60, 1), line(3, 5, 51, 2))
    assert window.batch.ro_float_RF[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert window.batch.ro_lists.values_of("seen").tolist() == [1, 9, 2, 9, 3, 9]
    assert window.group_R.tolist() == [5, 6, 5] and window.candidates_R.tolist() == [3, 1, 2]
    assert window.batch.nro_float_BF.shape[1] == 0 and window.batch.time_ms_R.tolist() == [
        T0 + 1,
        T0 + 2,
        T0 + 3,
    ]


def test_windows_are_bounded_and_in_the_order_of_the_log(tmp_path: Path) -> None:
    found = windows(tmp_path, *(line(n, n, n, 1) for n in range(1, 6)), max_requests=2)
    assert [w.group_R.tolist() for w in found] == [[1, 2], [3, 4], [5]]


def test_visitors_are_sessions_or_users_and_unknown_ones_are_distinct(tmp_path: Path) -> None:
    lines = (line(1, 5, 50, 1), line(2, 5, 51, 1), line(3, 0, 0, 1), line(4, 0, 0, 1), line(5, 0, 50, 1))
    (by_session,) = windows(tmp_path, *lines, by="session")
    assert by_session.group_R.tolist()[:2] == [50, 51] and by_session.group_R[4] == 50
    (by_user,) = windows(tmp_path, *lines)
    assert by_user.group_R.tolist()[:2] == [5, 5] and len(set(by_user.group_R.tolist())) == 4
    # By the id of the request in any process, so that two runs cluster a log alike.
    assert by_user.group_R.tolist()[2:4] == [signed(hash64("r3")), signed(hash64("r4"))]


def test_pages_that_only_add_candidates_are_not_requests(tmp_path: Path) -> None:
    (window,) = windows(tmp_path, line(1, 5, 50, 3), line(2, 5, 50, 2, request_id="r1", ro=None))
    assert window.candidates_R.tolist() == [3]


def _check(paths: dict[str, str], *names: str) -> ReplayConfig:
    impressions = tuple(paths[name] for name in names)
    return CheckConfig(schema=paths["s.toml"], impressions=impressions).replay()


def test_the_format_of_a_log_follows_from_its_path(tmp_path: Path) -> None:
    names = ("a.jsonl", "b.ndjson.gz", "c.csv", "d.parquet", "s.toml", "behaviors.parquet", "history.parquet")
    names += ("A.JSONL", "B.Json.GZ", "C.CSV", "C.TSV.ZST", "D.PARQUET")
    paths = {name: str(tmp_path / name) for name in names}
    for path in paths.values():
        Path(path).write_bytes(b"")
    assert detect_replay([paths["a.jsonl"], paths["b.ndjson.gz"]], paths["s.toml"]).dataset == "jsonl"
    assert detect_replay([paths["c.csv"]], paths["s.toml"]).dataset == "csv"
    assert detect_replay([paths["d.parquet"]], paths["s.toml"]).dataset == "parquet"
    assert detect_replay([paths["A.JSONL"], paths["B.Json.GZ"]], paths["s.toml"]).dataset == "jsonl"
    assert detect_replay([paths["C.CSV"], paths["C.TSV.ZST"]], paths["s.toml"]).dataset == "csv"
    assert detect_replay([paths["D.PARQUET"]], paths["s.toml"]).dataset == "parquet"
    assert _check(paths, "C.CSV", "C.TSV.ZST").dataset == "csv"
    assert _check(paths, "D.PARQUET").dataset == "parquet"
    for path in (str(tmp_path), paths["behaviors.parquet"]):
        replay = detect_replay([path])
        assert replay.dataset == "ebnerd" and vars(replay.options)["history"] == (paths["history.parquet"],)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "expected"),
        (("a.jsonl", "c.csv"), "expected files that all end in .jsonl"),
        (("x.bin",), "expected files that all end in .jsonl"),
        ((".",), "expected a folder with behaviors.parquet"),
    ],
)
def test_a_path_that_is_not_a_log_is_reported(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_replay([str(tmp_path / name) for name in names])
