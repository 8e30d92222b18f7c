"""`roostream placement`: profiles of tables, placement plans, and moves of buckets between the shards of a
stopped stack."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from infra.home import Home
from infra.options import StackOptions, demo, load_saved_options, save_options
from param_server.key_value_store import RocksDbStore
from param_server.placement.bucket_moves import balanced_map
from param_server.placement.plan import (
    CostModel,
    PlacementPlan,
    PlannedTable,
    TablePiece,
    costs_of,
    exchanged_bytes,
    imbalance,
    loads,
    piece_cost,
    plan,
    round_robin,
    spread,
)
from param_server.placement.profiles import planned_tables, read_profiles
from param_server.placement.sharding_file import sharding_of
from roostream.cli.checkpoint import move_buckets
from roostream.cli.checkpoint.checkpoint_command import opened_store, place_options
from roostream.cli.checkpoint.checkpoints import schema_of
from roostream.cli.checkpoint.move_buckets import CommittedShards, bytes_by_bucket, newest_commit
from roostream.cli.options import (
    CommandGroup,
    FiniteRange,
    Location,
    NonEmptyPath,
    json_option,
    refuse_given,
    with_options,
)
from roostream.cli.output import Row, print_report, print_rows, progress_bar
from roostream.cli.stack_commands import last_schema
from roostream.errors import CheckpointError, ConfigError, SchemaError, SetupError, nearest
from roostream.runtime.bucket_map import BucketMap, moved
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import SystemClock
from roostream.runtime.store_identity import ensure_identity, open_checkpoint_store
from roostream.schema.schema_file import load_schema

_GIB = 1 << 30
_PATH = NonEmptyPath(path_type=Path)
_MAX_OWNERS, _MAX_BATCH, _MAX_DIGITS = 4096, 1 << 30, 15
_NONE = "none: a worker with profile_share above 0 writes profiles at commits of the initial phase"


@click.group(cls=CommandGroup)
def placement() -> None:
    """Plan and change which owner has which part of which table (docs/placement.md).

    \b
    Example:
      roostream placement profile --store .roostream/store --schema my_site.toml
      roostream placement plan --store .roostream/store --schema my_site.toml --owners 8
    """


_source = with_options(
    click.option(
        "--store", type=Location(), required=True, help="checkpoint store: a directory, or s3://BUCKET/PREFIX"
    ),
    click.option("--schema", type=_PATH, required=True, help="schema TOML"),
    click.option(
        "--batch",
        type=click.IntRange(1, _MAX_BATCH),
        default=64,
        show_default=True,
        help="requests in a batch of one requester",
    ),
    click.option(
        "--rows",
        "row_texts",
        multiple=True,
        metavar="TABLE=N",
        help="number of rows of a table, for its memory",
    ),
)
_planned = with_options(
    click.option(
        "--owners",
        type=click.IntRange(1, _MAX_OWNERS),
        required=True,
        help="number of workers or shards that own rows",
    ),
    click.option(
        "--memory",
        "memory_gib",
        type=FiniteRange(0, 1e9),
        default=0.0,
        help="memory of each owner in GiB; 0 = unlimited",
    ),
    click.option(
        "--columns",
        "column_texts",
        multiple=True,
        metavar="TABLE=N",
        help="split a table into this many column shards",
    ),
    click.option("--costs", "costs_file", type=_PATH, help="JSON file with measured constants"),
)


@placement.command("profile")
@_source
@json_option
def profile_command(store: str, schema: Path, batch: int, row_texts: tuple[str, ...], as_json: bool) -> None:
    """Show the profiles that workers with `profile_share` have written, by feature.

    \b
    Example:
      roostream placement profile --store .roostream/store --schema my_site.toml
    """
    found = read_profiles(open_checkpoint_store(store), load_schema(schema))
    report = {name: {**entry.profile.plain(), "time_ms": entry.time_ms} for name, entry in found.items()}
    rows = [(name, _of_profile(entry.profile, batch)) for name, entry in found.items()]
    print_report(as_json, report, rows or [("profiles", _NONE)], "Profiles")


@placement.command("plan")
@_source
@_planned
@click.option("--json", "as_json", is_flag=True, help="print JSON with stable keys, which `diff` reads")
@click.option(
    "--write-torchrec",
    "torchrec",
    type=_PATH,
    help="also write the plan as a TorchRec sharding plan to this new file",
)
@click.option(
    "--module",
    default="",
    metavar="PATH",
    help="with --write-torchrec: path of the collection in the model; default: the model is the collection",
)
@click.option(
    "--collection",
    type=_PATH,
    help="safetensors file of `checkpoint export` with the number of rows of each table",
)
def plan_command(
    as_json: bool, torchrec: Path | None, module: str, collection: Path | None, **given: Any
) -> None:
    """Compute a placement plan, its imbalance and a lower bound.

    With --write-torchrec FILE, tables are split over all owners or not at all, as in TorchRec.
    `trainer.torchrec_plan.sharding_plan` reads FILE.

    \b
    Example:
      roostream placement plan --store .roostream/store --schema my_site.toml --owners 8 --memory 16 --json
      roostream placement plan --store … --schema … --owners 2 --collection rows.safetensors --write-torchrec
      plan.json
    """
    if torchrec is None:
        refuse_given(("module",), "--write-torchrec")
    if collection is not None:
        given["row_texts"] = (*_rows_of(collection, given["schema"]), *given["row_texts"])
    tables, why, found = _plan(**given, whole_or_all=torchrec is not None)
    if torchrec is not None:
        _write_torchrec(torchrec, found, tables, module)
    if as_json:
        click.echo(json.dumps(found.plain(), indent=2, sort_keys=True))
    else:
        print_rows(_of_plan(tables, why, found), f"Plan for {found.owners} owners")


@placement.command("show")
@_source
@_planned
def show_command(**given: Any) -> None:
    """Show what placements of the profiled tables cost: the imbalance N · max / sum of owners' bytes and of
    predicted times, and the step of the busiest owner. Compared are whole tables dealt out one after the
    other, every table spread by rows, TorchRec's planner if it is installed (`train --placement planner`) and
    the plan of `placement plan`.

    \b
    Example:
      roostream placement show --store .roostream/store --schema my_site.toml --owners 2
    """
    tables, why, found = _plan(**given)
    owners, costs = found.owners, _costs(given["costs_file"])
    plans = {"tables round robin": round_robin(tables, owners), "spread by rows": spread(tables, owners)}
    if (torchrec := _planned_by_torchrec(given["schema"], tables, owners)) is not None:
        plans["TorchRec's planner"] = torchrec
    plans["plan"] = list(found.pieces)
    rows: list[Row] = []
    for name, pieces in plans.items():
        time_N, bytes_N = loads(pieces, tables, owners, costs)
        text = f"imbalance {imbalance(bytes_N):.2f} of bytes, {imbalance(time_N):.2f} of time"
        rows.append((name, f"{text}; step {1e6 * float(time_N.max()):.1f} µs"))
    kept, expanded = (exchanged_bytes(tables, owners, expanded=each) for each in (False, True))
    if kept:
        text = f"{kept / 1e6:.3f} MB a step and worker, {expanded / 1e6:.3f} MB for expanded impressions"
        rows.append(("exchanged", f"{text} ({expanded / kept:.1f} times)"))
    rows.append(("times", found.time_accuracy))
    rows += [("no profile", f"{text}: spread over all owners") for text in why]
    print_rows(rows, f"Placements over {owners} owners")


def _planned_by_torchrec(schema: Path, tables: list[PlannedTable], owners: int) -> list[TablePiece] | None:
    """None: TorchRec is not installed, or cannot hold one of the tables."""
    try:
        from trainer.torchrec_plan import pieces_of
        from trainer.torchrec_rows import check_tables, read_placement
    except ImportError:
        return None
    loaded = load_schema(schema)
    try:
        check_tables(loaded, {})
    except SchemaError:
        return None
    return pieces_of(read_placement("planner", loaded, owners, tables), tables, owners)


@placement.command("explain")
@click.argument("table")
@_source
@_planned
def explain_command(table: str, **given: Any) -> None:
    """Explain the placement of a table: its profile, and the cost of each way to split it.

    \b
    Example:
      roostream placement explain item --store .roostream/store --schema my_site.toml --owners 8
    """
    tables, why, found = _plan(**given)
    entry = next((t for t in tables if t.name == table), None)
    if entry is None:
        raise ConfigError(
            f"expected a table of the schema, got {table!r}{nearest(table, [t.name for t in tables])}"
        )
    rows: list[Row] = [("placed", found.kind_of(table))]
    rows += [("no profile", text) for text in why if text.startswith(f"{table} (")]
    if entry.uniques is not None:
        rows.append(("per batch", f"{entry.ids:,.0f} ids, {entry.uniques:,.0f} rows of {entry.dim} floats"))
        costs = _costs(given["costs_file"])
        for pieces in sorted({1, 2, 4, found.owners}):
            cost_us = 1e6 * piece_cost(entry, found.owners, costs, rows=1 / pieces)
            rows.append((f"{pieces} row shards", f"{cost_us:.2f} µs per step for each owner"))
    print_rows([*rows, ("times", found.time_accuracy)], f"Table {table}")


@placement.command("diff")
@click.argument("before", type=_PATH)
@click.argument("after", type=_PATH)
def diff_command(before: Path, after: Path) -> None:
    """Show the changes between two plans, which are outputs of `plan --json`.

    \b
    Example:
      roostream placement diff yesterday.json today.json
    """
    old, new = (_read(file) for file in (before, after))
    names = sorted({*old["tables"], *new["tables"]})
    changes = [(n, _change(old["tables"].get(n, []), new["tables"].get(n, []))) for n in names]
    changed = [(name, text) for name, text in changes if text]
    imbalance = f"{old['bytes_imbalance']:.2f} → {new['bytes_imbalance']:.2f}"
    print_rows([*(changed or [("tables", "the same")]), ("imbalance (bytes)", imbalance)], "What changes")


def _read(file: Path) -> dict[str, Any]:
    """The imbalance of a plan, and its shards by table."""
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        pieces: dict[str, list[Any]] = {}
        for piece in plan["pieces"]:
            entry = (piece["kind"], piece["owner"], piece["number"])
            pieces.setdefault(str(piece["table"]), []).append(entry)
        imbalance = float(plan["bytes_imbalance"])
        return {"bytes_imbalance": imbalance, "tables": pieces}
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a plan, got {error.strerror}; create one with `placement plan --json`"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{file}: expected the output of `placement plan --json`, got something else; create one with it"
        ) from None


def _change(old: list[tuple[str, int, int]], new: list[tuple[str, int, int]]) -> str:
    """The change of a table as text; "" = none. Long lists of owners are cut, so they may look alike."""
    if old == new:
        return ""
    before, after = _cut(old), _cut(new)
    if before != after:
        return f"{before} → {after}"
    moved = sum(one != other for one, other in zip(old, new, strict=True))
    return f"{before}: {moved} shards have other owners"


def _cut(entry: list[tuple[str, int, int]]) -> str:
    if not entry:
        return "not in it"
    owners = ", ".join(str(owner) for _, owner, _ in entry[:8]) + (" …" if len(entry) > 8 else "")
    return f"complete on {owners}" if len(entry) == 1 else f"{len(entry)} {entry[0][0]} shards on {owners}"


def _plan(
    store: str,
    schema: Path,
    batch: int,
    row_texts: tuple[str, ...],
    owners: int,
    memory_gib: float,
    column_texts: tuple[str, ...],
    costs_file: Path | None,
    whole_or_all: bool = False,
) -> tuple[list[PlannedTable], list[str], PlacementPlan]:
    """The tables, why some have no usable profile, and the plan."""
    loaded = load_schema(schema)
    names = [table.name for table in loaded.tables]
    known = read_profiles(open_checkpoint_store(store), loaded)
    rows = _numbers("--rows", row_texts, names)
    tables, why = planned_tables(loaded, known, batch=batch, now_ms=SystemClock().now_ms(), rows=rows)
    columns, memory = _numbers("--columns", column_texts, names), int(memory_gib * _GIB)
    costs = _costs(costs_file)
    return (
        tables,
        why,
        plan(tables, owners, costs, memory_bytes=memory, columns=columns, whole_or_all=whole_or_all),
    )


def _rows_of(collection: Path, schema: Path) -> list[str]:
    """The rows of a collection's tables, in the form of `--rows`."""
    from roostream.cli.checkpoint.torchrec_collection import read_collection

    return [
        f"{table}={len(rows)}"
        for table, rows in read_collection(collection, load_schema(schema)).rows.items()
    ]


