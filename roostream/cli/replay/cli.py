"""`roostream replay DATASET`: a sub-command a row of roostream/replay/datasets.py, its flags from the settings of dataset and replay."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import typing
from typing import Any

import click

from roostream.cli.data.session_command import replay_session
from roostream.cli.replay import archived
from roostream.errors import ConfigError
from roostream.replay.config import CheckConfig, ReplayConfig
from roostream.replay.datasets import DATASETS, Dataset, load_dataset
from roostream.schema.settings import parse_duration_ms

_MS = "_ms"


@click.group()
def replay() -> None:
    """A real log through the whole loop, in event time.

    \b
    Example:
      roostream replay ebnerd --behaviors train/behaviors.parquet --history train/history.parquet --report out.json
      roostream replay jsonl --log events.jsonl --schema my_site.toml --report out.json
    """


class Duration(click.ParamType):
    """`30m`, `250ms` or a number of ms."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_duration_ms(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class ManyWords(click.Command):
    """`--log A B C` may be written for `--log A --log B --log C`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Words behind an option that may be given several times belong to it."""
        many = {o for p in self.get_params(ctx) if isinstance(p, click.Option) and p.multiple for o in p.opts}
        spread: list[str] = []
        current = ""
        for arg in args:
            if arg.startswith("-"):
                current = arg if arg in many else ""
            elif current and spread[-1] != current:
                spread.append(current)
            spread.append(arg)
        return super().parse_args(ctx, spread)


class ReplayCommand(ManyWords):
    """The dataset's module is imported only for its own sub-command, since it may need packages of its own."""

    dataset = ""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            options = load_dataset(self.dataset).Options
            self.params = [*flags_of(options), *flags_of(ReplayConfig, skip=("dataset", "options"))]
        return super().get_params(ctx)


def flags_of(settings: type[Any], skip: tuple[str, ...] = ()) -> list[click.Parameter]:
    """A flag for each setting of a dataclass: `--freeze-at` for `freeze_at`, `--window 30m` for `window_ms`."""
    hints = typing.get_type_hints(settings)
    fields = [f for f in dataclasses.fields(settings) if f.name not in skip]
    return [_flag(f.name, hints[f.name], f.default, str(f.metadata.get("help", ""))) for f in fields]


def _flag(name: str, hint: Any, default: Any, help: str) -> click.Option:
    flag = "--" + name.removesuffix(_MS).replace("_", "-")
    required = default is dataclasses.MISSING
    given: dict[str, Any] = {"help": help, "required": required, "default": None if required else default}
    if typing.get_origin(hint) is tuple:
        given |= {"multiple": True, "metavar": "PROGRAM.KEY=VALUE" if name == "set" else "FILE..."}
    elif typing.get_origin(hint) is typing.Literal:
        given |= {"type": click.Choice(typing.get_args(hint)), "show_default": True}
    elif hint is bool:
        given |= {"is_flag": True}
    elif name.endswith(_MS):
        given |= {"type": Duration(), "show_default": _duration(default)}
    else:
        given |= {"type": hint, "show_default": default != ""}
    return click.Option([flag, name], **given)


def _duration(time_ms: int) -> str:
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if time_ms and time_ms % size == 0:
            return f"{time_ms // size}{unit}"
    return f"{time_ms}ms"


def _run(name: str, given: dict[str, Any]) -> None:
    options_class = load_dataset(name).Options
    own = {f.name: given.pop(f.name) for f in dataclasses.fields(options_class)}
    config = ReplayConfig(dataset=name, options=options_class(**own), **given)
    sys.exit(importlib.import_module("roostream.cli.replay.run").run(config))


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
    sys.exit(importlib.import_module("roostream.cli.replay.run").run(config))


replay.add_command(
    ManyWords(
        archived.DATASET,
        params=[*flags_of(archived.ArchivedOptions), *flags_of(ReplayConfig, skip=archived.NOT_ITS_OWN)],
        callback=lambda **given: _run_archived(given),
        help=f"{archived.HELP}\n\n\b\nExample:\n  roostream replay {archived.DATASET} {archived.EXAMPLE}",
    )
)

replay.add_command(replay_session)


check = ManyWords(
    "check",
    params=flags_of(CheckConfig),
    callback=lambda **given: sys.exit(
        importlib.import_module("roostream.cli.replay.check").run(CheckConfig(**given))
    ),
    help="""Look at a log and its schema together, without training: exit 0 (perhaps with warnings), 1 if lines can't be used.

    \b
    Example:
      roostream check --schema my_site.toml --log monday.jsonl tuesday.jsonl.gz
      roostream check --schema my_site.toml --impressions shown.parquet --engagements done.parquet --window 1h
    """,
)
