"""The `roostream` command: the entry to the local stack, to every program and to all tools.

A user's mistake ends in one sentence and exit code 2. Each sub-command imports its own packages only, so that
a shard does not load torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click import shell_completion

from infra.program_specs import PROGRAM_SPECS, SIMULATE, ProgramSpec
from roostream.cli.checkpoint.checkpoint_command import checkpoint
from roostream.cli.controller_commands import drain, scale, trainer
from roostream.cli.data.feature_command import report
from roostream.cli.data.import_command import import_group
from roostream.cli.init.init_command import init
from roostream.cli.inspect_command import inspect
from roostream.cli.keys_command import keys
from roostream.cli.logs_command import logs
from roostream.cli.model_command import check_model
from roostream.cli.next_item_command import next_item
from roostream.cli.options import CommandGroup, home_option
from roostream.cli.plan.placement_command import placement
from roostream.cli.plan.plan_command import plan_command
from roostream.cli.replay.replay_command import check, replay
from roostream.cli.stack_commands import audit, demo_command, down, reset, status, up
from roostream.cli.topics_command import topics
from roostream.cli.trace_command import trace_command
from roostream.cli.train.train_command import train
from roostream.cli.versions_command import versions
from roostream.errors import RoostreamError, SetupError, UnavailableError, with_advice
from roostream.runtime.program import leave
from roostream.schema.settings import check_environment, load

SECTIONS = {
    "Start": {
        "demo": "Run everything with simulated users and a live table.",
        "up": "Start everything in the background.",
        "down": "Stop what `up` started.",
        "status": "Show rates, lags, training, freshness and quality.",
        "logs": "Print the last lines of programs' logs, or follow them.",
        "reset": "Delete a stopped stack with its data and checkpoints.",
    },
    "Data": {
        "init": "Write a schema and a model for a log, or a sample log that runs.",
        "check": "Check a log against a schema, without training.",
        "replay": "Train on a log in event time, and report quality.",
        "import": "Convert data of other systems, or add a log to a warehouse.",
        "simulate": "Send requests of simulated users to serving.",
        "schema": "Look at a schema file.",
        "inspect": "Look at batches, samples, and differences in scores.",
        "report": "Write pages with plots.",
    },
    "Model": {
        "check-model": "Check a custom model before it is trained.",
        "train": "Train from a warehouse, without Kafka.",
        "versions": "List and choose the versions that serving uses.",
        "checkpoint": "List, verify, export, import and roll back commits.",
    },
    "Operate": {
        "scale": "Change the number of workers.",
        "drain": "End a program after a commit, so that nothing is lost.",
        "trainer": "End a hold of training after its cause was repaired.",
        "audit": "Check that every event is accounted for.",
        "trace": "Follow one request from its log to trained rows.",
        "plan": "Compute the sizes that a load needs.",
        "placement": "Plan which shard has which part of which table.",
        "topics": "Create and check the Kafka topics.",
        "keys": "Manage API keys of serving.",
        "completion": "Print a completion script for your shell.",
    },
    "Programs": {spec.name: spec.help for spec in PROGRAM_SPECS if spec.name != SIMULATE},
}
"""The commands that `roostream --help` lists, with a line for each. Other commands are for developers."""


class SectionedGroup(click.Group):
    """Lists its commands by SECTIONS."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list for each section."""
        width = max(len(name) for lines in SECTIONS.values() for name in lines)
        for title, lines in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", line) for name, line in lines.items()])


@click.group(cls=SectionedGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="roostream", message="%(prog)s %(version)s")
def cli() -> None:
    """Request-level continuous training of recommenders.

    \b
    Example:
      roostream demo                       the whole loop with simulated users
      roostream up && roostream status     a stack in the background
      roostream worker --config worker.toml
    """
    programs = [kind.name for kind in PROGRAM_SPECS]
    check_environment([*programs, "topics"], ("ROOSTREAM_LOG",), os.environ)


