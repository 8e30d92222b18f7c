"""List, verify, export and import commits: manifests and files in a checkpoint store, segments in the homes
of shards.

The segments of a shard can be read while it is stopped. Segments of a running shard, or on another machine,
are "not reached", unless they have copies in the store (docs/decisions/0111).

An export can be imported on another Kafka. Rows with optimizer state, dense weights, trained ids and metrics
are copied; offsets are not, because they belong to the other cluster. Training starts at the oldest sample
and skips ids that were trained. The manifest names no cluster until the next commit (docs/decisions/0040).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infra.home import Home
from param_server.embedding_table import Keys
from param_server.key_value_store import RocksDbStore
from param_server.segment_copies import SegmentCopies
from param_server.segment_parts import Segment
from param_server.segments import STORE_KEY, Segments, commit_of
from param_server.table import shapes_of
from roostream.cli.output import UpdateProgress
from roostream.errors import CheckpointError, RoostreamError, SetupError
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore, FileStore, sync_path
from roostream.runtime.manifest import Manifest
from roostream.runtime.retention import StoreCleaner, read_retention
from roostream.runtime.store_identity import IDENTITY_NAME, create_store, init_store
from roostream.schema.registry import open_registry, register
from roostream.schema.schema import Schema
from trainer.monitoring.progressive_metrics import merge_summaries

EXPORT_FORMAT = 1
_BATCH = 256


class Outcome(NamedTuple):
    """The result of reading one part: `state` is "ok", "damaged" or "not reached"."""

    part: str
    state: str
    text: str = ""


def list_commits(store: CheckpointStore) -> list[dict[str, Any]]:
    """Every commit in the store, newest first: number, tier, times, sizes and quality, or `problem` if it
    cannot be read. The tier is "" if the next commit will delete it."""
    out, tiers = [], StoreCleaner(store, read_retention(store)).tiers()
    for number in reversed(manifests.numbers(store)):
        name = manifests.manifest_name(number)
        try:
            manifest = manifests.load(store, name).manifest
            if manifests.is_rolled_back(store, manifest.seq, manifest.incarnation):
                out.append({"seq": number, "problem": "it arrived after it was rolled back; it is not used"})
            else:
                out.append({**_describe(manifest), "tier": tiers.get(number, "")})
        except CheckpointError as error:
            if number in manifests.numbers(store):  # a running stack may have deleted it meanwhile
                out.append({"seq": number, "problem": str(error)})
    return out


def _describe(manifest: Manifest) -> dict[str, Any]:
    segments = [segment for shard in manifest.shards.values() for segment in shard.get("segments", ())]
    metrics = merge_summaries(part.metrics for part in manifest.workers.values())
    return {
        "seq": manifest.seq,
        "incarnation": manifest.incarnation,
        "time_ms": manifest.time_ms,
        "step": manifest.step,
        "watermark_ms": manifest.watermark_ms,
        "workers": len(manifest.workers),
        "dense_bytes": manifest.dense.bytes,
        "workers_bytes": sum(
            file.bytes for name, file in manifest.files.items() if name != manifest.dense.name
        ),
        "rows_bytes": sum(int(segment.get("bytes", 0)) for segment in segments),
        "copied_bytes": sum(int(s["copy"]["bytes"]) for s in segments if s.get("copy")),
        "segments": len(segments),
        "quality": {name: metrics.get(name) for name in ("requests", "ne", "auc", "calibration")},
    }


def verify(store: CheckpointStore, number: int, home: Path | None) -> Iterator[Outcome]:
    """Read every part of a commit: manifest, previous manifest, files, schema, and the segments of shards in
    `home`. A commit that a running stack deletes meanwhile is "not reached"."""
    for outcome in _verify(store, number, home):
        if outcome.state == "damaged" and number not in manifests.numbers(store):
            yield Outcome(outcome.part, "not reached", f"commit {number} was deleted meanwhile")
            return
        yield outcome


def _verify(store: CheckpointStore, number: int, home: Path | None) -> Iterator[Outcome]:
    name = manifests.manifest_name(number)
    try:
        restorable = manifests.load(store, name)
    except CheckpointError as error:
        yield Outcome(name, "damaged", str(error))
        return
    manifest = restorable.manifest
    yield Outcome(name, "ok")
    yield _verify_previous(store, manifest)
    for file in manifest.files.values():
        try:
            tensor_file.decode(manifests.read_file(store, file))
            yield Outcome(file.name, "ok")
        except CheckpointError as error:
            yield Outcome(file.name, "damaged", str(error))
    try:
        schema = schema_of(store, manifest)
        yield Outcome(f"schemas/{manifest.schema}.toml", "ok")
    except CheckpointError as error:
        yield Outcome(f"schemas/{manifest.schema}.toml", "damaged", str(error))
        return
    for index in manifest.shards:
        yield _verify_shard(manifest, schema, index, home)
        yield from _verify_copies(store, manifest, index)


def _verify_copies(store: CheckpointStore, manifest: Manifest, index: int) -> Iterator[Outcome]:
    """Read and check the copies of a shard's segments in the store."""
    for segment in commit_of(manifest, index).segments:
        if segment.copy is not None:
            try:
                SegmentCopies(store, index).verify(segment)
                yield Outcome(segment.copy.name, "ok")
            except CheckpointError as error:
                yield Outcome(segment.copy.name, "damaged", str(error))


