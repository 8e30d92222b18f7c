"""`roostream replay DATASET` and `roostream check`. Each dataset has a sub-command, with flags from its
settings."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import click

from roostream.cli.data.session_command import replay_session
from roostream.cli.options import MultiValueCommand, settings_flags
from roostream.cli.replay import warehouse_samples as archived
from roostream.replay.config import CheckConfig, ReplayConfig
from roostream.replay.datasets import DATASETS, Dataset, load_dataset

_MS = "_ms"


@click.group()
def replay() -> None:
    """Send a log through the whole loop in event time, and report metrics.

    \b
    Example:
      roostream replay ebnerd --behaviors train/behaviors.parquet --history train/history.parquet --report
      out.json roostream replay jsonl --log events.jsonl --schema my_site.toml --report out.json
    """


class ReplayCommand(MultiValueCommand):
    """Imports the module of its dataset when it is used, because that may need packages of its own."""

    dataset = ""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            options = load_dataset(self.dataset).Options
            self.params = [
                *settings_flags(options),
                *settings_flags(ReplayConfig, skip=("dataset", "options")),
            ]
        return super().get_params(ctx)


def _run(name: str, given: dict[str, Any]) -> None:
    options_class = load_dataset(name).Options
    own = {f.name: given.pop(f.name) for f in dataclasses.fields(options_class)}
    config = ReplayConfig(dataset=name, options=options_class(**own), **given)
    sys.exit(importlib.import_module("roostream.cli.replay.replay_run").run(config))


def _add(name: str, dataset: Dataset) -> None:
    command = ReplayCommand(
        name,
        callback=lambda **given: _run(name, given),
        help=f"{dataset.help}\n\n\b\nExample:\n  roostream replay {name} {dataset.example}",
    )
    command.dataset = name
    replay.add_command(command)


for _name, _dataset in DATASETS.items():
    _add(_name, _dataset)


def _run_archived(given: dict[str, Any]) -> None:
    options = archived.WarehouseOptions(
        **{f.name: given.pop(f.name) for f in dataclasses.fields(archived.WarehouseOptions)}
    )
    config = ReplayConfig(dataset=archived.DATASET, options=options, engine="local", **given)
    sys.exit(importlib.import_module("roostream.cli.replay.replay_run").run(config))


replay.add_command(
    MultiValueCommand(
        archived.DATASET,
        params=[
            *settings_flags(archived.WarehouseOptions),
            *settings_flags(ReplayConfig, skip=archived.UNUSED_SETTINGS),
        ],
        callback=lambda **given: _run_archived(given),
        help=f"{archived.HELP}\n\n\b\nExample:\n  roostream replay {archived.DATASET} {archived.EXAMPLE}",
    )
)

replay.add_command(replay_session)


check = MultiValueCommand(
    "check",
    params=settings_flags(CheckConfig),
    callback=lambda **given: sys.exit(
        importlib.import_module("roostream.cli.replay.check_command").run(CheckConfig(**given))
    ),
    help="""Check a log against a schema, without training. Exit code 1: some lines cannot be used.

    \b
    Example:
      roostream check --schema my_site.toml --log monday.jsonl tuesday.jsonl.gz
      roostream check --schema my_site.toml --impressions shown.parquet --engagements done.parquet --window 1h
    """,
)
