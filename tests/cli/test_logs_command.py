"""`roostream logs` prints programs' logs and follows them over a rotation."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from infra.child_logs import rotate
from roostream.cli.logs_command import LogTail
from roostream.cli.main import cli


@pytest.fixture
def home(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "trainer.log").write_text("a\nb\nc\n")
    (logs / "shard-0.log").write_text("zero\n")
    (logs / "shard-1.log").write_text("one\n")
    return tmp_path


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["logs", *arguments, "--home", str(home)])


def test_the_last_lines_of_one_program_are_printed_unchanged(home: Path) -> None:
    assert run(home, "trainer", "-n", "2").output == "b\nc\n"
    assert run(home, "trainer", "-n", "0").output == ""


def test_lines_of_several_programs_begin_with_their_name(home: Path) -> None:
    assert run(home, "shard").output == "shard-0 | zero\nshard-1 | one\n"
    assert run(home, "shard-1", "trainer", "-n", "1").output == "shard-1 | one\ntrainer | c\n"


def test_without_a_name_the_logs_are_listed(home: Path) -> None:
    lines = run(home).output.splitlines()
    assert [line.split()[0] for line in lines] == ["shard-0", "shard-1", "trainer"]


def test_an_unknown_program_or_a_home_without_logs_is_reported(home: Path, tmp_path: Path) -> None:
    assert "did you mean 'trainer'" in str(run(home, "trainr").exception)
    assert "has no logs" in str(run(tmp_path / "other", "trainer").exception)


def test_a_log_that_cannot_be_read_does_not_look_empty(home: Path) -> None:
    (home / "logs" / "broken.log").symlink_to("broken.log")
    for arguments in (("broken",), ("trainer", "broken")):
        assert isinstance(run(home, *arguments).exception, OSError)


def test_a_followed_log_gives_complete_lines_only_and_continues_after_a_rotation(home: Path) -> None:
    path = home / "logs" / "trainer.log"
    tail = LogTail(path, "")
    assert list(tail.last(1)) == ["c"]
    with path.open("ab") as file:
        file.write("d\né".encode()[:-1])
    assert list(tail.new_lines()) == ["d"]
    with path.open("ab") as file:
        file.write("é\n".encode()[1:])
    assert list(tail.new_lines()) == ["é"]
    assert rotate(path, 0)
    assert list(tail.new_lines()) == []
    with path.open("ab") as file:
        file.write(b"e\n")
    assert list(tail.new_lines()) == ["e"]
    path.unlink()
    assert list(tail.new_lines()) == []
