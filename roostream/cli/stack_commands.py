"""`roostream demo | up | down | reset | status | audit`: commands of a local stack. Each imports the stack
only when it runs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from infra.options import StackOptions, demo, load_saved_options
from roostream.cli.options import (
    Duration,
    home_option,
    json_option,
    parse_overrides,
    parse_ports,
    wait_option,
    with_options,
)
from roostream.errors import ConfigError

_ALWAYS_GIVEN = ("ports", "sets", "schema")


def _count(flag: str, name: str, default: int, help: str) -> Any:
    return click.option(flag, name, type=int, default=default, show_default=True, help=help)


stack_options = with_options(
    home_option,
    click.option("--schema", type=click.Path(path_type=Path), help="schema TOML; default: that of the demo"),
    _count("--shards", "num_shards", 2, "parameter server shards"),
    _count("--workers", "num_workers", 1, "trainer workers at the start"),
    _count("--serving", "serving_processes", 1, "serving processes, which share one port"),
    _count("--readers", "num_readers", 0, "reader programs, which read a warehouse for the workers"),
    _count("--max-readers", "max_readers", 0, "start up to this many readers while workers wait for data"),
    _count("--feature-updaters", "num_updaters", 1, "feature updaters, which share the partitions"),
    _count("--auditors", "num_auditors", 1, "auditors, which share the partitions"),
    _count("--task-managers", "num_task_managers", 1, "task managers of Flink"),
    click.option(
        "--port", "ports", multiple=True, metavar="NAME=PORT", help="use this port, such as serving=8080"
    ),
    click.option(
        "--java", default="", help="path of a java of version 17 or later; default: the bundled runtime"
    ),
    click.option("--kafka", default="", metavar="HOST:PORT", help="use this broker instead of starting one"),
    click.option("--redis", default="", metavar="HOST:PORT", help="use this Redis instead of starting one"),
    click.option(
        "--set", "sets", multiple=True, metavar="PROGRAM.KEY=VALUE", help="set a key of a program's TOML"
    ),
)


def build_options(
    ports: tuple[str, ...],
    sets: tuple[str, ...],
    schema: Path | None,
    base: StackOptions | None = None,
    **others: Any,
) -> StackOptions:
    """Change `base` (default: the demo's options) by what the command line says.

    Raises:
        ConfigError: an option has another form, or the schema cannot be read.
    """
    from roostream.schema.schema_file import load_schema

    if schema is not None:
        if not schema.is_file():
            raise ConfigError(f"{schema}: no such file; expected a schema TOML")
        load_schema(schema)  # one clear error now, instead of one from each program
        others["schema"] = schema
    base = base or demo()
    merged = {program: dict(table) for program, table in base.overrides.items()}
    for program, table in parse_overrides(sets).items():
        merged.setdefault(program, {}).update(table)
    return dataclasses.replace(base, ports=parse_ports(ports), overrides=merged, **others)


@click.command("demo")
@stack_options
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    envvar="DEMO_SECONDS",
    help="stop after this many seconds; also the environment variable DEMO_SECONDS",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=25.0,
    show_default=True,
    help="simulated requests per second",
)
def demo_command(home: Path, seconds: float | None, rate: float, **options: Any) -> None:
    """Run the whole loop with simulated users and a live table, until Ctrl-C.

    \b
    Example:
      roostream demo
      DEMO_SECONDS=120 roostream demo --home /tmp/demo
    """
    from roostream.cli.demo import run

    sys.exit(run(home, build_options(**options), seconds, rate))


@click.command()
@stack_options
@click.option("--foreground", is_flag=True, help="stay in the foreground and stop all programs on Ctrl-C")
@wait_option("give up when no further program became ready for this many seconds")
@click.option(
    "--from-warehouse", metavar="URL", help="train a new model from this archive first, then from the stream"
)
def up(home: Path, foreground: bool, wait_s: float, from_warehouse: str | None, **options: Any) -> None:
    """Start a stack in the background, without simulated users.

    In the home of a finished replay, the stack starts with the replay's settings.

    \b
    Example:
      roostream up --home .roostream --schema my_site.toml --port serving=8080
      roostream up --from-warehouse .roostream/warehouse
    """
    from roostream.cli import background_stack

    if from_warehouse:
        location = background_stack.absolute_location(from_warehouse)
        options["sets"] = (*options["sets"], f"controller.warehouse={location}")
    base = load_saved_options(home)
    if base is not None:  # options that were not given keep the value that they had
        source = click.get_current_context().get_parameter_source
        options = {
            name: value
            for name, value in options.items()
            if name in _ALWAYS_GIVEN or source(name) is not ParameterSource.DEFAULT
        }
    chosen = build_options(**options, base=base)
    if foreground:
        sys.exit(background_stack.run_foreground(home, chosen))
    sys.exit(background_stack.start(home, sys.argv[1:], wait_s))


@click.command()
@home_option
def down(home: Path) -> None:
    """Stop a stack in a fixed order. `up` continues from the committed state.

    \b
    Example:
      roostream down --home .roostream
    """
    from roostream.cli import background_stack

    sys.exit(background_stack.stop(home))


@click.command()
@home_option
@click.option("--yes", is_flag=True, help="do not ask for confirmation")
def reset(home: Path, yes: bool) -> None:
    """Delete a stopped stack with its data, checkpoints and logs.

    \b
    Example:
      roostream reset --home .roostream --yes
    """
    from roostream.cli import background_stack

    if not yes:
        click.confirm(f"Delete {home.absolute()} with all data, checkpoints and logs?", abort=True)
    sys.exit(background_stack.delete(home))


@click.command()
@home_option
@json_option
def status(home: Path, as_json: bool) -> None:
    """Show what a running stack does: rates, lags, training, freshness, quality, and whether every event is
    accounted for.

    Exit code 1: a program is not ready.

    \b
    Example:
      roostream status
      roostream status --json | python -m json.tool
    """
    from roostream.cli.status import run

    sys.exit(run(home, as_json))


@click.command()
@home_option
@click.option(
    "--kafka", default="", metavar="HOST:PORT", help="a running broker; default: that of the stack in --home"
)
@click.option("--prefix", default="", help="with --kafka: prefix of the topic names")
@click.option(
    "--partitions", type=int, default=4, show_default=True, help="with --kafka: partitions of each topic"
)
@click.option(
    "--window",
    "window_ms",
    type=Duration(),
    default="10m",
    show_default=True,
    help="with --kafka: the join window",
)
@click.option("--replay", is_flag=True, help="with --kafka: the topics were created with --replay")
@json_option
def audit(
    home: Path, kafka: str, prefix: str, partitions: int, window_ms: int, replay: bool, as_json: bool
) -> None:
    """Read all topics once from their oldest record. Exit code 0 if every event is accounted for, else 1.

    If the stack is stopped, its broker is started for the audit and stopped afterwards.

    \b
    Example:
      roostream audit --home .roostream
      roostream audit --kafka kafka:9092 --prefix site. --partitions 16 --window 30m
    """
    from infra.options import settle_ms
    from roostream.cli.audit_command import Topics, run

    topics = Topics(
        kafka=kafka, prefix=prefix, partitions=partitions, settle_ms=settle_ms(window_ms), replay=replay
    )
    sys.exit(run(home, topics if kafka else None, as_json))
