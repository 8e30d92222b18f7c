"""The table of programs: every program accepts the settings file that the stack writes for it, and programs
stop in order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from infra.child import Program, StopRank
from infra.home import Home
from infra.options import ROOT, StackOptions, demo, to_toml_value
from infra.ports import Endpoints, Ports, draw_endpoints
from infra.program_specs import (
    PROGRAM_SPECS,
    SPECS_BY_NAME,
    ProgramSpec,
    build_instance,
    build_program,
    check_stack_environment,
    find_spec,
    program_names,
    settings_table,
)
from infra.supervisor import Supervisor
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.flink_rest import JOB_NAME, FlinkRest
from roostream.runtime.program import REFUSED_CODE
from roostream.schema.settings import load

FULL = StackOptions(num_archivers=2, num_readers=2, num_updaters=2, serving_processes=3, num_task_managers=2)


@pytest.fixture
def ports() -> Iterator[Ports]:
    reserved = Ports()
    yield reserved
    reserved.release()


@pytest.fixture
def endpoints(ports: Ports) -> Endpoints:
    return draw_endpoints(ports, FULL, program_names(FULL))


def table(name: str, home: Path, options: StackOptions, endpoints: Endpoints) -> dict[str, Any]:
    return settings_table(build_instance(name, Home(home), options, endpoints))


def load_settings(name: str, home: Path, options: StackOptions, endpoints: Endpoints) -> object:
    path = home / f"{name}.toml"
    path.write_text(tomli_w.dumps(to_toml_value(table(name, home, options, endpoints))), encoding="utf-8")
    return load(find_spec(name).settings_class(), path, environ={})


@pytest.mark.parametrize("spec", PROGRAM_SPECS, ids=lambda spec: spec.name)
def test_settings_and_entry_point_of_a_program_exist(spec: ProgramSpec) -> None:
    assert dataclasses.is_dataclass(spec.settings_class())
    assert callable(spec.entry_point())


@pytest.mark.parametrize("options", [FULL, demo(prefix="a.", seed=7)], ids=["full", "demo"])
def test_a_program_accepts_the_file_that_the_stack_writes(
    options: StackOptions, tmp_path: Path, endpoints: Endpoints
) -> None:
    for name in program_names(options):
        assert load_settings(name, tmp_path, options, endpoints)


@pytest.mark.parametrize(
    ("options", "spec", "names"),
    [
        (StackOptions(num_shards=2), "shard", ["shard-0", "shard-1"]),
        (StackOptions(num_workers=2), "worker", ["worker", "worker-1"]),
        (StackOptions(num_updaters=2), "features", ["features", "features-1"]),
        (StackOptions(), "reader", []),
    ],
)
def test_instances_are_numbered(options: StackOptions, spec: str, names: list[str]) -> None:
    assert [n for n in program_names(options) if find_spec(n) is SPECS_BY_NAME[spec]] == names


@pytest.mark.parametrize("name", ["shrd-0", "worker-0", "kafka", "-1", ""])
def test_an_unknown_program_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no program"):
        find_spec(name)


def test_a_program_stops_before_those_that_it_needs() -> None:
    rank = {spec.name: spec.stop_rank for spec in PROGRAM_SPECS}
    order = ["simulate", "serving", "joiner", "worker", "controller", "shard"]
    assert [rank[name] for name in order] == sorted({rank[name] for name in order})
    assert max(rank.values()) < StopRank.REDIS < StopRank.FLINK < StopRank.KAFKA


def test_programs_have_each_others_addresses(tmp_path: Path, endpoints: Endpoints) -> None:
    names = ("shard-1", "worker", "controller", "serving", "reader-1")
    shard, worker, controller, serving, reader = (table(n, tmp_path, FULL, endpoints) for n in names)
    assert worker["shards"] == serving["shards"] and worker["shards"][1] == shard["listen"]
    assert shard["controller"] == worker["controller"] == reader["controller"] == controller["listen"]
    assert shard["store"] == worker["store"] == controller["store"] == serving["store"]
    window_ms = table("serving", tmp_path, demo(), endpoints)["join_window_ms"]
    assert window_ms == demo().overrides["joiner"]["window_ms"] and serving["join_window_ms"] == 600_000
    assert worker["readers"] == {"by": "programs"} and controller["readers"] == {
        "min_readers": 2,
        "max_readers": 2,
    }


def test_serving_loads_the_code_of_the_worker_s_model(tmp_path: Path, endpoints: Endpoints) -> None:
    """A manifest names a custom model but does not import its code."""
    options = StackOptions(overrides={"worker": {"model": "/shop/model.toml"}})
    assert table("serving", tmp_path, options, endpoints)["model"] == "/shop/model.toml"
    other = StackOptions(overrides={**options.overrides, "serving": {"model": "/other.toml"}})
    assert table("serving", tmp_path, other, endpoints)["model"] == "/other.toml"
    assert "model" not in table("serving", tmp_path, StackOptions(), endpoints)


def test_serving_processes_share_a_port_and_have_separate_homes(tmp_path: Path, endpoints: Endpoints) -> None:
    names = SPECS_BY_NAME["serving"].instance_names(FULL)
    tables = [table(name, tmp_path, FULL, endpoints) for name in names]
    assert len({t["metrics_port"] for t in tables}) == len({t["home"] for t in tables}) == 3
    assert {(t["listen"], t["reuse_port"]) for t in tables} == {
        (endpoints.serving.removeprefix("http://"), True)
    }
    assert "reuse_port" not in table("serving", tmp_path, StackOptions(), endpoints)


def test_overrides_apply_to_a_spec_or_one_instance(tmp_path: Path, endpoints: Endpoints) -> None:
    overrides: dict[str, Any] = {"shard": {"publish_interval_ms": 50}, "shard-1": {"max_publish_norm": 5.0}}
    tables = [table(f"shard-{i}", tmp_path, StackOptions(overrides=overrides), endpoints) for i in (0, 1)]
    assert [t["publish_interval_ms"] for t in tables] == [50, 50]
    assert [t.get("max_publish_norm") for t in tables] == [None, 5.0]


@pytest.mark.parametrize(
    ("name", "override", "expected"),
    [
        ("worker", {"batch_request": 3}, "batch_requests"),
        ("serving", {"tls_certificate": "c", "tls_key": "k"}, "tls_certificate"),
    ],
)
def test_a_wrong_override_is_refused(
    name: str, override: dict[str, Any], expected: str, tmp_path: Path, endpoints: Endpoints
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_settings(name, tmp_path, StackOptions(overrides={name: override}), endpoints)


@pytest.mark.parametrize(
    ("variable", "refused"),
    [
        ("ROOSTREAM_SHARD_INDEX", True),
        ("ROOSTREAM_SHARD_METRICS_PORT", True),
        ("ROOSTREAM_SHARD_BOOTSTRAP", True),
        ("ROOSTREAM_SHARD_PUBLISH_INTERVAL_MS", False),
        ("ROOSTREAM_WORKER_INDEX", False),
    ],
)
def test_an_environment_variable_may_not_override_a_value_that_the_stack_chooses(
    variable: str, refused: bool, tmp_path: Path, endpoints: Endpoints
) -> None:
    shard = build_instance("shard-1", Home(tmp_path), FULL, endpoints)
    raises = pytest.raises(ConfigError, match=variable) if refused else contextlib.nullcontext()
    with raises:
        check_stack_environment(shard, {variable: "1"})


def test_external_services_are_used(tmp_path: Path, ports: Ports) -> None:
    options = StackOptions(kafka="broker:9092", redis="cache:6379")
    endpoints = draw_endpoints(ports, options, program_names(options))
    assert table("worker", tmp_path, options, endpoints)["bootstrap"] == "broker:9092"
    assert table("features", tmp_path, options, endpoints)["redis"] == "redis://cache:6379/0"


def program(name: str, home: Path, endpoints: Endpoints, **overrides: dict[str, object]) -> Program:
    options = dataclasses.replace(FULL, overrides=overrides)
    return build_program(
        build_instance(name, Home(home), options, endpoints), {**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_a_program_that_refuses_its_file_stays_down_with_its_error(
    tmp_path: Path, endpoints: Endpoints
) -> None:
    Home(tmp_path).make()
    with Supervisor() as supervisor:
        supervisor.start([program("controller", tmp_path, endpoints, controller={"num_workers": -1})])
        slot = supervisor.slots["controller"]
        assert supervisor.wait(lambda: slot.state == "failed", 60.0), slot
    assert slot.exit_code == REFUSED_CODE and slot.num_restarts == 0
    assert "num_workers" in slot.last_error


@pytest.mark.parametrize(
    ("warehouse", "after"),
    [("warehouse", ("archiver", "archiver-1")), ("other", ()), ("s3://b/warehouse", ())],
)
def test_a_controller_waits_for_the_archive_of_its_own_stack(
    warehouse: str, after: tuple[str, ...], tmp_path: Path, endpoints: Endpoints
) -> None:
    path = warehouse if "://" in warehouse else str(tmp_path / warehouse)
    assert program("controller", tmp_path, endpoints, controller={"warehouse": path}).after == after
    assert program("worker", tmp_path, endpoints, controller={"warehouse": path}).after == ()


@pytest.mark.parametrize(
    ("jobs", "kept"),
    [
        (None, ["job0", "job1", "job2", "job3"]),
        ([], ["job1", "job2"]),
        ([{"jid": "a" * 32, "name": JOB_NAME, "state": "RUNNING"}], ["job0", "job1", "job2", "job3"]),
    ],
    ids=["no answer", "no job", "a running job"],
)
def test_checkpoints_are_deleted_only_when_the_job_manager_says_that_no_job_runs(
    jobs: list[dict[str, str]] | None,
    kept: list[str],
    tmp_path: Path,
    endpoints: Endpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The running job is job3, whose first checkpoint is not complete yet."""

    def answer(rest: FlinkRest, path: str) -> dict[str, Any]:
        if jobs is None:
            raise UnavailableError("no answer within 5 s")
        return {"jobs": jobs}

    monkeypatch.setattr(FlinkRest, "get", answer)
    home = Home(tmp_path)
    home.make()
    checkpoints = tmp_path / "flink" / "checkpoints"
    for number in range(4):
        (checkpoints / f"job{number}" / "chk-1").mkdir(parents=True)
    for number in range(3):
        complete = checkpoints / f"job{number}" / "chk-1" / "_metadata"
        complete.write_text("x")
        os.utime(complete, (number, number))
    program("joiner", tmp_path, endpoints).prepare()
    assert sorted(job.name for job in checkpoints.iterdir()) == kept
    written = tomllib.loads((home.conf / "joiner.toml").read_text())
    assert written["restore"] == str(tmp_path / "flink"), (
        "a job that runs now may be gone when the joiner asks, and have written a newer checkpoint"
    )


def test_a_stack_that_lost_its_checkpoints_leaves_the_check_to_the_joiner(
    tmp_path: Path, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlinkRest, "get", lambda rest, path: {"jobs": []})
    home = Home(tmp_path)
    home.make()
    program("joiner", tmp_path, endpoints).prepare()
    assert tomllib.loads((home.conf / "joiner.toml").read_text())["restore"] == str(home.root / "flink")
