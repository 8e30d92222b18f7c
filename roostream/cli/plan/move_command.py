"""`roostream placement map | apply`: which shard has which bucket of rows, a better map, and going there. Of a stack that is
stopped: shards hold their segments while they run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roostream.cli.checkpoint.checkpoint_command import opened_store, place_options
from roostream.cli.plan.placement_command import show
from roostream.errors import CheckpointError, ConfigError, SetupError

if TYPE_CHECKING:
    import numpy as np

    from roostream.cli.checkpoint.moved_buckets import CommittedShards
    from roostream.runtime.bucket_map import BucketMap
    from roostream.runtime.checkpoint_store import CheckpointStore

_SHOWN = 12


@click.command("map")
@place_options
@click.option(
    "--shards",
    "num_shards",
    type=click.IntRange(1),
    help="make a map for so many; default: as many as there are",
)
@click.option(
    "--max-moved",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="share of the buckets that a better map may move",
)
@click.option("--json", "as_json", is_flag=True, help="the map alone, as `apply` reads it")
def map_command(home: Path, store: str, num_shards: int | None, max_moved: float, as_json: bool) -> None:
    """Which shard has which bucket of the newest commit, or a map that is evener by bytes, or for other shards.

    \b
    Example:
      roostream down && roostream placement map --shards 4 --max-moved 1 --json > four.json
    """
    from param_server.placement.bucket_moves import evened

    with _committed(opened_store(home, store), home) as its:
        from roostream.cli.checkpoint.moved_buckets import bytes_by_bucket

        bytes_B, now = bytes_by_bucket(its), its.manifest.owners
        wanted = (
            evened(now, num_shards or now.num_owners, bytes_B, max_moved) if num_shards or max_moved else now
        )
    if as_json:
        click.echo(json.dumps(wanted.plain()))
    else:
        show(list(_told(now, wanted, bytes_B)), f"Buckets of {its.manifest.name}")


@click.command("apply")
@click.argument("map_file", metavar="MAP", type=click.Path(path_type=Path))
@place_options
@click.option("--dry-run", is_flag=True, help="say what would move, and change nothing")
def apply_command(map_file: Path, home: Path, store: str, dry_run: bool) -> None:
    """Move buckets between the shards of a stopped stack, as a commit: MAP is what `placement map --json` gave. Killed anywhere,
    the old map holds or the new one does.

    \b
    Example:
      roostream down && roostream placement apply four.json && roostream up
    """
    from roostream.cli.checkpoint import moved_buckets

    after, opened = _read_map(map_file), opened_store(home, store)
    moved_buckets.check_move(moved_buckets.newest_commit(opened).manifest, after)
    with _committed(opened, home, 0 if dry_run else after.num_owners) as its:
        rows = list(_told(its.manifest.owners, after, moved_buckets.bytes_by_bucket(its)))
        if dry_run:
            show(rows, f"Would move behind {its.manifest.name}; nothing was changed")
            return
        from roostream.runtime.clock import SystemClock

        made = moved_buckets.move(opened, after, its.blobs, SystemClock().now_ms())
    _keep_shards(home, after.num_owners)
    show(rows, f"{made.name} has the map")


def _read_map(file: Path) -> BucketMap:
    from roostream.runtime.bucket_map import BucketMap

    try:
        return BucketMap.of_plain(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a map of buckets, got {error.strerror}; make one with `placement map`"
        ) from None
    except (ValueError, CheckpointError) as error:
        raise ConfigError(f"{file}: expected a map as `placement map --json` gives it ({error})") from None


@contextlib.contextmanager
def _committed(store: CheckpointStore, home: Path, num_shards: int = 0) -> Iterator[CommittedShards]:
    """The newest commit's shards, and so many, opened in `home`. SetupError: one runs, or isn't there."""
    from param_server.key_value_store import RocksDbStore
    from roostream.cli.checkpoint.checkpoints import schema_of
    from roostream.cli.checkpoint.moved_buckets import CommittedShards, newest_commit

    manifest = newest_commit(store).manifest
    with contextlib.ExitStack() as opened:
        blobs = {}
        for index in range(max(manifest.num_shards, num_shards)):
            place = home.expanduser().resolve() / f"shard-{index}" / "segments"
            if index in manifest.shards and not place.is_dir():
                raise SetupError(
                    f"expected the segments of shard {index} in {place}, got none; say where with --home"
                )
            place.parent.mkdir(parents=True, exist_ok=True)
            blobs[index] = RocksDbStore(place).open()
            opened.callback(blobs[index].close)
        yield CommittedShards(manifest, schema_of(store, manifest), blobs)


def _keep_shards(home: Path, num_shards: int) -> None:
    """A home's next `up` starts as many."""
    from infra.options import load_saved_options, save_options

    place = home.expanduser().resolve()
    if (options := load_saved_options(place)) is not None and options.num_shards != num_shards:
        save_options(place, dataclasses.replace(options, num_shards=num_shards))


def _told(now: BucketMap, wanted: BucketMap, bytes_B: np.ndarray) -> Iterator[tuple[str, Any]]:
    import numpy as np

    from param_server.placement.plan import imbalance
    from roostream.runtime.bucket_map import moved

    for index in range(max(now.num_owners, wanted.num_owners)):
        has, gets = now.buckets_of(index), wanted.buckets_of(index)
        mib = [f"{bytes_B[its].sum() / (1 << 20):.1f} MiB" for its in (has, gets)]
        yield (
            f"shard {index}",
            f"{len(has)} buckets, {mib[0]}" + (f" → {len(gets)}, {mib[1]}" if has != gets else ""),
        )
    each = [imbalance(np.bincount(its.owner_B, bytes_B, its.num_owners)) for its in (now, wanted)]
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