def _write_torchrec(file: Path, found: PlacementPlan, tables: list[PlannedTable], module: str) -> None:
    text = json.dumps(sharding_of(found, tables, module), indent=1, sort_keys=True) + "\n"
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); choose a new file") from None


def _costs(file: Path | None) -> Any:
    if file is None:
        return CostModel()
    try:
        return costs_of(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a JSON file with measured constants, got {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{file}: expected a JSON file with measured constants, got bytes that are not UTF-8"
        ) from None


def _numbers(option: str, texts: tuple[str, ...], names: list[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in names:
            raise ConfigError(
                f"{option}: expected TABLE=N with a table of the schema, got {text!r}{nearest(name, names)}"
            )
        if not number.isdecimal() or len(number) > _MAX_DIGITS or not int(number):
            raise ConfigError(
                f"{option}: expected TABLE=N with N above 0 and at most {_MAX_DIGITS} digits, got {text!r}"
            )
        found[name] = int(number)
    return found


def _of_profile(profile: Any, batch: int) -> str:
    examples = profile.examples_of(batch)
    ids = profile.valency * examples
    rows = f"{profile.uniques_of(examples):,.0f} rows of {ids:,.0f} ids in {batch} requests"
    if profile.expansion > 1:
        rows += f", {profile.expansion * ids:,.0f} for expanded impressions"
    return (
        f"table {profile.table} ({profile.dim} wide): {rows}; {profile.batches} batches, error "
        f"{profile.error:.1%}"
    )


def _of_plan(tables: list[PlannedTable], why: list[str], found: PlacementPlan) -> Iterator[Row]:
    yield from ((table.name, found.kind_of(table.name)) for table in tables)
    yield "imbalance", f"{found.bytes_imbalance:.2f} of bytes, {found.time_imbalance:.2f} of predicted time"
    ratio = found.predicted_s / found.bound_s if found.bound_s else 1.0
    yield "step", f"{1e6 * found.predicted_s:.1f} µs, {ratio:.2f} × the lower bound"
    yield "times", found.time_accuracy
    yield from (("no profile", f"{text}: spread over all owners") for text in why)


_SHOWN = 12


@placement.command("map")
@place_options
@click.option(
    "--shards",
    "num_shards",
    type=click.IntRange(1),
    help="compute a map for this many shards; default: unchanged",
)
@click.option(
    "--max-moved", type=FiniteRange(0, 1), default=0.0, help="maximum share of the buckets that may move"
)
@click.option("--json", "as_json", is_flag=True, help="print only the map as JSON, which `apply` reads")
def map_command(
    home: Path, store: str | None, num_shards: int | None, max_moved: float, as_json: bool
) -> None:
    """Show the bucket map of the newest commit, or compute one that is balanced by bytes or has another
    number of shards.

    \b
    Example:
      roostream down && roostream placement map --shards 4 --max-moved 1 --json > four.json
    """
    with _committed(opened_store(home, store), home) as committed:
        bytes_B, now = bytes_by_bucket(committed), committed.manifest.owners
        wanted = (
            balanced_map(now, num_shards or now.num_owners, bytes_B, max_moved)
            if num_shards or max_moved
            else now
        )
    if as_json:
        click.echo(json.dumps(wanted.plain()))
    else:
        print_rows(_describe_moves(now, wanted, bytes_B), f"Buckets of {committed.manifest.name}")


@placement.command("apply")
@click.argument("map_file", metavar="MAP", type=_PATH)
@place_options
@click.option("--dry-run", is_flag=True, help="show the moves without making them")
def apply_command(map_file: Path, home: Path, store: str | None, dry_run: bool) -> None:
    """Move buckets between the shards of a stopped stack, by a commit. MAP is an output of `placement map
    --json`.

    If the command is killed, either the old or the new map is valid.

    \b
    Example:
      roostream down && roostream placement apply four.json && roostream up
    """
    after, opened = _read_map(map_file), opened_store(home, store)
    options = load_saved_options(Home(home).root) or _options_of_up(Home(home))
    move_buckets.check_move(move_buckets.newest_commit(opened).manifest, after)
    with _committed(opened, home, 0 if dry_run else after.num_owners) as committed, Home(home).locked():
        rows = list(
            _describe_moves(committed.manifest.owners, after, move_buckets.bytes_by_bucket(committed))
        )
        if dry_run:
            print_rows(rows, f"Moves after {committed.manifest.name}; nothing was changed")
            return

        with progress_bar("moving rows"):
            made = move_buckets.move(opened, after, committed.stores, SystemClock().now_ms())
    if options is not None:  # the next `up` here starts this many shards
        save_options(Home(home).root, dataclasses.replace(options, num_shards=after.num_owners))
    print_rows(rows, f"{made.name} has the map")


def _options_of_up(home: Home) -> StackOptions | None:
    """Options of `up` in a home that has none saved; None if no stack was started there. Raises ConfigError
    as `last_schema`."""
    schema = last_schema(home)
    return demo(schema=schema) if schema else None


def _read_map(file: Path) -> BucketMap:
    try:
        return BucketMap.from_plain(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a bucket map, got {error.strerror}; create one with `placement map --json`"
        ) from None
    except (ValueError, CheckpointError, RecursionError) as error:
        raise ConfigError(f"{file}: expected the output of `placement map --json` ({error})") from None


@contextlib.contextmanager
def _committed(store: CheckpointStore, home: Path, num_shards: int = 0) -> Iterator[CommittedShards]:
    """Open the shards of the newest commit in `home`, and at least `num_shards`. Raises SetupError: one runs
    or is missing."""
    manifest = newest_commit(store).manifest
    with contextlib.ExitStack() as opened:
        blobs = {}
        for index in range(max(manifest.num_shards, num_shards)):
            place = Home(home).root / f"shard-{index}" / "segments"
            if index in manifest.shards and not place.is_dir():
                raise SetupError(
                    f"expected the segments of shard {index} in {place}, got none; give its --home"
                )
            place.parent.mkdir(parents=True, exist_ok=True)
            blobs[index] = RocksDbStore(place).open()
            opened.callback(blobs[index].close)
        yield CommittedShards(manifest, schema_of(store, manifest), blobs, ensure_identity(store))


def _describe_moves(now: BucketMap, wanted: BucketMap, bytes_B: np.ndarray) -> Iterator[tuple[str, Any]]:
    for index in range(max(now.num_owners, wanted.num_owners)):
        has, gets = now.buckets_of(index), wanted.buckets_of(index)
        mib = [f"{bytes_B[committed].sum() / (1 << 20):.1f} MiB" for committed in (has, gets)]
        yield (
            f"shard {index}",
            f"{len(has)} buckets, {mib[0]}" + (f" → {len(gets)}, {mib[1]}" if has != gets else ""),
        )
    each = [
        imbalance(np.bincount(committed.owner_B, bytes_B, committed.num_owners))
        for committed in (now, wanted)
    ]
    yield (
        "imbalance",
        f"{each[0]:.3f}" + (f" → {each[1]:.3f}" if now != wanted else "") + " of bytes, 1 = even",
    )
    changed = moved(now, wanted).tolist()
    named = ", ".join(f"{b}: {now.owner_B[b]} → {wanted.owner_B[b]}" for b in changed[:_SHOWN])
    if changed:
        yield (
            "moves",
            f"{len(changed)} of {len(bytes_B)} buckets ({named}{', …' if len(changed) > _SHOWN else ''})",
        )
