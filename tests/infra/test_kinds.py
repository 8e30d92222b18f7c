"""The table of programs: every row can be started, and is ended in the written order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from infra import kinds
from infra.child import StopRank
from infra.home import Home
from infra.kinds import KINDS, kind_of
from infra.options import StackOptions
from infra.places import Places, draw
from infra.ports import Ports
from infra.programs import plain, settings, site_of
from roostream.errors import ConfigError
from roostream.schema.settings import from_dict


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_names_settings_and_a_body_that_exist(kind: kinds.Kind) -> None:
    assert dataclasses.is_dataclass(kind.settings())
    assert callable(kind.body())


def test_programs_that_are_many_are_numbered() -> None:
    options = StackOptions(num_shards=3)
    assert [n for n in kinds.names(options) if kind_of(n).name == "shard"] == [
        "shard-0",
        "shard-1",
        "shard-2",
    ]
    assert [n for n in kinds.names(StackOptions(num_workers=3)) if kind_of(n).name == "worker"] == [
        "worker",
        "worker-1",
        "worker-2",
    ]
    assert kind_of("shard-12") is kind_of("shard-0") is kinds.BY_NAME["shard"]


@pytest.mark.parametrize("name", ["shrd-0", "worker-0", "kafka", "-1", ""])
def test_an_unknown_program_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no program"):
        kind_of(name)


def test_what_others_need_ends_after_them() -> None:
    rank = {kind.name: kind.stop_rank for kind in KINDS}
    assert (
        rank["simulate"]
        < rank["serving"]
        < rank["joiner"]
        < rank["worker"]
        < rank["controller"]
        < rank["shard"]
    )
    assert max(rank.values()) < StopRank.REDIS < StopRank.FLINK < StopRank.KAFKA


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_a_program_needs_is_in_the_stack(kind: kinds.Kind) -> None:
    options = StackOptions(num_task_managers=2, serving_processes=2)
    known = {"kafka", "redis", "flink-jm", "flink-tm-0", "flink-tm-1", *kinds.names(options)}
    assert set(kind.needs(options)) <= known


def placed(options: StackOptions, names: list[str]) -> Places:
    ports = Ports()
    places = draw(ports, options, names)
    ports.release()
    return places


def test_several_serving_processes_share_a_port_and_have_their_own_homes(tmp_path: Path) -> None:
    options = StackOptions(serving_processes=3)
    names = [n for n in kinds.names(options) if n.startswith("serving")]
    assert names == ["serving", "serving-1", "serving-2"]
    places = placed(options, names)
    tables = [settings(site_of(n, Home(tmp_path), options, places)) for n in names]
    assert len({t["metrics_port"] for t in tables}) == 3 and len({t["home"] for t in tables}) == 3
    assert {t["listen"] for t in tables} == {f"127.0.0.1:{places.serving}"}
    assert all(t["reuse_port"] for t in tables)
    for name, table in zip(names, tables, strict=True):
        from_dict(kind_of(name).settings(), plain(table))


def test_one_serving_process_has_its_own_port_and_rows(tmp_path: Path) -> None:
    assert [n for n in kinds.names(StackOptions()) if n.startswith("serving")] == ["serving"]
    table = settings(site_of("serving", Home(tmp_path), StackOptions(), placed(StackOptions(), ["serving"])))
    assert "reuse_port" not in table


def test_a_local_stack_asks_by_http_and_says_so(tmp_path: Path) -> None:
    options = StackOptions(overrides={"serving": {"tls_certificate": "c", "tls_key": "k"}})
    with pytest.raises(ConfigError, match="serving: expected no tls_certificate in a local stack"):
        settings(site_of("serving", Home(tmp_path), options, placed(options, ["serving"])))


def test_readers_read_for_workers_where_there_are_any(tmp_path: Path) -> None:
    options = StackOptions(num_readers=2, overrides={"worker": {"readers": {"max_units": 9}}})
    places = placed(options, ["worker", "controller", "reader-0", "reader-1"])
    tables = {
        n: settings(site_of(n, Home(tmp_path), options, places)) for n in ("worker", "controller", "reader-1")
    }
    assert tables["worker"]["readers"] == {"by": "programs", "max_units": 9}
    assert tables["controller"]["readers"] == {"least": 2, "most": 2}
    assert tables["reader-1"]["controller"] == places.endpoints(options).controller
    assert [n for n in kinds.names(StackOptions()) if n.startswith("reader")] == []
    for name, table in tables.items():
        from_dict(kind_of(name).settings(), plain(table))
