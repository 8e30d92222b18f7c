"""`roostream up` in the background: how it waits for programs, and the absolute locations that it passes to
them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.home import Home
from roostream.cli import stack_commands
from roostream.cli.stack_commands import (
    absolute_location,
    build_options,
    check_feature_logs,
    describe_endpoints,
    last_schema,
    restarting_programs,
    settled_programs,
    with_absolute_files,
)
from roostream.errors import ConfigError, SetupError
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog


def test_programs_are_settled_when_ready_or_stopped_by_a_hold() -> None:
    states = {"controller": "ready", "worker": "held", "shard-0": "starting", "shard-1": "failed"}
    assert set(settled_programs({name: {"state": state} for name, state in states.items()})) == {
        "controller",
        "worker",
    }


@pytest.mark.parametrize(("state", "code"), [("ready", 0), ("held", 1)])
def test_up_does_not_succeed_while_training_is_held(
    state: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"pid": 1, "log": "l", "metrics": None, "restarts": 0, "said": ""}
    programs = {"controller": {**entry, "state": "ready"}, "worker": {**entry, "state": state}}
    at = dict.fromkeys(("kafka", "serving", "flink", "home", "schema"), "")
    Home(tmp_path).write_stack({**at, "supervisor_pid": 7, "programs": programs})
    supervisor = SimpleNamespace(pid=7, returncode=None, poll=lambda: None)
    monkeypatch.setattr(stack_commands.subprocess, "Popen", lambda *_, **__: supervisor)
    assert stack_commands.start(tmp_path, ["up"], 5.0) == code
    assert ("worker does not run" in capsys.readouterr().err) == bool(code)


def test_a_restarting_program_is_shown_with_its_last_error_and_its_log() -> None:
    entry = {"log": "/h/logs/a.log", "said": "store s3://b is away"}
    programs = {name: {**entry, "state": name} for name in ("waiting", "starting", "ready", "failed")}
    programs["other"] = {**entry, "state": "starting", "said": ""}
    lines = restarting_programs(programs)
    assert [line.split()[0] for line in lines] == ["waiting", "starting"]
    assert all("store s3://b is away" in line and "/h/logs/a.log" in line for line in lines)


def test_the_addresses_of_a_stack_are_shown_with_that_of_kafka_which_other_commands_need() -> None:
    stack = {
        "kafka": "127.0.0.1:9",
        "serving": "http://s",
        "flink": "http://f",
        "home": "/h",
        "schema": "/s.toml",
    }
    lines = describe_endpoints(
        {**stack, "programs": {"controller": {"metrics": "http://c/metrics", "pid": 1}}}
    )
    shown = dict(line.split(maxsplit=1) for line in lines if len(line.split()) == 2)
    assert shown["Kafka"] == "127.0.0.1:9" and shown["page"] == "http://c/"


@pytest.mark.parametrize(
    ("text", "location"), [("s3://b/p", "s3://b/p"), ("/a/b", "/a/b"), ("./b", "/here/b")]
)
def test_a_relative_path_is_made_absolute_for_the_programs(
    text: str, location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_location(text) == location.replace("/here", str(tmp_path))


def test_a_file_of_a_setting_is_found_from_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.toml").touch()
    settings = {"model": "model.toml", "items": "absent.jsonl", "keys_file": "${KEYS}", "batch_requests": 8}
    assert with_absolute_files(settings) == {**settings, "model": str(tmp_path / "model.toml")}


def test_the_next_up_without_a_schema_takes_that_of_the_last_one(tmp_path: Path) -> None:
    home, schema = Home(tmp_path / "home"), tmp_path / "shop.toml"
    assert last_schema(home) is None
    home.make()
    home.write_stack({"schema": str(schema)})
    with pytest.raises(ConfigError, match=r"shop.toml: expected the schema of the last `up`.* give --schema"):
        last_schema(home)
    schema.touch()
    assert last_schema(home) == schema
    home.stack_json.write_text("")  # a power failure can leave an empty file
    with pytest.raises(ConfigError, match=r"stack\.json.* give --schema"):
        last_schema(home)


def test_a_stack_with_fewer_serving_processes_leaves_no_events_behind(tmp_path: Path) -> None:
    """Nobody would read the feature log of a number that does not exist any more."""
    left = FeatureLog.open(tmp_path / "serving-2" / "log")
    left.append(LogRecord("impressions", 0, 1, b"", b"heartbeat"))
    left.close()
    check_feature_logs(tmp_path, 1)
    left = FeatureLog.open(tmp_path / "serving-2" / "log")
    left.append(LogRecord("impressions", -1, 1, b"userkey!", b"value"))
    left.append(LogRecord("engagements", -1, 2, b"userkey!", b"value"))
    check_feature_logs(tmp_path, 1)  # a process that was started by hand has it open and sends it
    left.close()
    with pytest.raises(SetupError, match=r"2 events.*--serving 3"):
        check_feature_logs(tmp_path, 2)
    check_feature_logs(tmp_path, 3)
    left = FeatureLog.open(tmp_path / "serving-2" / "log")
    assert left.backlog_records == 3, "the check changes nothing"
    left.acknowledge(left.end)
    left.close()
    check_feature_logs(tmp_path, 1)


@pytest.mark.parametrize(
    ("override", "is_used"),
    [
        ("worker-3.index=3", True),  # `roostream scale` may start it
        ("worker-4.index=4", False),  # four partitions
        ("worker-03.index=3", False),
        ("shard-1.seed=1", True),
        ("shard-2.seed=1", False),
        ("serving-1.seed=1", False),
        ("reader-0.listen='127.0.0.1:0'", False),
    ],
)
def test_a_setting_of_a_program_that_the_stack_cannot_have_is_refused(override: str, is_used: bool) -> None:
    with contextlib.nullcontext() if is_used else pytest.raises(ConfigError, match="--set: expected"):
        build_options(ports=(), sets=(override,), schema=None)
