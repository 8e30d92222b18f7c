"""`roostream checkpoint list | verify | export | import | rollback`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from infra.home import Home
from infra.options import demo
from roostream.cli.options import home_option, json_option
from roostream.errors import CheckpointError, SetupError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore, open_store


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
            click.option(
                "--store", default="", metavar="URL", help="checkpoint store; default: that of the home"
            ),
        )
    ):
        command = option(command)
    return command


def opened_store(home: Path, store: str) -> CheckpointStore:
    """The store that was named, or the home's. SetupError: there is none."""
    if store:
        return open_store(store)
    place = home.expanduser().resolve() / "store"
    if not place.is_dir():
        raise SetupError(
            f"there is no store in {home}; name a home that has one with --home, or a store with --store"
        )
    return open_store(place)


def _number(store: CheckpointStore, seq: int | None) -> int:
    """`seq`, or the newest."""
    there = manifests.numbers(store)
    if not there:
        raise CheckpointError("expected a commit in this store, got none; nothing was committed yet")
    if seq is not None and seq not in there:
        raise CheckpointError(
            f"expected one of the commits {there[0]} to {there[-1]} that are kept, got {seq}"
        )
    return there[-1] if seq is None else seq


@checkpoint.command("list")
@place_options
@json_option
def list_command(home: Path, store: str, as_json: bool) -> None:
    """Every commit that is kept, newest first.

    \b
    Example:
      roostream checkpoint list
    """
    from rich.console import Console

    from roostream.cli.checkpoint import checkpoints
    from roostream.cli.status_table import commit_rows, render_rows

    told = checkpoints.found(opened_store(home, store))
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        Console().print(render_rows(commit_rows(told), f"Commits, newest first ({len(told)})"))


@checkpoint.command("verify")
@place_options
@click.option("--seq", type=int, help="number of a commit; default: all that are kept")
@json_option
def verify_command(home: Path, store: str, seq: int | None, as_json: bool) -> None:
    """Read everything that a commit needs; exit 1 if a part is damaged. Shards are read where they are stopped.

    \b
    Example:
      roostream down && roostream checkpoint verify
    """
    from roostream.cli.checkpoint import checkpoints

    opened = opened_store(home, store)
    _number(opened, seq)
    wanted = manifests.numbers(opened) if seq is None else [seq]
    told = {n: list(checkpoints.verify(opened, n, home.expanduser().resolve())) for n in reversed(wanted)}
    if as_json:
        click.echo(
            json.dumps(
                {str(n): [outcome._asdict() for outcome in found] for n, found in told.items()}, indent=2
            )
        )
    else:
        for n, found in told.items():
            click.echo(f"commit {n}")
            for outcome in found:
                click.echo(
                    f"  {outcome.state:<11} {outcome.part}{f': {outcome.text}' if outcome.text else ''}"
                )
    sys.exit(1 if any(outcome.state == "damaged" for found in told.values() for outcome in found) else 0)


_PATH = click.Path(path_type=Path)
ids_option = click.option(
    "--ids",
    type=_PATH,
    help="of a TorchRec collection: safetensors file of TABLE → int64 ids, one a row; default: the row numbers",
)


@checkpoint.command("export")
@place_options
@click.option("--seq", type=int, help="number of a commit; default: the newest")
@click.option(
    "--to",
    type=_PATH,
    required=True,
    help="folder to make, or FILE.safetensors: rows alone, as TorchRec keeps them",
)
@ids_option
@click.option(
    "--make-ids",
    type=_PATH,
    help="number the rows of tables that --ids lacks by rising id, and write all ids here",
)
def export_command(
    home: Path, store: str, seq: int | None, to: Path, ids: Path | None, make_ids: Path | None
) -> None:
    """Copy one commit into a folder that a home can begin from, with its rows as safetensors; or write its rows as the state_dict
    of a TorchRec EmbeddingBagCollection. Of a stack that is stopped.

    \b
    Example:
      roostream checkpoint export --seq 12 --to /backup/12
      roostream checkpoint export --to collection.safetensors
    """
    from roostream.cli.checkpoint import checkpoints

    opened = opened_store(home, store)
    number, place = _number(opened, seq), home.expanduser().resolve()
    if to.suffix != ".safetensors":
        _only_of_collections({"--ids": ids, "--make-ids": make_ids}, "--to FILE.safetensors")
        written = checkpoints.export(opened, number, place, to)
        click.echo(f"{to}: {len(written)} files and folders")
        return
    from roostream.cli.checkpoint.torchrec_collection import collection_of, read_ids, write_tensors

    made = collection_of(opened, number, place, read_ids(ids), make_ids=make_ids is not None)
    write_tensors(to, made.tensors)
    if make_ids is not None:
        write_tensors(make_ids, made.ids)
    for name, values in made.tensors.items():
        click.echo(f"{to}: {name} {list(values.shape)}")
    for table, rows in made.left_out.items():
        click.echo(f"{table}: {rows} rows left out, since {ids} hasn't their ids")