def _verify_previous(store: CheckpointStore, manifest: Manifest) -> Outcome:
    """Check that this manifest names the previous one's checksum, if the previous one still exists."""
    number, stated = int(manifest.previous["seq"]), manifest.previous["checksum"]
    part = f"{manifest.name} continues {number}"
    if number not in manifests.numbers(store):
        return Outcome(part, "not reached", "it was deleted" if number else "this is the first")
    try:
        checksum = manifests.load(store, manifests.manifest_name(number)).checksum
    except CheckpointError as error:
        return Outcome(part, "not reached", str(error))
    if checksum == stated:
        return Outcome(part, "ok")
    return Outcome(
        part, "damaged", f"expected checksum {stated}, got {checksum}: another manifest has its name"
    )


def schema_of(store: CheckpointStore, manifest: Manifest) -> Schema:
    """The schema of a commit. Raises CheckpointError: it is missing or damaged."""
    schema = open_registry(store)(int(manifest.schema, 16))
    if schema is None:
        raise CheckpointError(
            f"{manifest.name}: expected its schema {manifest.schema} in the store, got none; restore the file"
        )
    return schema


def _verify_shard(manifest: Manifest, schema: Schema, index: int, home: Path | None) -> Outcome:
    """Read and check the segments in the home of a shard."""
    part = f"segments of shard {index}"
    try:
        with shard_segments(manifest, schema, index, home) as (segments, state):
            damaged = segments.check(state, segments.buckets)
    except SetupError as error:
        return Outcome(part, "not reached", str(error))
    except CheckpointError as error:
        return Outcome(part, "damaged", str(error))
    return (
        Outcome(part, "damaged", ", ".join(damaged))
        if damaged
        else Outcome(part, "ok", f"{len(state)} segments")
    )


@contextlib.contextmanager
def shard_segments(
    manifest: Manifest, schema: Schema, index: int, home: Path | None, *, to_read: bool = False
) -> Iterator[tuple[Segments, tuple[Segment, ...]]]:
    """The segments of a shard, and those that belong to the commit. `to_read` also opens those of a running
    shard.

    Raises:
        SetupError: the segments are not in `home`, or the shard is running.
        CheckpointError: the manifest names no readable segment.
    """
    if home is None or not (home / f"shard-{index}" / "segments").is_dir():
        raise SetupError(f"expected segments in shard-{index}/segments of a home, got none; give its --home")
    with _opened(manifest, schema, index, home / f"shard-{index}" / "segments", to_read) as segments:
        yield segments, commit_of(manifest, index).segments


