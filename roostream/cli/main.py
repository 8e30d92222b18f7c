"""The `roostream` command: one entry to the stack and to every program.

Whatever a user can get wrong ends in one sentence and exit code 2. Program folders are imported only by their own
sub-command, so that a shard never pays for torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from infra.options import StackOptions, demo, load_saved_options
from infra.program_specs import PROGRAM_SPECS, SIMULATE, ProgramSpec
from roostream.cli.checkpoint.checkpoint_command import checkpoint
from roostream.cli.data.feature_command import report
from roostream.cli.data.import_command import import_group
from roostream.cli.inspect_command import inspect
from roostream.cli.keys_command import keys
from roostream.cli.model_command import check_model
from roostream.cli.next_item_command import next_item
from roostream.cli.operate import home_option, preempt, scale, topics, trace_command, trainer
from roostream.cli.plan.move_command import apply_command, map_command
from roostream.cli.plan.placement_command import placement
from roostream.cli.plan.plan_command import plan_command
from roostream.cli.replay.cli import Duration, check, replay
from roostream.cli.train.train_command import train
from roostream.cli.versions_command import versions
from roostream.errors import ConfigError, RoostreamError, SetupError
from roostream.runtime.program import leave
from roostream.schema.settings import check_environment, load

_ALWAYS = ("ports", "sets", "schema")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="roostream", message="%(prog)s %(version)s")
def cli() -> None:
    """Request-level continuous training of recommenders.

    \b
    Example:
      roostream demo                       the whole loop with simulated users
      roostream up && roostream status     a stack in the background
      roostream worker --config worker.toml
    """
    programs = [spec.name for spec in PROGRAM_SPECS]
    check_environment([*programs, "topics"], ("ROOSTREAM_LOG",), os.environ)


def _keys_option(spec: ProgramSpec) -> Any:
    def tell(context: click.Context, option: click.Parameter, asked: bool) -> None:
        if asked:
            from roostream.cli.reference import keys

            click.echo(keys(spec.settings_class(), f"ROOSTREAM_{spec.name}".upper()))
            context.exit()

    return click.option(
        "--keys",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=tell,
        help="every key of the TOML, and exit",
    )


def _add_program(spec: ProgramSpec) -> None:
    @cli.command(
        spec.name, help=f"{spec.help}\n\n\b\nExample:\n  roostream {spec.name} --config {spec.name}.toml"
    )
    @click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        required=True,
        help="TOML; an unknown key is refused",
    )
    @_keys_option(spec)
    def command(file: Path) -> None:
        config = load(spec.settings_class(), file, program=spec.name)
        leave(spec.entry_point()(config))


for _spec in PROGRAM_SPECS:
    if _spec.name != SIMULATE:  # it has flags of its own
        _add_program(_spec)


def stack_options(command: Any) -> Any:
    """The options that `up` and `demo` share."""
    for option in reversed(
        (
            home_option,
            click.option(
                "--schema", type=click.Path(path_type=Path), help="schema TOML; default: the demo's"
            ),
            click.option(
                "--shards", "num_shards", type=int, default=2, show_default=True, help="shard processes"
            ),
            click.option(
                "--workers",
                "num_workers",
                type=int,
                default=1,
                show_default=True,
                help="trainer workers to begin with",
            ),
            click.option(
                "--serving",
                "serving_processes",
                type=int,
                default=1,
                show_default=True,
                help="processes on serving's port",
            ),
            click.option(
                "--readers",
                "num_readers",
                type=int,
                default=0,
                show_default=True,
                help="that read a warehouse for workers",
            ),
            click.option(
                "--max-readers",
                "max_readers",
                type=int,
                default=0,
                show_default=True,
                help="of those, if workers wait for them",
            ),
            click.option(
                "--task-managers",
                "num_task_managers",
                type=int,
                default=1,
                show_default=True,
                help="of Flink",
            ),
            click.option(
                "--port", "ports", multiple=True, metavar="NAME=PORT", help="fix a port, such as serving=8080"
            ),
            click.option("--java", default="", help="a java of 17 or later instead of the installed runtime"),
            click.option(
                "--kafka", default="", metavar="HOST:PORT", help="a running broker instead of an own one"
            ),
            click.option(
                "--redis", default="", metavar="HOST:PORT", help="a running Redis instead of an own one"
            ),
            click.option(
                "--set", "sets", multiple=True, metavar="PROGRAM.KEY=VALUE", help="a key of a program's TOML"
            ),
        )
    ):
        command = option(command)
    return command


def build_options(
    ports: tuple[str, ...],
    sets: tuple[str, ...],
    schema: Path | None,
    base: StackOptions | None = None,
    **plain: Any,
) -> StackOptions:
    """`base`, or `demo()`, with what the command line changes.

    Raises:
        ConfigError: an option of another form, or a schema that can't be read.
    """
    from roostream.cli.assignments import overrides, port_numbers
    from roostream.schema.schema_file import load_schema

    if schema is not None:
        if not schema.is_file():
            raise ConfigError(f"{schema}: no such file; expected a schema TOML")
        load_schema(schema)  # refused here rather than by each program
        plain["schema"] = schema
    base = base or demo()
    merged = {k: dict(v) for k, v in base.overrides.items()}
    for program, table in overrides(sets).items():
        merged.setdefault(program, {}).update(table)
    return dataclasses.replace(base, ports=port_numbers(ports), overrides=merged, **plain)


@cli.command("demo")
@stack_options
@click.option(
    "--seconds", type=float, envvar="DEMO_SECONDS", help="end by itself after this long; also DEMO_SECONDS"
)
@click.option("--rate", type=float, default=25.0, show_default=True, help="simulated requests a second")
def demo_command(home: Path, seconds: float | None, rate: float, **options: Any) -> None:
    """The whole loop with simulated users and a live table, until Ctrl-C.

    \b
    Example:
      roostream demo
      DEMO_SECONDS=120 roostream demo --home /tmp/demo
    """
    from roostream.cli.demo import run

    sys.exit(run(home, build_options(**options), seconds, rate))


@cli.command()
@stack_options
@click.option("--foreground", is_flag=True, help="stay, and stop everything on Ctrl-C")
@click.option(
    "--wait",
    "wait_s",
    type=float,
    default=120.0,
    show_default=True,
    help="seconds in which no further program becomes ready",
)
@click.option(
    "--from-warehouse",
    metavar="PLACE",
    help="a new model is trained from this archive first, then from the stream",
)
def up(home: Path, foreground: bool, wait_s: float, from_warehouse: str | None, **options: Any) -> None:
    """Start a stack without traffic, in the background. In a home that a replay has kept, with the replay's own settings.

    \b
    Example:
      roostream up --home .roostream --schema my_site.toml --port serving=8080
      roostream up --from-warehouse .roostream/warehouse
    """
    from roostream.cli import control

    if from_warehouse:
        options["sets"] = (*options["sets"], f"controller.warehouse={control.place_of(from_warehouse)}")

    base = load_saved_options(home)
    if base is not None:  # what isn't said is as it was
        said = click.get_current_context().get_parameter_source
        options = {
            name: value
            for name, value in options.items()
            if name in _ALWAYS or said(name) is not ParameterSource.DEFAULT
        }
    chosen = build_options(**options, base=base)
    sys.exit(
        control.serve(home, chosen) if foreground else control.start_detached(home, sys.argv[1:], wait_s)
    )


@cli.command()
@home_option
def down(home: Path) -> None:
    """Stop a stack in the written order; `up` goes on from there.

    \b
    Example:
      roostream down --home .roostream
    """
    from roostream.cli import control

    sys.exit(control.stop_detached(home))


@cli.command()
@home_option
@click.option("--yes", is_flag=True, help="don't ask")
def reset(home: Path, yes: bool) -> None:
    """Delete a stopped stack with all that it learned.

    \b
    Example:
      roostream reset --home .roostream --yes
    """
    from roostream.cli import control

    if not yes:
        click.confirm(f"Delete {home.absolute()} with all data, checkpoints and logs?", abort=True)
    sys.exit(control.wipe(home))


@cli.command()
@home_option
@click.option("--json", "as_json", is_flag=True, help="machine-readable, stable keys")
def status(home: Path, as_json: bool) -> None:
    """What a running stack does: rates, lags, trainer, freshness, quality, and whether every event is accounted for.

    \b
    Example:
      roostream status
      roostream status --json | python -m json.tool
    """
    from roostream.cli.status_command import run

    sys.exit(run(home, as_json))


@cli.command()
@home_option
@click.option(
    "--kafka", default="", metavar="HOST:PORT", help="a running broker; default: that of the stack in --home"
)
@click.option("--prefix", default="", help="with --kafka: of topic names")
@click.option("--partitions", type=int, default=4, show_default=True, help="with --kafka: of each topic")
@click.option(
    "--window",
    "window_ms",
    type=Duration(),
    default="10m",
    show_default=True,
    help="with --kafka: the joiner's window",
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable, stable keys")
def audit(home: Path, kafka: str, prefix: str, partitions: int, window_ms: int, as_json: bool) -> None:
    """Add up all topics from their oldest record, once: exit 0 if every event is accounted for, else 1.

    Of a stack that is stopped, the broker is started for it, alone, and stopped again.

    \b
    Example:
      roostream audit --home .roostream
      roostream audit --kafka kafka:9092 --prefix site. --partitions 16 --window 30m
    """
    from infra.options import settle_ms
    from roostream.cli.audit_command import Topics, run

    topics = Topics(kafka=kafka, prefix=prefix, partitions=partitions, settle_ms=settle_ms(window_ms))
    sys.exit(run(home, topics if kafka else None, as_json))


@cli.command()
@home_option
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML; instead of the options")
@click.option("--serving", help="URL of serving; default: the stack in --home")
@click.option("--rate", type=float, help="requests a second")
@click.option("--seconds", type=float, help="end after this long")
@click.option("--report", help="file for the JSON report")
def simulate(home: Path, file: Path | None, **flags: Any) -> None:
    """Simulated users against a serving program.

    \b
    Example:
      roostream simulate --home .roostream --rate 50 --seconds 60 --report out.json
    """
    from infra.home import Home
    from roostream.replay.config import SimulateConfig

    if file is None and flags["serving"] is None:
        flags["serving"] = Home(home).running_stack()["serving"]
    config = load(SimulateConfig, file, program="simulate", flags=flags)
    sys.exit(importlib.import_module("roostream.replay.main").run_simulate(config))


@cli.group()
def schema() -> None:
    """Look at a schema file (docs/schema.md).

    \b
    Example:
      roostream schema show my_site.toml
    """


@schema.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def schema_show(file: Path) -> None:
    """The schema with its families written out and defaults left out, or the sentence that says what is wrong with it.

    \b
    Example:
      roostream schema show my_site.toml
    """
    from roostream.schema.registry import to_toml
    from roostream.schema.schema_file import load_schema

    loaded = load_schema(file)
    click.echo(
        f"# {file}, fingerprint {loaded.fingerprint:016x}\n{to_toml(loaded, defaults=False)}", nl=False
    )


for _group in (
    replay,
    check,
    topics,
    scale,
    preempt,
    trainer,
    checkpoint,
    inspect,
    import_group,
    report,
    check_model,
    next_item,
    keys,
    versions,
    train,
    placement,
    trace_command,
):
    cli.add_command(_group)
cli.add_command(plan_command)
placement.add_command(map_command)
placement.add_command(apply_command)


@cli.command()
@click.argument("name")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="file for the result; `bench report` makes pages of it",
)
@click.option(
    "--runs", type=int, default=3, show_default=True, help="runs, each in fresh processes; at least 3"
)
@click.option("--against", default="", metavar="COMMIT", help="that commit's state takes turns with this one")
def bench(name: str, json_file: Path | None, runs: int, against: str) -> None:
    """Ask a benchmark's question, with a peer or a limit in the same run. NAME: one of `list`, or all, list, report.

    \b
    Example:
      roostream bench list
      roostream bench codec --json docs/benchmarks/json/codec.json
      roostream bench report
    """
    try:
        run = importlib.import_module("benchmarks.main").main
    except ModuleNotFoundError as error:
        if error.name != "benchmarks":
            raise
        raise SetupError(
            "benchmarks are not part of an installed package; run this from a checkout of the source"
        ) from None
    sys.exit(run(name, json_file, runs, against))


@cli.command()
def prepare() -> None:
    """What an installed package needs once on each machine: the jars, our operator's jar, compiled kernels; `make setup` does it.

    \b
    Example:
      roostream prepare
    """
    sys.exit(importlib.import_module("infra.prepare").main())


@cli.command("options")
@click.option(
    "--write", is_flag=True, help="into docs/options.md of this checkout, rather than to the terminal"
)
def options_command(write: bool) -> None:
    """Every option of every program, file and command, as Markdown.

    \b
    Example:
      roostream options | less
      roostream options --write
    """
    from roostream.cli.reference import PAGE, page

    text = page(cli)
    PAGE.write_text(text, encoding="utf-8") if write else click.echo(text, nl=False)


def main() -> None:
    """The console entry."""
    try:
        cli.main(prog_name="roostream")
    except RoostreamError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
