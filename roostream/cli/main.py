"""The `roostream` command: the entry to the local stack, to every program and to all tools.

A user's mistake ends in one sentence and exit code 2. A command is imported when it is used, so that a shard
does not load torch.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click import shell_completion

from infra.program_specs import PROGRAM_SPECS, SIMULATE, ProgramSpec, find_spec
from roostream.cli.options import CommandGroup, NonEmptyPath, home_option, refuse_given
from roostream.errors import RoostreamError, SetupError, UnavailableError, describe_os_error, with_advice
from roostream.runtime.program import check_log_level, leave
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

_LAZY = {
    "audit": "audit_command:audit",
    "check": "replay.replay_command:check",
    "check-model": "model_command:check_model",
    "checkpoint": "checkpoint.checkpoint_command:checkpoint",
    "demo": "demo:demo",
    "down": "stack_commands:down",
    "drain": "controller_commands:drain",
    "import": "data.import_command:import_group",
    "init": "init.init_command:init",
    "keys": "keys_command:keys",
    "logs": "logs_command:logs",
    "next-item": "next_item_command:next_item",
    "placement": "plan.placement_command:placement",
    "plan": "plan.plan_command:plan_command",
    "replay": "replay.replay_command:replay",
    "report": "data.feature_command:report",
    "reset": "stack_commands:reset",
    "scale": "controller_commands:scale",
    "status": "status:status",
    "topics": "topics_command:topics",
    "trace": "trace_command:trace_command",
    "train": "train.train_command:train",
    "trainer": "controller_commands:trainer",
    "up": "stack_commands:up",
    "versions": "versions_command:versions",
}


class SectionedGroup(CommandGroup):
    """The group of all commands. Its help shows them under the titles of SECTIONS."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list for each section."""
        width = max(len(name) for lines in SECTIONS.values() for name in lines)
        for title, lines in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", line) for name, line in lines.items()])


@click.group(cls=SectionedGroup, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"]})
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
    check_log_level(os.environ.get("ROOSTREAM_LOG", ""))


def _add_program(kind: ProgramSpec) -> None:
    def print_keys(context: click.Context, option: click.Parameter, given: bool) -> None:
        if given:
            from roostream.cli.reference_pages import keys

            click.echo(keys(kind.settings_class(), f"ROOSTREAM_{kind.name}".upper()))
            context.exit()

    @cli.command(
        kind.name, help=f"{kind.help}\n\n\b\nExample:\n  roostream {kind.name} --config {kind.name}.toml"
    )
    @click.option(
        "--config",
        "file",
        type=NonEmptyPath(path_type=Path),
        required=True,
        help="TOML with the program's settings; an unknown key is an error",
    )
    @click.option(
        "--show-config",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=print_keys,
        help="print every key of the TOML and exit",
    )
    def command(file: Path) -> None:
        config = load(kind.settings_class(), file, program=kind.name)
        leave(kind.run_until_signal(config))


for _kind in PROGRAM_SPECS:
    if _kind.name != SIMULATE:  # `simulate` is declared below, with flags
        _add_program(_kind)


@cli.command()
@home_option
@click.option(
    "--config",
    "file",
    type=NonEmptyPath(path_type=Path),
    help="TOML with these settings; options replace its values",
)
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
    sys.exit(find_spec(SIMULATE).run_until_signal(config))


@cli.group(cls=CommandGroup)
def schema() -> None:
    """Look at a schema file (docs/schema.md).

    \b
    Example:
      roostream schema show my_site.toml
    """


@schema.command("show")
@click.argument("file", type=NonEmptyPath(path_type=Path))
def schema_show(file: Path) -> None:
    """Print the schema with its name patterns expanded and its defaults left out, or what is wrong with it.

    \b
    Example:
      roostream schema show my_site.toml
    """
    from roostream.schema.registry import to_toml
    from roostream.schema.schema_file import load_schema

    loaded = load_schema(file, needs_features=True)
    click.echo(
        f"# {file}, fingerprint {loaded.fingerprint:016x}\n{to_toml(loaded, defaults=False)}", nl=False
    )


@cli.group(
    cls=CommandGroup,
    lazy={
        "batch": "inspect_batch:batch_command",
        "dedupe": "data.dedupe_command:dedupe",
        "feature": "data.feature_command:feature",
        "file": "data.warehouse_command:inspect_file",
        "session": "data.session_command:inspect_session",
        "skew": "skew.score_comparison:skew_command",
        "table": "data.warehouse_command:inspect_table",
    },
)
def inspect() -> None:
    """Look at saved batches, at data, and at differences between served scores and training.

    \b
    Example:
      roostream inspect batch .roostream/worker/batches/1700000000000-42.batch
      roostream inspect dedupe --schema my_site.toml monday.jsonl
      roostream inspect feature warehouse/ history
      roostream inspect skew --lists 500
    """


@cli.command()
@click.argument("name")
@click.option(
    "--json",
    "json_file",
    type=NonEmptyPath(path_type=Path),
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
    if name in ("list", "report"):
        refuse_given(("json_file", "runs", "against"), "the name of a benchmark")
    sys.exit(run(name, json_file, runs, against))


@cli.command()
def prepare() -> None:
    """Prepare a machine once: download the jars, build the Flink operator, compile the kernels. `make setup`
    includes this.

    \b
    Example:
      roostream prepare
    """
    sys.exit(importlib.import_module("infra.prepare").main())


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


def main() -> None:
    """Run the command of `sys.argv`.

    If standard output cannot be written, for example on a full disk, the command ends with a message and
    exit code 2. If it is a pipe whose reader has ended, the command ends without one, with exit code 1.
    """
    if sys.stdin is None:  # and the next file that is opened would be read as standard input
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:  # and the next file that is opened would get what libraries print
        click.echo("error: standard output is closed; send it to a file or to /dev/null", err=True)
        sys.exit(2)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if (out := sys.__stdout__) is not None and sys.stdout is out:
        raw = _StandardOutput(out.fileno(), "w", closefd=False)
        is_direct = out.line_buffering or out.write_through
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), out.encoding, line_buffering=is_direct)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # paths are any bytes, and a terminal may know ASCII only
            stream.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except OSError:
        click.echo("error: the current folder does not exist any more; change to another one", err=True)
        sys.exit(2)
    try:
        try:
            cli.main(prog_name="roostream")
        finally:
            _flush_stdout()
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        text = _sentence(error)
        if not text:
            raise
        click.echo(f"error: {text}", err=True)
        sys.exit(2)