@contextlib.contextmanager
def _opened(
    manifest: Manifest, schema: Schema, index: int, folder: Path, to_read: bool = False
) -> Iterator[Segments]:
    blobs = RocksDbStore(folder)
    try:
        blobs.open(read_only=to_read)
        buckets = manifest.owners.buckets_of(index)
        yield Segments(blobs, shapes_of(schema), manifest.num_buckets, buckets=buckets)
    finally:
        blobs.close()


@contextlib.contextmanager
def rows_of(
    store: CheckpointStore, manifest: Manifest, schema: Schema, index: int, home: Path | None
) -> Iterator[tuple[Segments, tuple[Segment, ...]]]:
    """As `shard_segments`, from the copies in the store if it has all of them; then the shard may run, and
    its home may be anywhere."""
    state = commit_of(manifest, index).segments
    if not state or any(segment.copy is None for segment in state):
        with shard_segments(manifest, schema, index, home) as found:
            yield found
        return
    with (
        tempfile.TemporaryDirectory(prefix="roostream-") as folder,
        _opened(manifest, schema, index, Path(folder) / "segments") as segments,
    ):
        if problems := segments.fetch(state, SegmentCopies(store, index)):
            raise CheckpointError("; ".join(problems))
        yield segments, state


def _counts_parts(manifest: Manifest, update: UpdateProgress) -> Callable[[], None]:
    """A function to call after each file and each segment of the commit; it reports the number so far."""
    total = len(manifest.files) + sum(len(commit_of(manifest, i).segments) for i in manifest.shards)
    numbers = itertools.count(1)
    return lambda: update(next(numbers), total)


def _no_progress(done: int, total: int | None) -> None:
    pass


def export(
    store: CheckpointStore,
    number: int,
    home: Path,
    to: Path,
    update: UpdateProgress = _no_progress,
    fsync: Callable[[int], None] = os.fsync,
) -> list[str]:
    """Copy and verify one commit into the new directory `to`; returns the names of what was written.

    `store/` and `shard-N/segments` are as in a home, so a home on the same Kafka can continue from them.
    `rows/<stack>-<shard>.safetensors` are for other programs (docs/protocols.md, Exports). `export.json` is
    written last, when everything else is durable. An error deletes `to`.

    Raises:
        CheckpointError: a part is missing or damaged.
        SetupError: `to` exists, or a shard is running whose rows are only in its home.
        UnavailableError: `to` cannot be written, for example because the disk is full.
    """
    FileStore(to.parent, fsync=fsync).make_root()
    try:
        to.mkdir()
    except OSError as error:
        raise SetupError(
            f"{to} cannot be created ({error.strerror}); choose a directory that does not exist"
        ) from None
    try:
        written = _export(store, number, home, FileStore(to, fsync=fsync), update)
        sync_path(to.parent, fsync)
        return written
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        raise


def _export(
    store: CheckpointStore, number: int, home: Path, to: FileStore, update: UpdateProgress
) -> list[str]:
    manifest = manifests.load(store, manifests.manifest_name(number)).manifest
    schema = schema_of(store, manifest)
    store_id = init_store(to.root / "store")  # a copy that continues on its own is another store
    copy = FileStore(to.root / "store")
    on_part = _counts_parts(manifest, update)
    files = _copy_files(store, manifest, copy, on_part)
    written = [f"store/{IDENTITY_NAME}", *(f"store/{name}" for name in files)]
    for index in manifest.shards:
        with rows_of(store, manifest, schema, index, home) as (segments, state):
            written += copy_segments(
                segments, state, to.root / f"shard-{index}" / "segments", store_id, on_part
            )
            for stack, block in live_rows(segments, state).items():
                about = {"stack": stack, "shard": str(index), "seq": str(number), "schema": manifest.schema}
                written.append(f"rows/{stack}-{index}.safetensors")
                to.put(written[-1], tensor_file.encode(block, about))
    states = {i: [s._replace(copy=None) for s in commit_of(manifest, i).segments] for i in manifest.shards}
    copy.put(manifest.name, _with_segments(manifest, states).encode())
    written.append(f"store/{manifest.name}")
    whole = {"format": EXPORT_FORMAT, "seq": number, "version": manifest.version, "files": written}
    to.put("export.json", (json.dumps(whole, indent=2) + "\n").encode())
    return written


