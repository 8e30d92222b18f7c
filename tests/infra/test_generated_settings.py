"""Every TOML that the stack writes is one that its program reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from infra import kinds, programs
from infra import options as stack_options
from infra.child import GRACE_S
from infra.flink_cluster import Cluster
from infra.home import Home
from infra.options import StackOptions
from infra.places import Places
from roostream.errors import ConfigError
from roostream.runtime.program import STOP_S
from roostream.schema.settings import load
from serving.config import ServingConfig
from trainer import worker_program

PLACES = Places(
    kafka=1001,
    kafka_controller=1002,
    redis=1003,
    flink_rpc=1004,
    flink_rest=1005,
    task_managers=(1006,),
    serving=1007,
    controller=1008,
    shards=(1009, 1010),
    metrics={n: 2000 + i for i, n in enumerate(kinds.names(StackOptions()))},
)


def table(name: str, folder: Path, options: StackOptions) -> dict[str, Any]:
    return programs.settings(programs.site_of(name, Home(folder), options, PLACES))


def loaded(name: str, options: StackOptions, folder: Path) -> object:
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(programs.plain(table(name, folder, options))), encoding="utf-8")
    return load(kinds.kind_of(name).settings(), path, environ={})


@pytest.mark.parametrize(
    "options", [StackOptions(), stack_options.demo(prefix="a.", seed=7)], ids=["plain", "demo"]
)
@pytest.mark.parametrize("name", kinds.names(StackOptions()))
def test_a_program_reads_what_the_stack_writes_for_it(
    name: str, options: StackOptions, tmp_path: Path
) -> None:
    assert loaded(name, options, tmp_path)


def test_programs_find_each_other(tmp_path: Path) -> None:
    shard, worker = (table(n, tmp_path, StackOptions()) for n in ("shard-1", "worker"))
    controller, serving = (table(n, tmp_path, StackOptions()) for n in ("controller", "serving"))
    assert worker["shards"] == serving["shards"]
    assert worker["shards"][1] == shard["listen"]
    assert shard["controller"] == worker["controller"] == controller["listen"]
    assert shard["store"] == worker["store"] == controller["store"] == serving["store"]


def test_overrides_reach_all_of_a_kind_or_one_program(tmp_path: Path) -> None:
    options = StackOptions(
        overrides={"shard": {"publish_interval_ms": 50}, "shard-1": {"max_publish_norm": 5.0}}
    )
    tables = [table(f"shard-{i}", tmp_path, options) for i in (0, 1)]
    assert [t["publish_interval_ms"] for t in tables] == [50, 50]
    assert [t.get("max_publish_norm") for t in tables] == [None, 5.0]


def test_an_override_that_a_program_does_not_know_is_refused_by_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'batch_requests'"):
        loaded("worker", StackOptions(overrides={"worker": {"batch_request": 3}}), tmp_path)


def test_services_of_the_users_own_are_used(tmp_path: Path) -> None:
    options = StackOptions(kafka="broker:9092", redis="cache:6379")
    assert table("worker", tmp_path, options)["bootstrap"] == "broker:9092"
    assert table("features", tmp_path, options)["redis"] == "redis://cache:6379/0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": "Ä"}, "key 'prefix': expected"),
        ({"num_shards": 0}, "key 'num_shards': expected at least 1"),
    ],
)
def test_wrong_options_are_told(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StackOptions(**change)  # type: ignore[arg-type]


def test_whoever_stops_a_program_waits_longer_than_it_takes(tmp_path: Path) -> None:
    assert STOP_S < GRACE_S < 30, "Kubernetes kills after 30 s"
    fields = {f.name: f.default for f in dataclasses.fields(ServingConfig)}
    assert fields["stop_ms"] / 1000 <= STOP_S and worker_program.STOP_S <= STOP_S
    ours = [f"{GRACE_S:g}"] * len(kinds.names(StackOptions()))
    sites = [
        programs.site_of(name, Home(tmp_path), StackOptions(), PLACES) for name in kinds.names(StackOptions())
    ]
    assert [f"{programs.program(site, {}).stop_timeout_s:g}" for site in sites] == ours
    others = [
        p.stop_timeout_s for p in Cluster(Home(tmp_path), StackOptions(), tmp_path, 1, 2).programs({}, [3])
    ]
    assert max(others) <= GRACE_S
