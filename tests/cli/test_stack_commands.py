"""`roostream up` in the background: how it waits for programs, and the absolute locations that it passes to
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.cli.stack_commands import absolute_location, restarting_programs, settled_programs


def test_programs_are_settled_when_ready_or_stopped_by_a_hold() -> None:
    states = {"controller": "ready", "worker": "held", "shard-0": "starting", "shard-1": "failed"}
    assert set(settled_programs({name: {"state": state} for name, state in states.items()})) == {
        "controller",
        "worker",
    }


def test_a_restarting_program_is_shown_with_its_last_error_and_its_log() -> None:
    entry = {"log": "/h/logs/a.log", "said": "store s3://b is away"}
    programs = {name: {**entry, "state": name} for name in ("waiting", "starting", "ready", "failed")}
    programs["other"] = {**entry, "state": "starting", "said": ""}
    lines = restarting_programs(programs)
    assert [line.split()[0] for line in lines] == ["waiting", "starting"]
    assert all("store s3://b is away" in line and "/h/logs/a.log" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "location"), [("s3://b/p", "s3://b/p"), ("/a/b", "/a/b"), ("./b", "/here/b")]
)
def test_a_relative_path_is_made_absolute_for_the_programs(
    text: str, location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_location(text) == location.replace("/here", str(tmp_path))
