"""A copy of a commit (`checkpoints.export`) becomes what another Kafka's trainer begins from.

What is learned comes over: rows with their optimizer state, the model's shared part, ids that were trained, metrics. Offsets do
not: they are places in the other cluster's logs. Training begins at the oldest sample that is there, and skips those whose ids
came over. The manifest names no cluster until the first commit (docs/decisions/0040).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from roostream.cli.checkpoint import checkpoints
from roostream.errors import CheckpointError, SetupError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore, FileStore
from roostream.runtime.manifest import Manifest
from roostream.schema.registry import register


def bring(folder: Path, store: CheckpointStore, home: Path) -> Manifest:
    """Make the export in `folder` the only commit of `store`, and of `home` what its shards hold; the commit.

    Raises:
        CheckpointError: there is no export, or a part of it is absent or damaged. Nothing was changed.
        SetupError: the store has commits, the home has segments, or the export is open elsewhere. Nothing was changed.

    **If it fails** otherwise: there is no commit yet; empty the home, and call again.
    """
    source, manifest = _export_in(folder)
    expect_empty(store, home, manifest.shards)
    schema = checkpoints.schema_of(source, manifest)
    for index in manifest.shards:
        with checkpoints.shard_segments(manifest, schema, index, folder) as (segments, state):
            checkpoints.copy_segments(segments, state, home / f"shard-{index}" / "segments")
    register(store, schema)
    for file in (manifest.dense, *(part.file for part in manifest.workers.values())):
        store.put(file.name, manifests.read_file(source, file))
    newest = max(manifests.newest_incarnation(source), manifests.newest_incarnation(store))
    store.put(
        f"{manifests.INCARNATIONS}/{newest:08d}", b"{}"
    )  # rows' versions go on above those of the other cluster
    brought = nowhere(manifest)
    if not store.create(brought.name, brought.encode()):
        raise SetupError(
            f"expected a store without commits, got {brought.name} meanwhile; stop the trainer that runs there"
        )
    return brought


def expect_empty(store: CheckpointStore, home: Path, shards: Iterable[int]) -> None:
    """Raises SetupError: the store has commits, or the home segments of one of the shards."""
    if there := manifests.numbers(store):
        raise SetupError(
            f"expected a store without commits, got {len(there)} in it; a model comes into a home that is empty"
        )
    if held := [index for index in shards if (home / f"shard-{index}" / "segments").exists()]:
        raise SetupError(
            f"expected a home without rows, got shard-{held[0]} in {home}; a model comes into a home that is empty"
        )


def nowhere(manifest: Manifest) -> Manifest:
    """The same commit of no cluster: nothing is read yet, and nothing of it is in a log."""
    parts = {
        index: dataclasses.replace(part, offsets=dict.fromkeys(part.offsets, 0))
        for index, part in manifest.workers.items()
    }
    return dataclasses.replace(manifest, kafka={}, rows_end={}, workers=parts)


def _export_in(folder: Path) -> tuple[FileStore, Manifest]:
    """Raises CheckpointError: it isn't whole."""
    try:
        about = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        version, number = about["format"], int(about["seq"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"expected an export in {folder}, got no export.json that can be read ({error}); it is made by `checkpoint export`"
        ) from None
    if version != checkpoints.EXPORT_FORMAT:
        raise CheckpointError(
            f"{folder}: expected an export of format {checkpoints.EXPORT_FORMAT}, got {version!r}; use a newer Roostream"
        )
    store = FileStore(folder / "store")
    for outcome in checkpoints.verify(store, number, folder):
        if outcome.state == "damaged":
            raise CheckpointError(
                f"{folder}: {outcome.part} is damaged ({outcome.text}); copy the export again"
            )
    return store, manifests.load(store, manifests.manifest_name(number)).manifest
