"""Sub-commands for who runs a deployment: its topics, how many workers train, and what of it has to go."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from infra.options import DEFAULT_HOME
from roostream.errors import ConfigError
from roostream.schema.settings import load, parse_duration_ms

home_option = click.option(
    "--home",
    type=click.Path(path_type=Path),
    default=DEFAULT_HOME,
    show_default=True,
    help="data, logs and generated files",
)


def controller_options(command: Any) -> Any:
    """The options that say which controller."""
    for option in (
        click.option(
            "--link",
            default="",
            metavar="FILE",
            help="with --controller: a program's TOML, of which [link] is read",
        ),
        click.option(
            "--controller",
            default="",
            metavar="HOST:PORT",
            help="a controller; default: that of the stack in --home",
        ),
    ):
        command = option(command)
    return command


@click.group()
def topics() -> None:
    """A deployment's topics on a Kafka of one's own; a local stack makes its own.

    \b
    Example:
      roostream topics create --bootstrap kafka:9092 --config topics.toml
    """


def topics_options(command: Any) -> Any:
    """The options of `topics create` and `topics check`."""
    for option in reversed(
        (
            click.option("--bootstrap", metavar="HOST:PORT", help="Kafka; several with commas"),
            click.option(
                "--config", "file", type=click.Path(path_type=Path), help="TOML; an unknown key is refused"
            ),
            click.option("--prefix", help="of topic names"),
            click.option("--partitions", type=int, help="of each topic; dead_letters has one"),
            click.option("--replication", type=int, help="copies of each partition"),
        )
    ):
        command = option(command)
    return command


def _topics(what: str, file: Path | None, flags: dict[str, Any], *more: Any) -> None:
    module = importlib.import_module("roostream.cli.topics_command")
    sys.exit(getattr(module, what)(load(module.TopicsConfig, file, program="topics", flags=flags), *more))


@topics.command("create")
@topics_options
def topics_create(file: Path | None, **flags: Any) -> None:
    """Make the topics that are absent; exit 2 if one exists with other settings.

    \b
    Example:
      roostream topics create --bootstrap kafka:9092 --partitions 16 --replication 3
    """
    _topics("create", file, flags)


@topics.command("check")
@topics_options
def topics_check(file: Path | None, **flags: Any) -> None:
    """Exit 2, with one sentence, unless every topic exists as the settings say.

    \b
    Example:
      roostream topics check --bootstrap kafka:9092 --config topics.toml
    """
    _topics("check", file, flags)


@topics.command("keep")
@click.argument("duration", metavar="DURATION")
@topics_options
def topics_keep(duration: str, file: Path | None, **flags: Any) -> None:
    """Have records stay for at least this long, before retention deletes what is still to be trained; never for a shorter time.

    The size that is kept (retention.bytes) stays as it is; so does the topic of rows.

    \b
    Example:
      roostream topics keep 7d --bootstrap kafka:9092
    """
    try:
        retention_ms = parse_duration_ms(duration)
    except ConfigError as error:
        raise ConfigError(f"topics keep: {error}") from None
    _topics("keep", file, flags, retention_ms)


@click.command()
@click.argument("wish", metavar="workers=N")
@home_option
@controller_options
@click.option(
    "--wait",
    "wait_s",
    type=float,
    default=120.0,
    show_default=True,
    help="seconds to wait until that many train",
)
def scale(wish: str, home: Path, controller: str, link: str, wait_s: float) -> None:
    """Train with another number of workers from the next commit on; exit 1 if they don't yet when the wait ends.

    A stack starts those that are missing and ends the others. The number holds until it is changed here or in the settings.

    \b
    Example:
      roostream scale workers=2 --home .roostream
    """
    name, _, number = wish.partition("=")
    if name != "workers" or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"expected workers=N with N from 1 on, got {wish!r}")
    control = importlib.import_module("roostream.cli.control")
    sys.exit(control.scale(control.AskedController(home, controller, link), int(number), wait_s))


@click.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--notice",
    "notice_s",
    type=float,
    default=20.0,
    show_default=True,
    help="seconds until it has to be gone",
)
@home_option
@controller_options
def preempt(name: str, notice_s: float, home: Path, controller: str, link: str) -> None:
    """Have a worker, a shard or the controller go, without losing what is trained; exit 1 if it could not be committed in time.

    All finish and commit, then it ends with exit code 0. Training waits until it is back; a stack starts it again at once.

    \b
    Example:
      roostream preempt shard-0 --notice 20
    """
    control = importlib.import_module("roostream.cli.control")
    sys.exit(control.preempt(control.AskedController(home, controller, link), name, notice_s))


@click.group()
def trainer() -> None:
    """Training as a whole.

    \b
    Example:
      roostream trainer release --home .roostream
    """


@trainer.command()
@home_option
@controller_options
def release(home: Path, controller: str, link: str) -> None:
    """End a hold: what no restart could mend has been mended, workers may train again.

    \b
    Example:
      roostream trainer release --home .roostream
    """
    control = importlib.import_module("roostream.cli.control")
    sys.exit(control.release(control.AskedController(home, controller, link)))


@click.command("trace")
@click.argument("request_id", metavar="REQUEST_ID")
@home_option
@click.option(
    "--traceparent",
    default="",
    metavar="TEXT",
    help="W3C Trace Context that spans stand below; else serving's own",
)
@click.option(
    "--wait",
    "wait_s",
    type=float,
    default=120.0,
    show_default=True,
    help="seconds until it is given up; above the window",
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable, stable keys")
def trace_command(request_id: str, home: Path, traceparent: str, wait_s: float, as_json: bool) -> None:
    """Follow one request through a running stack: logged, joined, trained, its rows published. Begin before it is asked.

    Exit 1 if it isn't through when the wait ends.

    \b
    Example:
      roostream trace my-request-1 --wait 900
    """
    module = importlib.import_module("roostream.cli.tracing.trace_command")
    sys.exit(module.run(home, request_id, traceparent, wait_s, as_json))
