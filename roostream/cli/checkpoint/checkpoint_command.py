"""`roostream checkpoint list | verify | export | import | rollback`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from infra.home import Home
from infra.options import demo
from roostream.cli.options import (
    CommandGroup,
    FiniteRange,
    Location,
    NonEmptyPath,
    home_option,
    json_option,
    with_options,
)
from roostream.cli.output import counted, print_json, print_report, progress_bar
from roostream.errors import CheckpointError, SetupError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore, is_object_store, open_store
from roostream.runtime.store_identity import init_store, open_checkpoint_store, wait_for_store


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """Create a checkpoint store; list, verify, export, import and roll back commits.

    \b
    Example:
      roostream checkpoint list --home .roostream
    """


place_options = with_options(
    home_option,
    click.option(
        "--store",
        type=Location(),
        default=None,
        metavar="URL",
        help="checkpoint store; default: that of the home",
    ),
)


def opened_store(home: Path, store: str | None) -> CheckpointStore:
    """Open the given store, or that of the home.

    Raises:
        SetupError: there is no store in the home.
        UnavailableError: the store cannot be read, or it is empty and was never created.
    """
    place = store or Home(home).root / "store"
    if not store and not Path(place).is_dir():
        raise SetupError(f"there is no store in {home}; give another --home, or a --store")
    opened = open_checkpoint_store(place)
    opened.verify()
    return opened


@checkpoint.command("init")
@click.option(
    "--store", type=Location(), required=True, metavar="URL", help="checkpoint store: a directory, or its URL"
)
@click.option(
    "--identity",
    default="",
    metavar="ID",
    help="only for a store whose identity was lost: the one that its shards name when they refuse it",
)
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(0, 1e9),
    default=0.0,
    help="seconds to wait for a store that does not answer",
)
def init_command(store: str, identity: str, wait_s: float) -> None:
    """Create a checkpoint store, before the first start of a deployment. An existing one stays as it is.

    Programs never create a store on their own, because an empty one may be a volume that is not mounted.
    (`roostream up` creates the store of a new home.)

    \b
    Example:
      roostream checkpoint init --store s3://roostream/checkpoints
    """

    def create() -> str:
        return init_store(store, identity)

    click.echo(f"{store} is store {wait_for_store(create, timeout_s=wait_s) if wait_s else create()}")


def _number(store: CheckpointStore, seq: int | None) -> int:
    """Check `seq`; None = the newest."""
    there = manifests.numbers(store)
    if not there:
        raise CheckpointError("expected a commit in this store, got none; nothing was committed yet")
    if seq is not None and seq not in there:
        raise CheckpointError(
            f"expected one of the commits {there[0]} to {there[-1]} that are kept, got {seq}"
        )
    if seq is not None:
        return seq
    newest = manifests.newest(store)
    return newest.manifest.seq if newest else there[-1]


@checkpoint.command("list")
@place_options
@json_option
def list_command(home: Path, store: str | None, as_json: bool) -> None:
    """List the commits in the store, newest first.

    \b
    Example:
      roostream checkpoint list
    """
    from roostream.cli.checkpoint import checkpoints
    from roostream.cli.status_table import commit_rows

    commits = checkpoints.list_commits(opened_store(home, store))
    print_report(as_json, commits, commit_rows(commits), f"Commits, newest first ({len(commits)})")


@checkpoint.command("verify")
@place_options
@click.option("--seq", type=int, help="number of a commit; default: all")
@json_option
def verify_command(home: Path, store: str | None, seq: int | None, as_json: bool) -> None:
    """Read all parts of a commit. Exit code 1: a part is damaged. Only segments of stopped shards can be
    read.

    \b
    Example:
      roostream down && roostream checkpoint verify
    """
    from roostream.cli.checkpoint import checkpoints

    opened = opened_store(home, store)
    there = manifests.numbers(opened)
    wanted = there if seq is None and there else [_number(opened, seq)]
    place = Home(home).root
    parts = ((n, outcome) for n in reversed(wanted) for outcome in checkpoints.verify(opened, n, place))
    outcomes: dict[int, list[checkpoints.Outcome]] = {n: [] for n in reversed(wanted)}
    for n, outcome in counted(parts, "parts"):
        outcomes[n].append(outcome)
    if as_json:
        print_json({str(n): [outcome._asdict() for outcome in found] for n, found in outcomes.items()})
    else:
        for n, found in outcomes.items():
            click.echo(f"commit {n}")
            for state, part, text in found:
                click.echo(f"  {state:<11} {part}{f': {text}' if text else ''}")
    sys.exit(1 if any(outcome.state == "damaged" for found in outcomes.values() for outcome in found) else 0)


_PATH = NonEmptyPath(path_type=Path)
ids_option = click.option(
    "--ids",
    type=_PATH,
    help="with a TorchRec collection: safetensors file with TABLE → int64 ids, one per row; "
    "default: row numbers",
)


@checkpoint.command("export")
@place_options
@click.option("--seq", type=int, help="number of a commit; default: the newest")
@click.option(
    "--to",
    type=Location(),
    required=True,
    metavar="PLACE",
    help="directory to create, an empty store such as s3://bucket/prefix, or FILE.safetensors for the rows "
    "as a TorchRec collection",
)
@ids_option
@click.option(
    "--make-ids",
    type=_PATH,
    help="number the rows of tables that are not in --ids by ascending id, and write all ids to this file",
)
def export_command(
    home: Path, store: str | None, seq: int | None, to: str, ids: Path | None, make_ids: Path | None
) -> None:
    """Copy a commit into a directory from which another home can start, with its rows as safetensors, or into
    an empty store. The stack may run if the store has copies of its rows, else it must be stopped.

    With --to FILE.safetensors, write the rows as the state_dict of a TorchRec EmbeddingBagCollection instead.

    \b
    Example:
      roostream checkpoint export --seq 12 --to /backup/12
      roostream checkpoint export --store s3://roostream/checkpoints --to s3://backup/12
      roostream checkpoint export --to collection.safetensors
    """
    from roostream.cli.checkpoint import checkpoints

    opened = opened_store(home, store)
    number, place = _number(opened, seq), Home(home).root
    if not to.endswith(".safetensors"):
        _only_of_collections({"--ids": ids, "--make-ids": make_ids}, "--to FILE.safetensors")
        if "://" in to:
            with progress_bar("parts") as update:
                manifest = checkpoints.export_to_store(opened, number, place, open_store(to), update)
            click.echo(f"{to}: commit {manifest.seq} with {manifest.step} steps")
        else:
            with progress_bar("parts") as update:
                written = checkpoints.export(opened, number, place, Path(to), update)
            click.echo(f"{to}: {len(written)} files and directories")
        return
    from roostream.cli.checkpoint.torchrec_collection import collection_of, read_ids, write_tensors

    if make_ids is not None and make_ids.resolve() == Path(to).resolve():
        raise SetupError(f"expected two files for --to and --make-ids, got {to} for both; name another file")
    with progress_bar("collecting rows"):
        made = collection_of(opened, number, place, read_ids(ids), make_ids=make_ids is not None)
        write_tensors({Path(to): made.tensors, **({make_ids: made.ids} if make_ids else {})})
    for name, values in made.tensors.items():
        click.echo(f"{to}: {name} {list(values.shape)}")
    for table, rows in made.left_out.items():
        click.echo(f"{table}: {rows} rows skipped, because {ids} has no row number for their ids")


@checkpoint.command("import")
@place_options
@click.option(
    "--from",
    "source",
    type=Location(),
    metavar="PLACE",
    required=True,
    help="directory or store written by `checkpoint export`, the store of another deployment that has copies "
    "of its rows, or FILE.safetensors of a TorchRec collection",
)
@ids_option
@click.option(
    "--schema", type=_PATH, help="with a collection: schema TOML with its tables; default: that of the demo"
)
@click.option("--model", type=_PATH, help="with a collection: model TOML; default: the default ranker")
@click.option("--shards", type=click.IntRange(1), help="with a collection: number of shards; default: 2")
def import_command(
    home: Path,
    store: str | None,
    source: str,
    ids: Path | None,
    schema: Path | None,
    model: Path | None,
    shards: int | None,
) -> None:
    """Create the first commit of an empty home from an export, on any Kafka: rows, weights and trained ids,
    but no offsets. With a --store in a bucket the rows go there, and shards fetch them when they start.

    Or from the rows of a TorchRec EmbeddingBagCollection, and the dense weights in the file whose names match
    the model; then the rows are in the home, too.

    \b
    Example:
      roostream checkpoint import --from /backup/12 --home /srv/other && roostream up --home /srv/other
      roostream checkpoint import --from dlrm.safetensors --schema shop.toml --model model.toml
    """
    place = Home(home)
    if not store and place.is_locked():
        raise SetupError(
            f"a stack runs in {place.root}; stop it with `roostream down {place.option}`, or use another home"
        )
    opened = open_store(store or place.root / "store")  # created once the import is known to be complete
    if Path(source).is_file() or source.endswith(".safetensors"):
        from roostream.cli.checkpoint.torchrec_collection import (
            import_collection,
            new_deployment,
            read_collection,
            read_ids,
        )

        deployment = new_deployment(schema, model, shards or demo().num_shards)
        with progress_bar("importing rows"):
            result = import_collection(
                read_collection(Path(source), deployment.schema),
                read_ids(ids),
                opened,
                place.root,
                deployment,
                with_copies=store is not None and is_object_store(store),
            )
        click.echo(
            f"{place.root}: commit 1 with {result.num_rows} rows of {result.num_tables} tables and "
            f"{result.dense_taken} of {result.dense_all} dense weights from {source}; training starts at the "
            "oldest available sample"
        )
        return
    from roostream.cli.checkpoint.checkpoints import import_export, import_store

    _only_of_collections(
        {"--ids": ids, "--schema": schema, "--model": model, "--shards": shards}, "--from FILE.safetensors"
    )
    to_home = None if store and is_object_store(store) else place.root
    with progress_bar("parts") as update:
        if "://" in source:
            manifest = import_store(open_checkpoint_store(source), opened, to_home, update)
        else:
            manifest = import_export(Path(source), opened, to_home, update)
    click.echo(
        f"{to_home or store}: commit {manifest.seq} with {manifest.step} steps; training starts at the "
        "oldest available sample"
    )


def _only_of_collections(given: dict[str, object], instead: str) -> None:
    if named := [name for name, value in given.items() if value is not None]:
        raise SetupError(f"{named[0]} is only for {instead}; remove it")


@checkpoint.command("rollback")
@place_options
@click.argument("seq", type=int)
@click.option(
    "--incarnation",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="continue above incarnation N, which a shard names when the store has lost its newest commits",
)
@click.option("--yes", is_flag=True, help="do not ask for confirmation")
def rollback_command(home: Path, store: str | None, seq: int, incarnation: int, yes: bool) -> None:
    """Make commit SEQ of a stopped stack the newest. The next start resumes there and trains later data
    again.

    \b
    Example:
      roostream down && roostream checkpoint rollback 12
    """
    from roostream.cli.checkpoint import checkpoints
    from roostream.cli.status_table import commit_rows

    place = Home(home)
    opened = opened_store(home, store)
    _number(opened, seq)
    with contextlib.nullcontext() if store else place.locked():  # no stack starts meanwhile
        newer = [one for one in checkpoints.list_commits(opened) if one["seq"] > seq]
        if not newer and not incarnation:
            click.echo(f"commit {seq} is already the newest")
            return
        if newer:
            click.echo(
                f"{len(newer)} commits are newer than {seq} and will be discarded (kept in "
                f"{manifests.DISCARDED}/ until new commits follow):"
            )
        else:
            click.echo(f"commits after {seq} that only the shards have will be discarded")
        for name, text in commit_rows(newer):
            click.echo(f"  {name}: {text}")
        if not yes:
            click.confirm("Discard them?", abort=True)
        gone = manifests.discard_after(opened, seq, above=incarnation)
        click.echo(f"commit {seq} is the newest now; {len(gone)} discarded")