def _keys_option(kind: ProgramSpec) -> Any:
    def print_keys(context: click.Context, option: click.Parameter, given: bool) -> None:
        if given:
            from roostream.cli.reference_pages import keys

            click.echo(keys(kind.settings_class(), f"ROOSTREAM_{kind.name}".upper()))
            context.exit()

    return click.option(
        "--show-config",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=print_keys,
        help="print every key of the TOML and exit",
    )


def _add_program(kind: ProgramSpec) -> None:
    @cli.command(
        kind.name, help=f"{kind.help}\n\n\b\nExample:\n  roostream {kind.name} --config {kind.name}.toml"
    )
    @click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        required=True,
        help="TOML with the program's settings; an unknown key is an error",
    )
    @_keys_option(kind)
    def command(file: Path) -> None:
        config = load(kind.settings_class(), file, program=kind.name)
        leave(kind.entry_point()(config))


for _kind in PROGRAM_SPECS:
    if _kind.name != SIMULATE:  # `simulate` is declared below, with flags
        _add_program(_kind)


@cli.command()
@home_option
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML to use instead of the options")
@click.option("--serving", help="URL of serving; default: the stack in --home")
@click.option("--rate", type=float, help="requests per second")
@click.option("--seconds", type=float, help="stop after this many seconds")
@click.option("--report", help="file for the JSON report")
def simulate(home: Path, file: Path | None, **flags: Any) -> None:
    """Send requests and engagements of simulated users to serving.

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


@cli.group(cls=CommandGroup)
def schema() -> None:
    """Look at a schema file (docs/schema.md).

    \b
    Example:
      roostream schema show my_site.toml
    """


@schema.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def schema_show(file: Path) -> None:
    """Print the schema with its name patterns expanded and its defaults left out, or what is wrong with it.

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


@cli.command()
@click.argument("name")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="write the result to this file; `make docs` turns those in docs/benchmarks/json into pages",
)
@click.option(
    "--runs", type=int, default=3, show_default=True, help="number of runs, each in new processes; at least 3"
)
@click.option("--against", default="", metavar="COMMIT", help="alternate runs with the code of this commit")
def bench(name: str, json_file: Path | None, runs: int, against: str) -> None:
    """Run a benchmark, with a peer or a limit in the same run. NAME is a benchmark, or all, list or report.

    \b
    Example:
      roostream bench list
      roostream bench decode --json docs/benchmarks/json/decode.json
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
@click.option("--kernels", is_flag=True, help="compile the kernels only, where the join does not run")
def prepare(kernels: bool) -> None:
    """Prepare a machine once: download the jars, build the Flink operator, compile the kernels. `make setup`
    includes this.

    \b
    Example:
      roostream prepare
    """
    sys.exit(importlib.import_module("infra.prepare").main("kernels" if kernels else ""))


@cli.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a script that completes commands and options in a shell.

    \b
    Example:
      source <(roostream completion bash)
      roostream completion fish > ~/.config/fish/completions/roostream.fish
    """
    kind = shell_completion.get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "roostream", "_ROOSTREAM_COMPLETE").source())


for _command in (
    demo_command,
    up,
    down,
    reset,
    status,
    logs,
    audit,
    init,
    replay,
    check,
    topics,
    scale,
    drain,
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
    plan_command,
):
    cli.add_command(_command)


def main() -> None:
    """The console entry point."""
    try:
        cli.main(prog_name="roostream")
    except RoostreamError as error:
        click.echo(f"error: {with_advice(error, _advice(error, sys.argv[1:]))}", err=True)
        sys.exit(2)


def _advice(error: RoostreamError, arguments: Sequence[str]) -> str:
    """What to do after an error that does not say it."""
    if isinstance(error, UnavailableError):
        return "check that it runs, and its address"
    command: click.Command = cli
    words = ["roostream"]
    for word in arguments:
        if not isinstance(command, click.Group) or word not in command.commands:
            break
        command = command.commands[word]
        words.append(word)
    if any(words[1:] == [spec.name] for spec in PROGRAM_SPECS):
        return f"`{' '.join(words)} --show-config` lists the settings"
    return f"`{' '.join(words)} --help` describes the command"


if __name__ == "__main__":
    main()