class _StandardOutput(io.FileIO):
    """Standard output, whose errors name it. It may be full while a file that is written is not."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


def _flush_stdout() -> None:
    """Write what is left of the output. What cannot be written is discarded; Python would try it again.

    Raises:
        OSError: standard output is full or a broken pipe.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _sentence(error: Exception) -> str:
    """The message for an error that the user or the machine caused. "" for any other error: that is a defect
    of Roostream, and the user gets its traceback."""
    if isinstance(error, RoostreamError):
        return with_advice(error, "" if "; " in str(error) else _advice(error, sys.argv[1:]))
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        got = sys.getfilesystemencoding()
        return f"expected a locale with UTF-8, got {got}; set LC_ALL=C.UTF-8, and unset PYTHONUTF8"
    if isinstance(error, UnicodeEncodeError):
        odd = [word for word in sys.argv if any("\udc80" <= c <= "\udcff" for c in word)]
        return f"expected arguments in UTF-8, got {odd[0]!r}; rename the file" if odd else ""
    if isinstance(error, RuntimeError) and "cannot cache function" in str(error):  # numba's words
        return (
            "this account can write neither the folder of the installed package nor ~/.cache, so no kernel "
            "can be compiled; set NUMBA_CACHE_DIR to a folder that it can write"
        )
    return ""


def _advice(error: RoostreamError, arguments: Sequence[str]) -> str:
    """What to do after an error that does not say it."""
    if isinstance(error, UnavailableError):
        return "check that it runs, and its address"
    command: click.Command | None = cli
    words = ["roostream"]
    for word in arguments:
        if not isinstance(command, click.Group):
            break
        if (command := command.get_command(click.Context(command), word)) is None:
            break
        words.append(word)
    if any(words[1:] == [spec.name] for spec in PROGRAM_SPECS if spec.name != SIMULATE):
        return f"`{' '.join(words)} --show-config` lists the settings"
    return f"`{' '.join(words)} --help` describes the command"


if __name__ == "__main__":
    main()
