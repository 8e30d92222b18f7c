"""Committed rows of one shard: segments, each the changes of one commit, and which of them together are the state.

    d/<segment>                     directory: what the segment consists of, with checksums; empty while it is being written
    b/<segment>/<stack>/<bucket>    one block (param_server/row_block.py)
    r/<segment>/<stack>             what the stack's residency policy knew at that commit, if it keeps anything
    history                         the newest commits, as this shard knows them: [[seq, incarnation, [segment…]]…]

A segment is named `<seq>-<incarnation>`. A commit's state is its list of segments, oldest first: a key's newest entry
counts. When the changes outweigh the first segment, the next commit writes everything into one segment instead, merged
bucket by bucket from what is stored, so that training does not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from param_server import row_block as blocks
from param_server.blobs import Blobs
from param_server.index import KeyIndex
from param_server.row_block import RowBlock
from roo.errors import CheckpointError
from roo.ids import buckets_of
from runtime.manifest import Manifest

log = logging.getLogger("roostream.segments")

FORMAT = 1
KEEP_COMMITS = 3
MIN_MERGE, MAX_SEGMENTS = 8, 64
_BATCH_BYTES = 8 << 20
_HISTORY = b"history"


class Segment(NamedTuple):
    """As a manifest names it."""

    name: str
    rows: int
    bytes: int
    checksum: str  # of its directory, xxh3-64 in hex; the directory has those of the blocks


class SegmentBucket(NamedTuple):
    """A bucket's keys in every segment of a commit."""

    stack: str
    bucket: int
    blocks: list[RowBlock]  # newest first


class Commit(NamedTuple):
    seq: int
    incarnation: int
    segments: tuple[Segment, ...]  # oldest first


BEGINNING = Commit(0, 0, ())  # before any commit