def export_to_store(
    store: CheckpointStore,
    number: int,
    home: Path | None,
    to: CheckpointStore,
    update: UpdateProgress = _no_progress,
) -> Manifest:
    """Copy and verify one commit into the empty store `to`, rows included; returns its manifest there.

    The result is a checkpoint store with one commit, from which a deployment on the same Kafka can continue,
    and which `import_store` reads. The manifest is written last; before, `to` has no commit.

    Raises:
        CheckpointError: a part is missing or damaged.
        SetupError: `to` has commits, or a shard is running whose rows are only in its home.
    """
    manifest = manifests.load(store, manifests.manifest_name(number)).manifest
    schema = schema_of(store, manifest)
    expect_empty(to, None, ())
    create_store(to)
    states, on_part = {}, _counts_parts(manifest, update)
    for index in manifest.shards:
        with rows_of(store, manifest, schema, index, home) as (segments, state):
            states[index] = _send_all(segments, state, to, index, on_part)
    _copy_files(store, manifest, to, on_part)
    copied = _with_segments(manifest, states)
    create_first_commit(to, copied)
    return copied


def _send_all(
    segments: Segments, state: Iterable[Segment], to: CheckpointStore, index: int, on_part: Callable[[], None]
) -> tuple[Segment, ...]:
    """Copy a shard's segments to another store."""
    copies = SegmentCopies(to, index)
    sent: list[Segment] = []
    for segment in state:
        sent += segments.send([segment._replace(copy=None)], copies)
        on_part()
    return tuple(sent)


def _with_segments(manifest: Manifest, states: Mapping[int, Iterable[Segment]]) -> Manifest:
    """The same commit with these segments of each shard."""
    shards = {
        index: {**manifest.shards[index], "segments": [segment.plain() for segment in state]}
        for index, state in states.items()
    }
    return dataclasses.replace(manifest, shards=shards)


def _copy_files(
    store: CheckpointStore, manifest: Manifest, to: CheckpointStore, on_part: Callable[[], None]
) -> list[str]:
    """Copy everything of a commit but its rows and its manifest; returns the names."""
    for file in manifest.files.values():
        to.put(file.name, manifests.read_file(store, file))
        on_part()
    # The next incarnation is above this one, so that row versions never go backwards.
    newest = f"{manifests.INCARNATIONS}/{manifests.newest_incarnation(store):08d}"
    names = [f"schemas/{manifest.schema}.toml", newest]
    for name in names:
        to.put(name, store.get(name))
    return [*manifest.files, *names]


def copy_segments(
    segments: Segments,
    state: tuple[Segment, ...],
    to: Path,
    store_id: str,
    on_part: Callable[[], None] = lambda: None,
) -> list[str]:
    """Copy segments byte for byte, because checksums include their keys; returns the relative path written.
    `store_id`: the checkpoint store that the copies belong to.

    Raises:
        CheckpointError: a part is damaged.
    """
    if damaged := segments.check(state, segments.buckets):
        raise CheckpointError(
            f"expected complete segments, got damaged ones: {', '.join(damaged)}; see `checkpoint verify`"
        )
    FileStore(to).make_root()  # durable, unlike a directory that RocksDB makes
    copy = RocksDbStore(to).open()
    try:
        copy.write([(STORE_KEY, store_id.encode())], sync=True)
        for segment in state:
            prefixes = [f"{kind}/{segment.name}".encode() for kind in "brd"]
            keys = [
                k
                for prefix in prefixes
                for k in segments.store.keys(prefix)
                if k == prefix or k.startswith(prefix + b"/")
            ]
            for at in range(0, len(keys), _BATCH):
                copy.write(
                    [(key, segments.store.get(key) or b"") for key in keys[at : at + _BATCH]], sync=True
                )
            on_part()
    finally:
        copy.close()
    return [f"{to.parent.name}/segments"]


