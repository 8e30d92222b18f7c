"""Options, parameter types and value parsers that several commands share."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from infra.options import DEFAULT_HOME
from infra.program_specs import find_spec
from roostream.errors import ConfigError, SetupError, nearest
from roostream.schema.settings import Settings, convert_values, load, parse_duration_ms, setting
from roostream.schema.toml_file import SourceLocation, TomlFile, read_toml

PORTS = ("kafka", "redis", "flink", "serving", "controller")
T = TypeVar("T")
_MS = "_ms"
_CENTURY_MS = 36_500 * 24 * 3_600_000

_EMPTY = "expected a path, got an empty text; is a variable of the shell unset?"


class NonEmptyPath(click.Path):
    """A path. An empty text, which an unset variable leaves, does not mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return super().convert(value, param, ctx)


class Location(click.ParamType):
    """A path or a URL as text, not empty."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return str(value)


home_option = click.option(
    "--home",
    type=NonEmptyPath(path_type=Path),
    default=DEFAULT_HOME,
    show_default=True,
    help="directory of the stack: data, logs and generated files",
)
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON with stable keys")
batch_option = click.option(
    "--batch",
    "batch_requests",
    type=click.IntRange(1, 1 << 16),
    default=64,
    show_default=True,
    help="requests in a batch",
)


def wait_option(help: str) -> Any:
    """The option `--wait`: a time limit in seconds."""
    return click.option(
        "--wait", "wait_s", type=FiniteRange(0, 1e9), default=120.0, show_default=True, help=help
    )


def with_options(*options: Any) -> Any:
    """A decorator that adds several click options, listed in `--help` in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def refuse_given(names: Iterable[str], without: str) -> None:
    """Refuse options of the running command that mean nothing here. `names`: of their parameters. `without`:
    the option that they belong to, which was not given.

    Raises:
        ConfigError: one of them was given.
    """
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not ParameterSource.DEFAULT:
            raise ConfigError(f"{option.opts[0]} is only used with {without}; give that too, or remove it")


def read_table(file: str, name: str, settings: type[T]) -> T:
    """The table `name` of a program's TOML; other keys are ignored. Without a file, the defaults. Raises
    ConfigError: the table is not valid."""
    if not file:
        return settings()
    toml, field = read_toml(file), (name, settings, setting(factory=settings, help="table"))
    of_file = dataclasses.make_dataclass("of_file", [field], bases=(Settings,), frozen=True, kw_only=True)
    table = {key: value for key, value in toml.raw.items() if key == name}
    return getattr(load(of_file, TomlFile(table, toml.location)), name)


class FiniteRange(click.FloatRange):
    """A range of numbers. NaN, which is neither below nor above any limit, is outside of it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Duration(click.ParamType):
    """`30m`, `250ms`, or a number of milliseconds; with `min_ms` between that and a hundred years."""

    name = "duration"

    def __init__(self, min_ms: int | None = None) -> None:
        self.min_ms = min_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            time_ms = parse_duration_ms(value)
        except (ConfigError, OverflowError) as error:
            self.fail(str(error), param, ctx)
        if self.min_ms is not None and not self.min_ms <= time_ms <= _CENTURY_MS:
            self.fail(
                f"expected {_format_duration(self.min_ms)} to {_format_duration(_CENTURY_MS)}, got {value!r}",
                param,
                ctx,
            )
        return time_ms


class CommandGroup(click.Group):
    """A group of commands. Those in `lazy` (name → "module:attribute") are imported when they are used."""

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **given: Any) -> None:
        super().__init__(*args, **given)
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy and cmd_name not in self.commands:
            module, _, attribute = self.lazy[cmd_name].partition(":")
            try:
                self.add_command(getattr(importlib.import_module(f"roostream.cli.{module}"), attribute))
            except ModuleNotFoundError as error:
                raise SetupError(
                    f"`{cmd_name}` needs {error.name}; pip install it, or 'roostream[demo]'"
                ) from None
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the whole first sentence of each; click cuts it."""
        rows = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
            except SetupError as error:
                rows.append((name, str(error)))
            else:
                rows.append((name, command.get_short_help_str(1000) if command else ""))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class MultiValueCommand(click.Command):
    """A command that accepts `--log A B C` for `--log A --log B --log C`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat an option that may be given several times before each word that follows it."""
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


def settings_flags(settings: type[Any], skip: tuple[str, ...] = ()) -> list[click.Parameter]:
    """One flag for each setting of a dataclass: `--freeze-at` for `freeze_at`, `--window 30m` for
    `window_ms`."""
    hints = typing.get_type_hints(settings)
    fields = [f for f in dataclasses.fields(settings) if f.name not in skip]
    return [_flag(f.name, hints[f.name], f.default, str(f.metadata.get("help", ""))) for f in fields]


def _flag(name: str, hint: Any, default: Any, help: str) -> click.Option:
    flag = "--" + name.removesuffix(_MS).replace("_", "-")
    required = default is dataclasses.MISSING
    given: dict[str, Any] = {"help": help, "required": required}
    if not required:  # click takes an explicit default, even None, for a value
        given |= {"default": default}
    if typing.get_origin(hint) is tuple:
        given |= {"multiple": True, "metavar": "PROGRAM.KEY=VALUE" if name == "set" else "FILE..."}
    elif typing.get_origin(hint) is typing.Literal:
        given |= {"type": click.Choice(typing.get_args(hint)), "show_default": True}
    elif hint is bool:
        given |= {"is_flag": True}
    elif name.endswith(_MS):
        given |= {"type": Duration(), "show_default": True}
        given |= {} if required else {"default": _format_duration(default)}
    else:
        given |= {"type": hint, "show_default": default != ""}
    return click.Option([flag, name], **given)


def _format_duration(time_ms: int) -> str:
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if time_ms and time_ms % size == 0:
            return f"{time_ms // size}{unit}"
    return f"{time_ms}ms"


def parse_ports(texts: Iterable[str]) -> dict[str, int]:
    """`serving=8080` → {"serving": 8080}. Names are those of PORTS, and `shard-0` and so on.

    Raises:
        ConfigError: not of this form, or an unknown name.
    """
    ports = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in PORTS and not name.startswith("shard-"):
            raise ConfigError(
                f"--port: expected one of {', '.join(PORTS)}, got {name!r}{nearest(name, PORTS)}"
            )
        if not re.fullmatch("[0-9]{1,5}", number) or not 0 < int(number) < 65536:
            raise ConfigError(f"--port: expected NAME=PORT such as serving=8080, got {text!r}")
        ports[name] = int(number)
    return ports


def parse_overrides(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`joiner.window_ms=20000` → {"joiner": {"window_ms": 20000}}. A value that is not TOML is text.

    Each value is read as the program's own TOML: `window = "20s"` becomes `window_ms = 20000`.

    Raises:
        ConfigError: not of this form, an unknown program or key, or a value of another type.
    """
    overrides: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        program, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise ConfigError(
                f"--set: expected PROGRAM.KEY=VALUE such as joiner.window_ms=20000, got {text!r}"
            )
        try:
            place = SourceLocation(prefix=f"{program}.")
            table = convert_values(find_spec(program).settings_class(), {key: toml_value(value)}, place)
        except ConfigError as error:
            raise ConfigError(f"--set: {error}") from None
        overrides.setdefault(program, {}).update(table)
    return overrides


def toml_value(text: str) -> Any:
    """The value that TOML reads, or the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except ValueError:  # no TOML, or a number with too many digits
        return text