def commit_of(manifest: Manifest, index: int) -> Commit:
    """What `manifest` names of shard `index`.

    Raises:
        CheckpointError: it names none of this shard's segments.
    """
    try:
        segments = tuple(Segment(**{f: s[f] for f in Segment._fields}) for s in manifest.shards[index]["segments"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{manifest.name}: expected the segments of shard {index}, got none that can be read ({error!r})"
        ) from None
    return Commit(manifest.seq, manifest.incarnation, segments)


class Segments:
    """`shapes`: stack → (width, state width). One thread at a time."""

    def __init__(self, store: Blobs, shapes: Mapping[str, tuple[int, int]], num_buckets: int) -> None:
        self.store, self.shapes, self.num_buckets = store, dict(shapes), num_buckets
        self._restored: Commit | None = None  # since the last `commit`

    def write(
        self, name: str, changes: Mapping[str, RowBlock], base: Sequence[Segment], residency: Mapping[str, bytes] | None = None
    ) -> tuple[Segment, ...]:
        """Store `changes` (stack → block) over `base`, and `residency` (stack → its policy's state; left out where it is empty);
        the new state's segments. Durable when it returns, part of nothing until a manifest names it.

        **If it fails** (CheckpointError): `base` is as it was; call again, or leave the rest to the next `commit`.
        """
        kept = {stack: state for stack, state in (residency or {}).items() if state}
        if not any(len(block.keys) for block in changes.values()) and kept == self.residency(base):
            return tuple(base)
        merging = len(base) >= MAX_SEGMENTS or (len(base) >= MIN_MERGE and sum(s.rows for s in base[1:]) >= base[0].rows)
        self._delete([name])
        self.store.write([(_directory_key(name), b"")])
        segment = self._write_blocks(name, self._merged(changes, base) if merging else self._split(changes), kept)
        return (segment,) if merging else (*base, segment)

    def read(self, segments: Sequence[Segment], buckets: Mapping[str, Collection[int]] | None = None) -> Iterator[SegmentBucket]:
        """Every part of a state (of the given stacks' buckets), verified as it is read. Marks of what is unpublished are those
        of the newest segment: older ones mean nothing any more. Stacks that the schema doesn't have now are passed over.

        Raises:
            CheckpointError: a segment, or a part of it, is absent or damaged.
        """
        directories = [(s.name, self._directory(s)) for s in segments]
        stacks = {stack for _, directory in directories for stack in directory["blocks"]}
        for stack in sorted(stacks - set(self.shapes)):
            log.warning("rows of stack %s are left out: the schema has no such tables any more", stack)
        for stack in self.shapes:
            for bucket in range(self.num_buckets) if buckets is None else sorted(buckets.get(stack, ())):
                found = [(name, d["blocks"].get(stack, {}).get(str(bucket))) for name, d in reversed(directories)]
                part = [(name, self._block(name, stack, bucket, entry)) for name, entry in found if entry]
                if part:
                    yield SegmentBucket(stack, bucket, [b if n == segments[-1].name else blocks.published(b) for n, b in part])

    def residency(self, segments: Sequence[Segment]) -> dict[str, bytes]:
        """Stack → its policy's state in this state; the newest segment has it. Raises as `read`."""
        if not segments:
            return {}
        states: dict[str, bytes] = {}
        for stack, entry in self._directory(segments[-1]).get("residency", {}).items():
            key = _residency_key(segments[-1].name, stack)
            data = self.store.get(key)
            if data is None or f"{blocks.checksum(data, key):016x}" != entry["checksum"]:
                raise CheckpointError(f"segment part {key.decode()} is absent or not the one that was committed: it is damaged")
            states[stack] = data
        return states

    def commit(self, commit: Commit) -> None:
        """A manifest names this state: remember it, and delete what none of the newest KEEP_COMMITS needs."""
        history = self._remember(commit)
        kept = {s.name for past in history for s in past.segments}
        names = [key[2:].decode() for key in self.store.keys(b"d/")]
        self._delete([name for name in names if name not in kept])

    def restored(self, commit: Commit) -> None:
        """The state is this one again; later ones are abandoned, but forgotten only with the next commit. Writes nothing, so
        that a full disk can't refuse a restore."""
        self._restored = commit

    def history(self) -> list[Commit]:
        """Oldest first."""
        data = self.store.get(_HISTORY)
        if data is None:
            return []
        try:
            return [Commit(seq, inc, tuple(Segment(*s) for s in segments)) for seq, inc, segments in msgspec.json.decode(data)]
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise CheckpointError(f"the list of commits of this shard is damaged: {error}") from None

    def _remember(self, commit: Commit) -> list[Commit]:
        try:
            past = self.history()
        except CheckpointError as error:  # it only says what may be deleted: begin a new one
            log.warning("%s", error)
            past = []
        for newer in (self._restored, commit):
            if newer is not None:
                past = [*(c for c in past if c.seq < newer.seq), newer]
        history = [c for c in past if c.segments][-KEEP_COMMITS:]
        self.store.write([(_HISTORY, msgspec.json.encode(history))], sync=True)
        self._restored = None
        return history

    def _split(self, changes: Mapping[str, RowBlock]) -> Iterator[SegmentBucket]:
        for stack, block in changes.items():
            bucket_K = buckets_of(block.keys.id_U, block.keys.table_U, self.num_buckets)
            for bucket, part in blocks.split_by_bucket(block, bucket_K).items():
                yield SegmentBucket(stack, bucket, [part])

    def _merged(self, changes: Mapping[str, RowBlock], base: Sequence[Segment]) -> Iterator[SegmentBucket]:
        """Keys that are gone are dropped, unless readers are yet to be told so."""
        newest = {(p.stack, p.bucket): p.blocks[0] for p in self._split(changes)}
        for part in self.read(base):
            mine = newest.pop((part.stack, part.bucket), None)
            older = [blocks.published(block) for block in part.blocks]
            merged = merge([*([mine] if mine else []), *older], self.num_buckets)
            if len(merged.keys):
                yield SegmentBucket(part.stack, part.bucket, [merged])
        for (stack, bucket), block in newest.items():
            yield SegmentBucket(stack, bucket, [block])

    def _write_blocks(self, name: str, parts: Iterable[SegmentBucket], residency: Mapping[str, bytes]) -> Segment:
        entries: dict[str, dict[str, Any]] = {}
        batch: list[tuple[bytes, bytes]] = []
        waiting = total = rows = 0
        for stack, bucket, (block,) in parts:
            key = _block_key(name, stack, bucket)
            data = blocks.encode(block, key)
            batch.append((key, data))
            entries.setdefault(stack, {})[str(bucket)] = {"bytes": len(data), "checksum": data[-8:].hex()}
            waiting, total, rows = waiting + len(data), total + len(data), rows + len(block.keys)
            if waiting >= _BATCH_BYTES:
                self.store.write(batch)
                batch, waiting = [], 0
        states = [(_residency_key(name, stack), state) for stack, state in residency.items()]
        total += sum(len(state) for _, state in states)
        content: dict[str, Any] = {"format": FORMAT, "name": name, "blocks": entries}
        if states:
            sums = (f"{blocks.checksum(state, key):016x}" for key, state in states)
            content["residency"] = {stack: {"checksum": sum_} for stack, sum_ in zip(residency, sums, strict=True)}
        directory = msgspec.json.encode(content)
        self.store.write([*batch, *states, (_directory_key(name), directory)], sync=True)
        return Segment(name, rows, total, f"{blocks.checksum(directory):016x}")

    def _directory(self, segment: Segment) -> dict[str, Any]:
        data = self.store.get(_directory_key(segment.name))
        if not data:
            raise CheckpointError(f"segment {segment.name} is absent; this shard's data directory is not the one that wrote it")
        if f"{blocks.checksum(data):016x}" != segment.checksum:
            raise CheckpointError(f"segment {segment.name}: expected checksum {segment.checksum}, got another: it is damaged")
        directory = msgspec.json.decode(data)
        if directory["format"] != FORMAT:
            raise CheckpointError(f"segment {segment.name}: expected format {FORMAT}, got {directory['format']}")
        return directory

    def _block(self, name: str, stack: str, bucket: int, entry: Mapping[str, Any]) -> RowBlock:
        key = _block_key(name, stack, bucket)
        data = self.store.get(key)
        if data is None or len(data) != entry["bytes"] or data[-8:].hex() != entry["checksum"]:
            raise CheckpointError(f"segment part {key.decode()} is absent or not the one that was committed: it is damaged")
        return blocks.decode(data, key, *self.shapes[stack])

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            keys = [key for kind in "br" for key in self.store.keys(f"{kind}/{name}/".encode())]
            keys.append(_directory_key(name))
            self.store.write((), keys)


def merge(newest_first: Sequence[RowBlock], num_buckets: int) -> RowBlock:
    """One block with each key's newest entry; gone keys stay only where they are marked unpublished."""
    seen = KeyIndex(num_buckets)
    live, gone = [], []
    for block in newest_first:
        fresh = block.take(seen.add_new(block.keys))
        live.append(fresh.without_gone())
        gone.append(fresh.gone.take(fresh.unpublished_K[fresh.num_live :] != 0))
    return blocks.with_gone(blocks.join(live), gone)


def _directory_key(name: str) -> bytes:
    return f"d/{name}".encode()


def _residency_key(name: str, stack: str) -> bytes:
    return f"r/{name}/{stack}".encode()


def _block_key(name: str, stack: str, bucket: int) -> bytes:
    return f"b/{name}/{stack}/{bucket:05d}".encode()