def live_rows(segments: Segments, state: tuple[Segment, ...]) -> dict[str, dict[str, np.ndarray]]:
    """Read the rows of a commit that were not deleted.

    Returns, for each stack, arrays of equal length: `table` and `id` of each row, `stamp_ms` (event time of
    its last push), `row` (the embedding) and `state` (the optimizer's).
    """
    out: dict[str, list[dict[str, np.ndarray]]] = {}
    for part in segments.read(state):
        rows: dict[tuple[int, int], tuple[int, np.ndarray, np.ndarray]] = {}
        for block in reversed(part.blocks):
            for key in _pairs(block.gone):
                rows.pop(key, None)
            rows.update(
                zip(
                    _pairs(block.live),
                    zip(block.stamp_ms_L.tolist(), block.rows_LD, block.state_LA, strict=True),
                    strict=True,
                )
            )
        if rows:
            out.setdefault(part.stack, []).append(_arrays(rows))
    return {
        stack: {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for stack, parts in out.items()
    }


def _pairs(keys: Keys) -> list[tuple[int, int]]:
    return list(zip(keys.table_U.tolist(), keys.id_U.tolist(), strict=True))


def _arrays(rows: dict[tuple[int, int], tuple[int, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    return {
        "table": np.array([table for table, _ in rows], np.uint32),
        "id": np.array([id_ for _, id_ in rows], np.int64),
        "stamp_ms": np.array([stamp for stamp, _, _ in rows.values()], np.int64),
        "row": np.stack([row for _, row, _ in rows.values()]),
        "state": np.stack([state for _, _, state in rows.values()]),
    }


def import_export(
    folder: Path, store: CheckpointStore, home: Path | None, update: UpdateProgress = _no_progress
) -> Manifest:
    """Make the export in `folder` the only commit of `store`, with its segments in `home`, or as copies in
    `store` if `home` is None; returns its manifest.

    If another error than those below is raised, `store` has no commit: call this again.

    Raises:
        CheckpointError: there is no export, or a part of it is missing or damaged. Nothing was changed.
        SetupError: the store has commits, the home has segments, or the export is in use. Nothing was
            changed.
    """
    source, manifest = _export_in(folder)
    return _import(source, manifest, folder, store, home, update)


def import_store(
    source: CheckpointStore,
    store: CheckpointStore,
    home: Path | None,
    update: UpdateProgress = _no_progress,
) -> Manifest:
    """As `import_export`, of the newest commit of a store that has copies of all rows, such as
    `export_to_store` makes. Its deployment may run."""
    newest = manifests.newest(source)
    if newest is None:
        raise CheckpointError("expected a commit in the store to import from, got none")
    return _import(source, newest.manifest, None, store, home, update)


def _import(
    source: CheckpointStore,
    manifest: Manifest,
    source_home: Path | None,
    store: CheckpointStore,
    home: Path | None,
    update: UpdateProgress,
) -> Manifest:
    with importing(store, home, manifest.shards):
        schema, store_id = schema_of(source, manifest), create_store(store)
        states, on_part = {}, _counts_parts(manifest, update)
        for index in manifest.shards:
            with rows_of(source, manifest, schema, index, source_home) as (segments, state):
                if home is None:
                    states[index] = _send_all(segments, state, store, index, on_part)
                else:
                    copy_segments(segments, state, home / f"shard-{index}" / "segments", store_id, on_part)
                    states[index] = tuple(segment._replace(copy=None) for segment in state)
        register(store, schema)
        for file in manifest.files.values():
            store.put(file.name, manifests.read_file(source, file))
            on_part()
        newest = max(manifests.newest_incarnation(source), manifests.newest_incarnation(store))
        # Row versions continue above those of the other cluster.
        store.put(f"{manifests.INCARNATIONS}/{newest:08d}", b"{}")
        imported = without_offsets(_with_segments(manifest, states))
        create_first_commit(store, imported)
        return imported


@contextlib.contextmanager
def importing(store: CheckpointStore, home: Path | None, shards: Iterable[int]) -> Iterator[None]:
    """For the block that writes an import. Holds the lock of the home, so that no stack starts there
    meanwhile. After an error, the rows that the block has written are deleted if there is no commit, so that
    the import can be repeated.

    Raises:
        SetupError: as `expect_empty`, or a stack runs in the home.
    """
    expect_empty(store, home, shards)  # before the lock's file is made in a folder that may be the wrong one
    with Home(home).locked() if home else contextlib.nullcontext():
        expect_empty(store, home, shards)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RoostreamError):  # a store that does not answer may have the commit
                if home and not manifests.numbers(store):
                    for index in shards:
                        shutil.rmtree(home / f"shard-{index}" / "segments", ignore_errors=True)
            raise


def create_first_commit(store: CheckpointStore, manifest: Manifest) -> None:
    """Create the manifest of an import or export. Raises SetupError: the store has one of this name."""
    if not store.create(manifest.name, manifest.encode()):
        raise SetupError(
            f"expected a store without commits, but {manifest.name} was just created; stop the trainer that "
            "runs there"
        )


def expect_empty(store: CheckpointStore, home: Path | None, shards: Iterable[int]) -> None:
    """Raises SetupError: the store has commits, or the home segments of one of the shards."""
    if there := manifests.numbers(store):
        raise SetupError(f"expected a store without commits, got {len(there)}; import into an empty home")
    if home and (held := [index for index in shards if (home / f"shard-{index}" / "segments").exists()]):
        raise SetupError(
            f"expected a home without rows, got shard-{held[0]} in {home}; import into an empty home"
        )


def without_offsets(manifest: Manifest) -> Manifest:
    """The same commit, belonging to no Kafka cluster: no sample is read, and no row is published."""
    parts = {
        index: dataclasses.replace(part, offsets=dict.fromkeys(part.offsets, 0))
        for index, part in manifest.workers.items()
    }
    return dataclasses.replace(manifest, kafka={}, rows_end={}, workers=parts)


def _export_in(folder: Path) -> tuple[FileStore, Manifest]:
    """Open and verify an export.

    Raises:
        CheckpointError: it is incomplete or damaged.
        SetupError: another process has its segments open.
    """
    try:
        about = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        version, number = about["format"], int(about["seq"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"expected an export in {folder}, but its export.json cannot be read ({why}); create one with "
            "`roostream checkpoint export`"
        ) from None
    if version != EXPORT_FORMAT:
        raise CheckpointError(
            f"{folder}: expected an export of format {EXPORT_FORMAT}, got {version!r}; use a newer Roostream"
        )
    store = FileStore(folder / "store")
    for outcome in verify(store, number, folder):
        if outcome.state == "damaged":
            raise CheckpointError(
                f"{folder}: {outcome.part} is damaged ({outcome.text}); copy the export again"
            )
    try:
        manifest = manifests.load(store, manifests.manifest_name(number)).manifest
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}; copy the export again") from None
    for index in manifest.shards:  # segments that cannot be opened are not damaged for `verify`
        if not (folder / f"shard-{index}" / "segments").is_dir():
            raise CheckpointError(f"{folder}: shard-{index}/segments is missing; copy the export again")
        with shard_segments(manifest, schema_of(store, manifest), index, folder):
            pass
    return store, manifest
