"""Every module in the table of datasets has options and an `open` function. A dataset can be added by a
module and a row of that table."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from roostream.errors import ConfigError
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import (
    DATASETS,
    Clicks,
    Dataset,
    DatasetOptions,
    EventLog,
    Skipped,
    load_dataset,
)
from roostream.replay.events import Event, Request
from roostream.replay.input_files import check_files, open_file
from roostream.replay.replay_log import open_log
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.schema.settings import setting
from roostream.wire import records as wire

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "nro": [{"name": "clicks", "online": "clicks_24h"}],
        "label": [{"name": "click", "action": "click"}],
    }
)


@pytest.mark.parametrize("name", DATASETS)
def test_every_row_names_a_module_with_options_and_open(name: str) -> None:
    module = load_dataset(name)
    assert issubclass(module.Options, DatasetOptions) and callable(module.open)
    fields = [f for f in dataclasses.fields(module.Options)]
    assert fields and all(f.metadata["help"] for f in fields), "every flag must have a help text"
    replay = {f.name for f in dataclasses.fields(ReplayConfig)}
    assert not replay & {f.name for f in fields}, "no flag may belong to both the replay and the dataset"


def test_an_unknown_dataset_is_reported_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="expected one of ebnerd, yambda, jsonl, parquet, csv, got 'ebnrd'"):
        load_dataset("ebnrd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DatasetOptions):
    num_lists: int = setting(help="how many")


def lists(options: Options, schema: Schema, window_ms: int) -> EventLog:
    def events() -> Iterator[Event]:
        for n in range(options.num_lists):
            yield Request(f"r{n}", 5, 0, T0 + n, np.array([1, 2], dtype=np.int64))

    before = Clicks(*(np.array([value], dtype=np.int64) for value in (5, 1, T0 - 1)))
    return EventLog(events=events(), num_requests=options.num_lists, unlogged_clicks=before)


def test_another_dataset_is_a_module_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("another")
    module.__dict__.update({"Options": Options, "open": lists})
    monkeypatch.setitem(sys.modules, "another", module)
    monkeypatch.setitem(DATASETS, "another", Dataset("another", "Lists.", "--num-lists 3"))
    config = ReplayConfig(dataset="another", options=Options(num_lists=3), schema=__file__)
    log = open_log(config, SCHEMA)
    impressions = [r for r in log.records if wire.kind_of(r.value) == wire.IMPRESSION]
    assert len(impressions) == log.num_requests == 3 and log.skipped() == Skipped()


def test_missing_files_are_reported_when_settings_are_checked(tmp_path: Path) -> None:
    existing_file = tmp_path / "there"
    existing_file.write_bytes(b"x")
    check_files("log", (str(existing_file),), needed=True)
    check_files("log", (), needed=False)
    with pytest.raises(ConfigError, match="key 'log': expected at least one file"):
        check_files("log", (), needed=True)
    with pytest.raises(ConfigError, match="nowhere: no such file; check the path"):
        check_files("log", ("nowhere",), needed=True)
    with pytest.raises(ConfigError, match="expected a file, got a folder"):
        open_file(str(tmp_path))
