"""The table of programs: every row can be started, and is ended in the written order."""

from __future__ import annotations

import dataclasses

import pytest

from infra import kinds
from infra.child import StopRank
from infra.kinds import KINDS, kind_of
from infra.options import StackOptions
from roo.errors import ConfigError


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_names_settings_and_a_body_that_exist(kind: kinds.Kind) -> None:
    assert dataclasses.is_dataclass(kind.settings())
    assert callable(kind.body())


def test_programs_that_are_many_are_numbered() -> None:
    options = StackOptions(num_shards=3)
    assert [n for n in kinds.names(options) if kind_of(n).name == "shard"] == ["shard-0", "shard-1", "shard-2"]
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
    assert rank["simulate"] < rank["serving"] < rank["joiner"] < rank["worker"] < rank["controller"] < rank["shard"]
    assert max(rank.values()) < StopRank.REDIS < StopRank.FLINK < StopRank.KAFKA


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_a_program_needs_is_in_the_stack(kind: kinds.Kind) -> None:
    options = StackOptions(num_task_managers=2)
    known = {"kafka", "redis", "flink-jm", "flink-tm-0", "flink-tm-1", *kinds.names(options)}
    assert set(kind.needs(options)) <= known
