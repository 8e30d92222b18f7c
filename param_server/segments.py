"""Committed rows of one shard: segments, each the changes of one commit, and which of them together are the state.

A segment is named `<seq>-<incarnation>`. A commit's state is its list of segments, oldest first: a key's newest entry counts.
`history`, beside the segments (param_server/segment_parts.py), lists the newest commits as this shard knows them:
[[seq, incarnation, [segment…]]…].

**No list grows for ever, and no commit writes everything.** When a list is long, each commit also writes some buckets *whole*:
every row of them, from memory. Older blocks of these buckets are over, and a segment without any other is dropped from the list.
As many rows are written again as had changed, so that disk and time stay within twice what the changes take.

**SegmentDamage is found while memory still has the rows.** With each commit one bucket of the state is read back, and the segment of the
oldest kept commit, before what only older commits need is deleted. The buckets of a damaged part are written whole by the next
commit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from param_server import row_block as blocks
from param_server.key_value_store import KeyValueStore
from param_server.row_block import RowBlock
from param_server.segment_parts import BlockEntry, Segment, SegmentBucket, SegmentDirectory, SegmentParts
from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.manifest import KEEP_MANIFESTS, Manifest
from roostream.schema.ids import buckets_of

log = logging.getLogger("roostream.segments")

KEEP_COMMITS = KEEP_MANIFESTS  # a manifest without its segments would be no use
FEW_SEGMENTS, MANY_SEGMENTS = 8, 64
_HISTORY = b"history"
_NAMED = 8
_NONE: frozenset[int] = frozenset()


class Commit(NamedTuple):
    seq: int
    incarnation: int
    segments: tuple[Segment, ...]  # oldest first


EMPTY_COMMIT = Commit(0, 0, ())  # before any commit


class SegmentDamage(NamedTuple):
    """Of one part."""

    buckets: frozenset[int]  # written whole, nothing needs the part any more
    rows: int  # about how many were in it


def commit_of(manifest: Manifest, index: int) -> Commit:
    """What `manifest` names of shard `index`.

    Raises:
        CheckpointError: it names none of this shard's segments.
    """
    try:
        segments = tuple(
            Segment(**{f: s[f] for f in Segment._fields}) for s in manifest.shards[index]["segments"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{manifest.name}: expected the segments of shard {index}, got none that can be read ({error!r})"
        ) from None
    return Commit(manifest.seq, manifest.incarnation, segments)


class Segments:
    """`shapes`: stack → (width, state width); `buckets`: those of this shard, all if left out; `accepted`: names of parts
    whose rows may be lost (`<segment>`, `<segment>/<stack>`, `<segment>/<stack>/<bucket>`). One thread at a time.

    Every method raises UnavailableError where the store can't be read or written now.
    """

    def __init__(
        self,
        store: KeyValueStore,
        shapes: Mapping[str, tuple[int, int]],
        num_buckets: int,
        *,
        buckets: Iterable[int] | None = None,
        accepted: Iterable[str] = (),
        keep: int = KEEP_COMMITS,
    ) -> None:
        self.store, self.shapes, self.num_buckets = store, dict(shapes), num_buckets
        self.buckets = tuple(range(num_buckets) if buckets is None else buckets)
        self.accepted, self.keep = frozenset(accepted), keep
        self.damaged: dict[str, SegmentDamage] = {}  # parts of the last commit's state
        self.num_damaged = 0  # parts found damaged since the start
        self.lost: set[str] = set()  # accepted parts that the last restore did without
        self.moved = False  # memory has rows in other stacks than the segments: the next commit writes every bucket whole
        self._parts = SegmentParts(store, shapes)
        self._restored: Commit | None = None  # since the last `commit`
        self._read_back = ""  # the segment that was read back last

    # Writing

    def to_rewrite(self, base: Sequence[Segment], share: float) -> frozenset[int]:
        """Buckets that the next segment over `base` should hold whole, where `share` of the rows have changed: those of damaged
        parts, and where the list is long that share of all, the oldest segment's first. None where nothing changed; all where
        rows have moved."""
        if self.moved:
            return frozenset(self.buckets)
        chosen: list[int] = []
        if len(base) >= FEW_SEGMENTS and share > 0:
            number = math.ceil(len(self.buckets) * min(max(share, 1 / MANY_SEGMENTS), 1))
            by_age = [bucket for live in self._live(base) for bucket in sorted(live)]
            chosen = list(dict.fromkeys(by_age))[:number]
        return frozenset(chosen).union(*(damage.buckets for damage in self.damaged.values()))

    def write(
        self,
        name: str,
        changes: Mapping[str, RowBlock],
        base: Sequence[Segment],
        residency: Mapping[str, bytes] | None = None,
        whole: frozenset[int] = _NONE,
    ) -> tuple[Segment, ...]:
        """Store `changes` (stack → block; every row of the buckets in `whole`) over `base`, and `residency` (stack → its policy's
        state; left out where it is empty); the new state's segments. Durable when it returns, part of nothing until a manifest
        names it.

        **If it fails:** `base` is as it was and nothing is left of `name`, or what is left goes with the next `commit`.
        """
        kept = {stack: state for stack, state in (residency or {}).items() if state}
        if (
            not any(len(block.keys) for block in changes.values())
            and not whole
            and self._has_residency(base, kept)
        ):
            return tuple(base)
        return self.write_parts(name, self._split(changes), base, kept, whole)

    def write_parts(
        self,
        name: str,
        parts: Iterable[SegmentBucket],
        base: Sequence[Segment],
        residency: Mapping[str, bytes] | None = None,
        whole: frozenset[int] = _NONE,
    ) -> tuple[Segment, ...]:
        """As `write`, of parts of one block that come one by one, also where there are none."""
        try:
            state = (*base, self._parts.write(name, parts, whole, residency or {}))
            return tuple(
                s for s, live in zip(state, self._live(state), strict=True) if live or s.name == name
            )
        except (CheckpointError, UnavailableError):
            self.discard(name)
            raise

    def discard(self, name: str) -> None:
        """A segment that will not be committed; never raises, since the next `commit` deletes what is left of it."""
        try:
            self._parts.delete([name])
        except (CheckpointError, UnavailableError) as error:
            log.warning("an abandoned segment could not be deleted (%s); the next commit tries again", error)

    def commit(self, commit: Commit) -> None:
        """A manifest names this state: remember it, read a part of it back, and delete what none of the newest `keep`
        needs. Nothing is deleted while something is damaged."""
        self.moved = False
        history = self._remember(commit)
        self._forget_healed(commit.segments)
        if history:
            self._scrub(history)
        if not self.damaged:
            kept = {s.name for past in history for s in past.segments}
            self._parts.delete([name for name in self._parts.names() if name not in kept])

    def restored(self, commit: Commit, linked: Collection[int] | None = None) -> None:
        """The state is this one again; later ones are abandoned, but forgotten only with the next commit. Writes nothing, so
        that a full disk can't refuse a restore, but deletes what belongs to no commit, if it can: segments whose number is
        not in `linked`, those of all manifests (None: nobody knows)."""
        self._restored = commit
        if linked is None:
            return
        try:
            kept = {s.name for past in (*self.history(), commit) for s in past.segments}
            abandoned = [n for n in self._parts.names() if n not in kept and _seq_of(n) not in linked]
        except (CheckpointError, UnavailableError) as error:
            log.warning("abandoned segments could not be looked for (%s); the next commit tries again", error)
            return
        for name in abandoned:
            self.discard(name)

    # Reading

    def read(
        self, segments: Sequence[Segment], buckets: Mapping[str, Collection[int]] | None = None
    ) -> Iterator[SegmentBucket]:
        """Every part of a state (of this shard's buckets, or of the given stacks'), verified as it is read. Marks of what is
        unpublished are those of the newest segment: older ones mean nothing any more. Stacks that the schema doesn't have now
        come first, unless `buckets` are given. Accepted parts that can't be read are passed over; `lost` and `damaged` then
        have them.

        Raises:
            CheckpointError: a segment, or a part of it, is absent or damaged.
        """
        directories = self._directories(segments)
        stacks = {stack for directory in directories for stack in directory.blocks}
        former = sorted(stacks - set(self.shapes)) if buckets is None else []
        for stack in (*former, *self.shapes):
            for bucket in self.buckets if buckets is None else sorted(buckets.get(stack, ())):
                part = list(self._blocks(directories, stack, bucket))
                if part:
                    yield SegmentBucket(
                        stack, bucket, [b if n == segments[-1].name else blocks.published(b) for n, b in part]
                    )

    def residency(self, segments: Sequence[Segment]) -> dict[str, bytes]:
        """Stack → its policy's state in this state; the newest segment has it. Raises as `read`."""
        if not segments or not (directories := self._directories(segments[-1:])):
            return {}
        states = {}
        for stack, checksum in directories[0].residency.items():
            try:
                states[stack] = self._parts.residency(segments[-1].name, stack, checksum)
            except CheckpointError as error:
                self._accept(f"{segments[-1].name}/{stack}/residency", SegmentDamage(_NONE, 0), error)
        return states

    def history(self) -> list[Commit]:
        """Oldest first."""
        data = self.store.get(_HISTORY)
        if data is None:
            return []
        try:
            return [
                Commit(seq, inc, tuple(Segment(*s) for s in segments))
                for seq, inc, segments in msgspec.json.decode(data)
            ]
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise CheckpointError(f"the list of commits of this shard is damaged: {error}") from None

    def check(self, segments: Sequence[Segment], buckets: Collection[int]) -> dict[str, SegmentDamage]:
        """Damaged parts of a state, as far as these buckets need them."""
        found: dict[str, SegmentDamage] = {}
        directories: list[SegmentDirectory] = []
        for segment in reversed(segments):
            try:
                directories.append(self._parts.directory(segment))
            except CheckpointError:
                found[segment.name] = SegmentDamage(frozenset(self.buckets), segment.rows)
        stacks = {*self.shapes, *(stack for directory in directories for stack in directory.blocks)}
        wanted = [(stack, bucket) for stack in sorted(stacks) for bucket in buckets]
        for stack, bucket in wanted:
            for name, entry in _entries(directories, stack, bucket):
                try:
                    self._parts.block(name, stack, bucket, entry)
                except CheckpointError:
                    found[f"{name}/{stack}/{bucket}"] = SegmentDamage(
                        frozenset({bucket}), self._rows_in(stack, entry)
                    )
        for stack, checksum in directories[0].residency.items() if directories else ():
            try:
                self._parts.residency(directories[0].name, stack, checksum)
            except CheckpointError:
                found[f"{directories[0].name}/{stack}/residency"] = SegmentDamage(_NONE, 0)
        return found

    def explain(self, segments: Sequence[Segment]) -> str:
        """Which rows of a state are lost, and how to go on without them."""
        found = self.check(segments, self.buckets)
        if not found:
            return "it could be read a moment later: restore it again"
        named = ", ".join(
            f"{part} (about {damage.rows} rows)" for part, damage in list(found.items())[:_NAMED]
        )
        more = f" and {len(found) - _NAMED} more parts" if len(found) > _NAMED else ""
        parts = found if len(found) <= _NAMED else dict.fromkeys(part.split("/")[0] for part in found)
        accepted = ", ".join(f'"{part}"' for part in parts)
        return (
            f"damaged of {segments[-1].name} are {named}{more}; bring the shard's home back from a backup, or go on without "
            f"these rows by accept_lost_rows = [{accepted}] in the shard's settings"
        )

    def _directories(self, segments: Sequence[Segment]) -> list[SegmentDirectory]:
        """Newest first."""
        found = []
        for segment in reversed(segments):
            try:
                found.append(self._parts.directory(segment))
            except CheckpointError as error:
                self._accept(segment.name, SegmentDamage(frozenset(self.buckets), segment.rows), error)
        return found

    def _blocks(
        self, directories: Sequence[SegmentDirectory], stack: str, bucket: int
    ) -> Iterator[tuple[str, RowBlock]]:
        """(segment, block), newest first."""
        for name, entry in _entries(directories, stack, bucket):
            try:
                yield name, self._parts.block(name, stack, bucket, entry)
            except CheckpointError as error:
                self._accept(
                    f"{name}/{stack}/{bucket}",
                    SegmentDamage(frozenset({bucket}), self._rows_in(stack, entry)),
                    error,
                )

    def _accept(self, part: str, damage: SegmentDamage, error: CheckpointError) -> None:
        """Go on without a part, if the settings say so."""
        names = part.split("/")
        if self.accepted.isdisjoint("/".join(names[:n]) for n in range(1, len(names) + 1)):
            raise error
        log.error("about %d rows are lost, as the settings accept: %s", damage.rows, error)
        self.lost.add(part)
        self.damaged[part] = damage

    def _rows_in(self, stack: str, entry: BlockEntry) -> int:
        return blocks.rows_in(entry.bytes, *self._parts.shape(stack))

    def bytes_by_bucket(self, segments: Sequence[Segment]) -> dict[int, int]:
        """What a state holds of this shard's buckets, as its directories say. Raises as `read`."""
        directories = self._directories(segments)
        stacks = {stack for directory in directories for stack in directory.blocks}
        return {
            b: sum(entry.bytes for s in stacks for _, entry in _entries(directories, s, b))
            for b in self.buckets
        }

    # Which parts a state needs

    def _live(self, state: Sequence[Segment]) -> list[frozenset[int]]:
        """Buckets of each segment whose blocks are not over; all of this shard's that could be where its directory is damaged."""
        own, over = frozenset(self.buckets), set[int]()
        out: list[frozenset[int]] = []
        for segment in reversed(state):
            try:
                directory = self._parts.directory(segment)
                held, whole = (
                    [b for stack in self.shapes for b in directory.blocks.get(stack, ())],
                    directory.whole,
                )
            except CheckpointError:
                self._found({segment.name: SegmentDamage(frozenset(self.buckets), segment.rows)})
                held, whole = list(self.buckets), _NONE
            out.append(own.intersection(held) - over)
            over |= whole
        return out[::-1]

    def _has_residency(self, base: Sequence[Segment], states: Mapping[str, bytes]) -> bool:
        try:
            return not self.damaged and self.residency(base) == states
        except CheckpointError:
            return False

    def _scrub(self, history: Sequence[Commit]) -> None:
        newest, oldest = history[-1], history[0].segments[-1]
        found = self.check(newest.segments, [self.buckets[newest.seq % len(self.buckets)]])
        if oldest.name != self._read_back:
            found |= self.check([oldest], self.buckets)
        self._read_back = oldest.name
        self._found(found)

    def _found(self, damaged: Mapping[str, SegmentDamage]) -> None:
        for part, damage in damaged.items():
            if part not in self.damaged:
                log.error(
                    "segment part %s is damaged; its rows are in memory, and the next commit writes them again",
                    part,
                )
                self.num_damaged += 1
                self.damaged[part] = damage

    def _forget_healed(self, state: Sequence[Segment]) -> None:
        live = dict(zip((s.name for s in state), self._live(state), strict=True)) if self.damaged else {}
        newest = state[-1].name if state else ""
        for part, damage in list(self.damaged.items()):
            name = part.split("/")[0]
            if name != newest and not damage.buckets & live.get(name, _NONE):
                log.info("segment part %s is not needed any more", part)
                del self.damaged[part]

    def _remember(self, commit: Commit) -> list[Commit]:
        try:
            past = self.history()
        except CheckpointError as error:  # it only says what may be deleted: begin a new one
            log.warning("%s", error)
            past = []
        for newer in (self._restored, commit):
            if newer is not None:
                past = [*(c for c in past if c.seq < newer.seq), newer]
        history = [c for c in past if c.segments][-self.keep :]
        self.store.write([(_HISTORY, msgspec.json.encode(history))], sync=True)
        self._restored = None
        return history

    def _split(self, changes: Mapping[str, RowBlock]) -> Iterator[SegmentBucket]:
        for stack, block in changes.items():
            bucket_K = buckets_of(block.keys.id_U, block.keys.table_U, self.num_buckets)
            for bucket, part in blocks.split_by_bucket(block, bucket_K).items():
                yield SegmentBucket(stack, bucket, [part])


def _entries(
    directories: Sequence[SegmentDirectory], stack: str, bucket: int
) -> Iterator[tuple[str, BlockEntry]]:
    """Newest first, as they are given, down to where the bucket is whole."""
    for directory in directories:
        entry = directory.blocks.get(stack, {}).get(bucket)
        if entry:
            yield directory.name, entry
        if bucket in directory.whole:
            return


def _seq_of(name: str) -> int:
    return int(name.split("-", 1)[0])
