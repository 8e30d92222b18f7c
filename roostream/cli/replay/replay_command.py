"""`roostream replay DATASET` and `roostream check`. Each dataset has a sub-command, with flags from its
settings."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import click

from roostream.cli.options import CommandGroup, MultiValueCommand, settings_flags
from roostream.cli.replay.warehouse_samples import DATASET, EXAMPLE, HELP, UNUSED_SETTINGS, WarehouseOptions
from roostream.replay.config import CheckConfig, ReplayConfig
from roostream.replay.datasets import DATASETS, Dataset, load_dataset


@click.group(cls=CommandGroup, lazy={"session": "data.session_command:replay_session"})
def replay() -> None:
    """Send a log through the whole loop in event time, and report metrics.

    \b
    Example:
      roostream replay jsonl --log events.jsonl --schema my_site.toml --engine local --report out/
      roostream replay ebnerd --behaviors train/behaviors.parquet --history train/history.parquet
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


def _run(name: str, options_class: type[Any], given: dict[str, Any]) -> None:
    own = {f.name: given.pop(f.name) for f in dataclasses.fields(options_class)}
    config = ReplayConfig(dataset=name, options=options_class(**own), **given)
    sys.exit(importlib.import_module("roostream.cli.replay.replay_run").run(config))


def _help(name: str, text: str, example: str) -> str:
    return f"{text}\n\n\b\nExample:\n  roostream replay {name} {example}"


def _add(name: str, dataset: Dataset) -> None:
    command = ReplayCommand(
        name,
        callback=lambda **given: _run(name, load_dataset(name).Options, given),
        help=_help(name, dataset.help, dataset.example),
    )
    command.dataset = name
    replay.add_command(command)


for _name, _dataset in DATASETS.items():
    _add(_name, _dataset)

replay.add_command(
    MultiValueCommand(
        DATASET,
        params=[*settings_flags(WarehouseOptions), *settings_flags(ReplayConfig, skip=UNUSED_SETTINGS)],
        callback=lambda **given: _run(DATASET, WarehouseOptions, {**given, "engine": "local"}),
        help=_help(DATASET, HELP, EXAMPLE),
    )
)


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