@checkpoint.command("import")
@place_options
@click.option(
    "--from",
    "source",
    type=_PATH,
    required=True,
    help="folder that `checkpoint export` made, or a TorchRec collection's FILE.safetensors",
)
@ids_option
@click.option(
    "--schema", type=_PATH, help="of a collection: schema TOML that has its tables; default: the demo's"
)
@click.option("--model", type=_PATH, help="of a collection: model TOML; default: our ranker")
@click.option("--shards", type=click.IntRange(1), help="of a collection: shard processes; default: 2")
def import_command(
    home: Path,
    store: str,
    source: Path,
    ids: Path | None,
    schema: Path | None,
    model: Path | None,
    shards: int | None,
) -> None:
    """Begin an empty home with an exported model, on whatever Kafka it has: rows, weights and trained ids come, offsets don't. Or
    with the rows of a TorchRec EmbeddingBagCollection, and with the weights of the file that the model has too.

    \b
    Example:
      roostream checkpoint import --from /backup/12 --home /srv/other && roostream up --home /srv/other
      roostream checkpoint import --from dlrm.safetensors --schema shop.toml --model model.toml --home /srv/shop
    """
    place = Home(home)
    if not store and place.is_locked():
        raise SetupError(
            f"a stack runs in {place.root}; end it with `roostream down --home {place.root}`, or name another home"
        )
    opened = open_store(store or place.root / "store")
    if source.is_file() or source.suffix == ".safetensors":
        from roostream.cli.checkpoint.torchrec_collection import begin, beginning, read_collection, read_ids

        of = beginning(schema, model, shards or demo().num_shards)
        begun = begin(read_collection(source, of.schema), read_ids(ids), opened, place.root, of)
        click.echo(
            f"{place.root}: commit 1 with {begun.num_rows} rows of {begun.num_tables} tables and {begun.dense_taken} of "
            f"{begun.dense_all} dense weights from {source}; training begins at the oldest sample there is"
        )
        return
    from roostream.cli.checkpoint.checkpoints import bring

    _only_of_collections(
        {"--ids": ids, "--schema": schema, "--model": model, "--shards": shards}, "--from FILE.safetensors"
    )
    brought = bring(source, opened, place.root)
    click.echo(
        f"{place.root}: commit {brought.seq} with {brought.step} steps; training begins at the oldest sample there is"
    )


def _only_of_collections(given: dict[str, object], instead: str) -> None:
    if named := [name for name, value in given.items() if value is not None]:
        raise SetupError(
            f"{named[0]}: expected it with {instead}, got a folder, which has its own; leave it out"
        )


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
    from roostream.cli.checkpoint import checkpoints
    from roostream.cli.status_table import commit_rows

    place = Home(home)
    opened = opened_store(home, store)
    _number(opened, seq)
    if not store and place.is_locked():
        raise SetupError(
            f"a stack runs in {place.root}; end it with `roostream down --home {place.root}`, then go back"
        )
    newer = [one for one in checkpoints.found(opened) if one["seq"] > seq]
    if not newer:
        click.echo(f"commit {seq} is the newest; nothing is discarded")
        return
    click.echo(
        f"these commits come after {seq} and are discarded (kept below {manifests.DISCARDED}/ until others follow):"
    )
    for name, text in commit_rows(newer):
        click.echo(f"  {name}: {text}")
    if not yes:
        click.confirm("Discard them?", abort=True)
    gone = manifests.discard_after(opened, seq)
    click.echo(f"commit {seq} is the newest now; {len(gone)} discarded")
