"""A replay of a warehouse gives the same features, batches, weights and metrics as a replay of the log from
which the warehouse was made."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from roostream.cli.data.log_archive import archive_log
from roostream.cli.main import cli
from roostream.cli.replay.replay_run import run
from roostream.cli.replay.warehouse_samples import DATASET, WarehouseOptions
from roostream.errors import ConfigError
from roostream.replay.config import ReplayConfig
from roostream.replay.detect_dataset import input_paths
from roostream.runtime.clock import FakeClock
from roostream.schema.schema_file import load_schema
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.sessions.sample_table import SampleTable, session_records
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import roo_pb2 as pb
from tests.cli.replay.test_local_replay import options_of, replay, write_week_log


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log and the warehouse made from it."""
    folder = tmp_path_factory.mktemp("week")
    write_week_log(folder)
    config = ReplayConfig(
        dataset="ebnerd", options=options_of(folder), schema=str(folder / "schema.toml"), engine="local"
    )
    archive_log(config, input_paths(config), str(folder / "w"))
    return folder


def config_of(folder: Path, days: str = "", stored_order_until: str = "") -> ReplayConfig:
    return ReplayConfig(
        dataset=DATASET,
        options=WarehouseOptions(
            warehouse=str(folder / "w"), days=days, stored_order_until=stored_order_until
        ),
        schema=str(folder / "schema.toml"),
        engine="local",
        report=str(folder / "of_table.json"),
        # The defaults of a replay of an EB-NeRD log.
        set=(
            "worker.rehearsal={batches=200}",
            "model.list_layers=2",
            "model.linear=false",
            "model.scale_rates=false",
        ),
        batch_requests=32,
    )


def replay_warehouse(folder: Path, days: str = "", stored_order_until: str = "") -> dict[str, Any]:
    assert run(config_of(folder, days, stored_order_until)) == 0
    return json.loads((folder / "of_table.json").read_text())


@pytest.fixture(scope="module")
def full_report(folder: Path) -> dict[str, Any]:
    """The report of a replay of the warehouse."""
    return replay_warehouse(folder)


def test_a_replay_of_files_equals_a_replay_of_the_log(
    folder: Path, full_report: dict[str, Any], tmp_path: Path
) -> None:
    sealed = tmp_path / "sealed"
    shutil.copytree(folder, sealed)
    compactor = Compactor(
        Warehouse(sealed / "w"), CompactorConfig(warehouse=str(sealed / "w"), seal_after_ms=0), FakeClock()
    )
    assert sum(compactor.seal(seal) for seal in compactor.due()) > 3
    of_log = replay(folder)
    for report, source in ((full_report, folder), (replay_warehouse(sealed), sealed)):
        for key in ("features_digest", "metrics", "baselines", "positives", "training"):
            assert report[key] == of_log[key], key
        assert report["counts"]["samples"] == report["counts"]["predicted"] == 120 and report["accounted"]
        assert report["warnings"] == [] and report["settings"]["options"]["warehouse"] == str(source / "w")


def test_earlier_days_are_trained_in_file_order_and_later_ones_by_close(
    folder: Path, full_report: dict[str, Any]
) -> None:
    by_close, mixed = full_report, replay_warehouse(folder, stored_order_until="2023-05-19")
    for key in ("features_digest", "positives"):
        assert mixed[key] == by_close[key], key
    assert mixed["counts"]["samples"] == 120 and mixed["metrics"] != by_close["metrics"], "the batches differ"
    table = SampleTable(str(folder / "w"))
    selection = table.newest(SessionSpec(table="", version=0, shuffle_seed=0), {})
    assert selection is not None
    session, files = table.open_session(selection, load_schema(folder / "schema.toml"))
    records = list(session_records(session, files, "2023-05-19"))
    old = [r for r in records if r.timestamp_ms < 1_684_454_400_000]
    new = records[len(old) :]
    assert (
        new == sorted(new, key=lambda r: (r.timestamp_ms, r.partition, r.offset))
        and len({r.value for r in records}) == 120
    )
    users = [pb.Sample.FromString(r.value[2:]).header.user_id for r in old if r.partition == old[0].partition]
    assert old != sorted(old, key=lambda r: r.timestamp_ms) and users == sorted(users)


def test_selected_days_are_replayed_alone(folder: Path, full_report: dict[str, Any]) -> None:
    one = replay_warehouse(folder, "2023-05-19")
    assert 0 < one["counts"]["samples"] < 120 and set(one["metrics"]["by_day"]) <= {
        "2023-05-18",
        "2023-05-19",
    }
    assert one["features_digest"] != full_report["features_digest"]


def test_samples_of_an_earlier_schema_are_replayed(folder: Path) -> None:
    schema = folder / "more.toml"
    schema.write_text((folder / "schema.toml").read_text() + '\n[[nro]]\nname = "bonus"\n')
    assert run(dataclasses.replace(config_of(folder), schema=str(schema))) == 0
    report = json.loads((folder / "of_table.json").read_text())
    counts, baselines = report["counts"], report["baselines"]
    assert counts["predicted"] == counts["samples"] == 120 and counts["dead_letters"] == {}
    assert baselines["item"]["overall"]["requests"] == baselines["linear"]["overall"]["requests"] == 120


def test_days_without_samples_are_reported(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(config_of(folder, "2024-01-01")) == 2
    assert "expected samples of 2024-01-01, got none" in capfd.readouterr().err


def test_a_day_that_is_none_is_rejected_instead_of_changing_the_order() -> None:
    for text in ("2023-5-19", "tomorrow"):
        with pytest.raises(ConfigError, match="expected a day such as 2024-05-01"):
            WarehouseOptions(warehouse="w", stored_order_until=text)


def test_the_command_has_only_options_about_samples() -> None:
    help_text = CliRunner().invoke(cli, ["replay", "warehouse", "--help"]).output
    assert all(flag in help_text for flag in ("--warehouse", "--days", "--batch-requests", "--measure-from"))
    assert not any(flag in help_text for flag in ("--window", "--engine", "--home", "--as-served"))
