"""`roostream replay DATASET`: a sub-command a row of roostream/replay/datasets.py, its flags from the settings of dataset and replay."""

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
    """A real log through the whole loop, in event time.

    \b
    Example:
      roostream replay ebnerd --behaviors train/behaviors.parquet --history train/history.parquet --report out.json
      roostream replay jsonl --log events.jsonl --schema my_site.toml --report out.json
    """


class ReplayCommand(MultiValueCommand):
    """The dataset's module is imported only for its own sub-command, since it may need packages of its own."""

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
    options = archived.ArchivedOptions(
        **{f.name: given.pop(f.name) for f in dataclasses.fields(archived.ArchivedOptions)}
    )
    config = ReplayConfig(dataset=archived.DATASET, options=options, engine="local", **given)
    sys.exit(importlib.import_module("roostream.cli.replay.replay_run").run(config))


replay.add_command(
    MultiValueCommand(
        archived.DATASET,
        params=[
            *settings_flags(archived.ArchivedOptions),
            *settings_flags(ReplayConfig, skip=archived.NOT_ITS_OWN),
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
    help="""Look at a log and its schema together, without training: exit 0 (perhaps with warnings), 1 if lines can't be used.

    \b
    Example:
      roostream check --schema my_site.toml --log monday.jsonl tuesday.jsonl.gz
      roostream check --schema my_site.toml --impressions shown.parquet --engagements done.parquet --window 1h
    """,
)
