"""`roostream checkpoint list | verify | export | import | rollback`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from command.operate import home_option
from infra.home import Home
from roo.errors import CheckpointError, SetupError
from runtime import manifest as manifests
from runtime.checkpoint_store import CheckpointStore, open_store


@click.group()
def checkpoint() -> None:
    """Look at commits, copy one, take one over to another Kafka, go back to one.

    \b
    Example:
      roostream checkpoint list --home .roostream
    """


def place_options(command: Any) -> Any:
    """Where the commits are."""
    for option in reversed(
        (
            home_option,
            click.option("--store", default="", metavar="URL", help="checkpoint store; default: that of the home"),
        )
    ):
        command = option(command)
    return command


def _opened(home: Path, store: str) -> CheckpointStore:
    if store:
        return open_store(store)
    place = home.expanduser().resolve() / "store"
    if not place.is_dir():
        raise SetupError(f"there is no store in {home}; name a home that has one with --home, or a store with --store")
    return open_store(place)


def _number(store: CheckpointStore, seq: int | None) -> int:
    """`seq`, or the newest."""
    there = manifests.numbers(store)
    if not there:
        raise CheckpointError("expected a commit in this store, got none; nothing was committed yet")
    if seq is not None and seq not in there:
        raise CheckpointError(f"expected one of the commits {there[0]} to {there[-1]} that are kept, got {seq}")
    return there[-1] if seq is None else seq


@checkpoint.command("list")
@place_options
@click.option("--json", "as_json", is_flag=True, help="machine-readable, stable keys")
def list_command(home: Path, store: str, as_json: bool) -> None:
    """Every commit that is kept, newest first.

    \b
    Example:
      roostream checkpoint list
    """
    from rich.console import Console

    from command import checkpoints
    from command.status_table import commit_rows, render_rows

    told = checkpoints.found(_opened(home, store))
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        Console().print(render_rows(commit_rows(told), f"Commits, newest first ({len(told)})"))


@checkpoint.command("verify")
@place_options
@click.option("--seq", type=int, help="number of a commit; default: all that are kept")
@click.option("--json", "as_json", is_flag=True, help="machine-readable, stable keys")
def verify_command(home: Path, store: str, seq: int | None, as_json: bool) -> None:
    """Read everything that a commit needs; exit 1 if a part is damaged. Shards are read where they are stopped.

    \b
    Example:
      roostream down && roostream checkpoint verify
    """
    from command import checkpoints

    opened = _opened(home, store)
    _number(opened, seq)
    wanted = manifests.numbers(opened) if seq is None else [seq]
    told = {n: list(checkpoints.verify(opened, n, home.expanduser().resolve())) for n in reversed(wanted)}
    if as_json:
        click.echo(json.dumps({str(n): [outcome._asdict() for outcome in found] for n, found in told.items()}, indent=2))
    else:
        for n, found in told.items():
            click.echo(f"commit {n}")
            for outcome in found:
                click.echo(f"  {outcome.state:<11} {outcome.part}{f': {outcome.text}' if outcome.text else ''}")
    sys.exit(1 if any(outcome.state == "damaged" for found in told.values() for outcome in found) else 0)


@checkpoint.command("export")
@place_options
@click.option("--seq", type=int, help="number of a commit; default: the newest")
@click.option("--to", type=click.Path(path_type=Path), required=True, help="folder to make")
def export_command(home: Path, store: str, seq: int | None, to: Path) -> None:
    """Copy one commit into a folder that a home can begin from, with its rows as safetensors. Of a stack that is stopped.

    \b
    Example:
      roostream checkpoint export --seq 12 --to /backup/12
    """
    from command import checkpoints

    opened = _opened(home, store)
    written = checkpoints.export(opened, _number(opened, seq), home.expanduser().resolve(), to)
    click.echo(f"{to}: {len(written)} files and folders")


@checkpoint.command("import")
@place_options
@click.option("--from", "folder", type=click.Path(path_type=Path), required=True, help="folder that `checkpoint export` made")
def import_command(home: Path, store: str, folder: Path) -> None:
    """Begin an empty home with an exported model, on whatever Kafka it has: rows, weights and trained ids come, offsets don't.

    \b
    Example:
      roostream checkpoint import --from /backup/12 --home /srv/other && roostream up --home /srv/other
    """
    from command.checkpoint_import import bring

    place = Home(home)
    if not store and place.is_locked():
        raise SetupError(f"a stack runs in {place.root}; end it with `roostream down --home {place.root}`, or name another home")
    brought = bring(folder, open_store(store or place.root / "store"), place.root)
    click.echo(f"{place.root}: commit {brought.seq} with {brought.step} steps; training begins at the oldest sample there is")


@checkpoint.command("rollback")
@place_options
@click.argument("seq", type=int)
@click.option("--yes", is_flag=True, help="don't ask")
def rollback_command(home: Path, store: str, seq: int, yes: bool) -> None:
    """Make commit SEQ the newest: the next start goes on from there, and trains again what came after it. Of a stopped stack.

    \b
    Example:
      roostream down && roostream checkpoint rollback 12
    """
    from command import checkpoints
    from command.status_table import commit_rows

    place = Home(home)
    opened = _opened(home, store)
    _number(opened, seq)
    if not store and place.is_locked():
        raise SetupError(f"a stack runs in {place.root}; end it with `roostream down --home {place.root}`, then go back")
    newer = [one for one in checkpoints.found(opened) if one["seq"] > seq]
    if not newer:
        click.echo(f"commit {seq} is the newest; nothing is discarded")
        return
    click.echo(f"these commits come after {seq} and are discarded (kept below {manifests.DISCARDED}/ until others follow):")
    for name, text in commit_rows(newer):
        click.echo(f"  {name}: {text}")
    if not yes:
        click.confirm("Discard them?", abort=True)
    gone = manifests.discard_after(opened, seq)
    click.echo(f"commit {seq} is the newest now; {len(gone)} discarded")
