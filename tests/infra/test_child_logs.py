from __future__ import annotations

from pathlib import Path

import pytest

from infra import child_logs


def test_rotation_does_not_disturb_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        assert child_logs.rotate(path, max_bytes=50)
        writer.write(b"after")
    assert path.read_bytes() == b"after"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100


def test_last_lines_are_bounded_and_valid_text(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert child_logs.last_lines(path) == []
    path.write_bytes(b"\n".join(b"line %d \xff" % i for i in range(10_000)))
    assert child_logs.last_lines(path, 2) == ["line 9998 \ufffd", "line 9999 \ufffd"]


def test_last_lines_can_start_at_the_start_of_a_child(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"of the child before\n")
    since = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"mine\n")
    assert child_logs.last_lines(path, since=since) == ["mine"]
    child_logs.rotate(path, max_bytes=0)
    path.write_bytes(b"new\n")
    assert child_logs.last_lines(path, since=since) == ["new"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [
                "10:00:00 I roostream.controller controller on a:1",
                "10:00:01 E roostream controller: no table",
            ],
            "no table",
        ),
        (
            ["10:00:01 E roostream worker 0: expected a: got b", "10:00:02 I roostream member left"],
            "expected a: got b",
        ),
        (["10:00:01 E roostream.worker restore: x", "10:00:02 E roostream worker 0: y", "  note"], "y"),
        (["error: shard.toml:3: unknown key 'indx' = 1"], "shard.toml:3: unknown key 'indx' = 1"),
        (
            ['{"level": "INFO", "message": "m"}', '{"level": "ERROR", "message": "serving: no port"}'],
            "no port",
        ),
        (
            ['{"level": "ERROR", "message": "x failed", "error": "Traceback …\\nValueError: oops"}'],
            "ValueError: oops",
        ),
        (
            [
                "10:00:01 E roostream x failed: this is a defect of Roostream, not of your settings",
                "Traceback",
                "ValueError: oops",
            ],
            "ValueError: oops",
        ),
        (["redis: Fatal error, can't open config file", ""], "redis: Fatal error, can't open config file"),
        (["{not json"], "{not json"),
        (['["a list"]', "[1]"], "[1]"),
        ([], ""),
    ],
)
def test_last_error_is_found_in_text_and_json_lines(lines: list[str], expected: str) -> None:
    assert child_logs.last_error(lines) == expected
