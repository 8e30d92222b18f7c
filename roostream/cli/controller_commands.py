"""`roostream scale | drain | trainer release`: commands that call the controller of a running
deployment."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import click

from infra.home import Home
from roostream.cli.options import (
    CommandGroup,
    FiniteRange,
    home_option,
    read_table,
    refuse_given,
    wait_option,
    with_options,
)
from roostream.errors import ConfigError, TransportError, printable
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.runtime.rpc.transport import Header

controller_options = with_options(
    home_option,
    click.option(
        "--controller",
        default="",
        metavar="HOST:PORT",
        help="address of a controller; default: that of the stack in --home",
    ),
    click.option(
        "--link",
        default="",
        metavar="FILE",
        help="with --controller: TOML of a program, from which [link] is read",
    ),
)


def call_controller(
    home: Path, address: str, link: str, method: str, header: Header, timeout_s: float
) -> Header:
    """Call the controller at `address`, or that of the stack in `home` if the address is "".

    `link` names a TOML file with a table `[link]`; "" uses no authentication.

    Raises:
        ConfigError: a file does not exist, or `link` was given without an address.
        TransportError: no controller answers. Any error of the method.
    """
    if not address:
        refuse_given(("link",), "--controller")
        address = str(Home(home).running_stack()["controller"])
    transport = SocketTransport(address, credentials=LinkCredentials(read_link_security(link)))
    with contextlib.closing(transport):
        try:
            return transport.call(method, header, timeout_s=timeout_s)[0]
        except TransportError as error:  # it names the method of the protocol, which is not the command
            raise TransportError(f"controller {str(error).removeprefix(method).lstrip()}") from None


def read_link_security(file: str) -> LinkSecurity:
    """As `read_table`."""
    return read_table(file, "link", LinkSecurity)


@click.command()
@click.option("--workers", type=click.IntRange(1), required=True, help="number of workers")
@controller_options
@wait_option("seconds to wait until this many workers train")
def scale(workers: int, home: Path, controller: str, link: str, wait_s: float) -> None:
    """Change the number of workers that train, from the next commit on.

    Exit code 1: the number was not reached within --wait. A local stack starts and stops the worker processes
    itself. The number holds until it is changed here or in the settings.

    \b
    Example:
      roostream scale --workers 2 --home .roostream
    """
    answer = call_controller(
        home, controller, link, "scale", {"workers": workers, "timeout_s": wait_s}, wait_s + 5
    )
    if answer["running"]:
        click.echo(f"training with {workers} workers")
        return
    reason = printable(str(answer["why"]))
    click.echo(
        f"{workers} workers requested, {answer['workers']} are training: {reason}; "
        "the request stays in force",
        err=True,
    )
    sys.exit(1)


@click.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--notice",
    "notice_s",
    type=FiniteRange(0, 1e9),
    default=20.0,
    show_default=True,
    help="seconds until the program must have ended",
)
@controller_options
def drain(name: str, notice_s: float, home: Path, controller: str, link: str) -> None:
    """End a worker, a shard or the controller after a commit, so that no training is lost.

    Exit code 1: the commit did not finish in time. Training waits until the program is back. A local stack
    restarts it at once.

    \b
    Example:
      roostream drain shard-0 --notice 20
    """
    role, index = parse_program_name(name)
    header = {"role": role, "index": index, "notice_s": notice_s}
    answer = call_controller(home, controller, link, "preempt", header, notice_s + 5)
    if answer["committed"]:
        click.echo(
            f"{name} ends; commit {answer['seq']} has all training; training waits until {name} is back"
        )
        return
    click.echo(
        f"{name} ends, but nothing was committed within {notice_s:g} s: {printable(str(answer['why']))}; "
        f"training since commit {answer['seq']} is repeated",
        err=True,
    )
    sys.exit(1)


def parse_program_name(name: str) -> tuple[str, int]:
    """Role and index of a program of the trainer, from its name in a stack or in a Kubernetes set.

    Raises:
        ConfigError: another name, or a program whose end loses no training.
    """
    match = re.fullmatch(r"(controller)|(worker)(?:-(\d{1,9}))?|(shard)-(\d{1,9})", name)
    if match is None:
        raise ConfigError(
            f"expected controller, worker, worker-N or shard-N, got {name!r}. Other programs hold no "
            "training state: end the process, and its stack restarts it"
        )
    controller, worker, number, shard, index = match.groups()
    return controller or worker or shard, int(number or index or 0)


@click.group(cls=CommandGroup)
def trainer() -> None:
    """Control training.

    \b
    Example:
      roostream trainer release --home .roostream
    """


@trainer.command()
@controller_options
def release(home: Path, controller: str, link: str) -> None:
    """End a permanent hold after its cause was repaired, so that workers train again.

    \b
    Example:
      roostream trainer release --home .roostream
    """
    answer = call_controller(home, controller, link, "release", {}, 5.0)
    reason = printable(str(answer["reason"]))
    click.echo(
        f"released; the reason of the hold was: {reason}" if answer["held"] else "training is not held"
    )
