"""Committed rows of one shard: segments, each with the changes of one commit, and which of them together are
the state.

A segment is named `<seq>-<incarnation>`. A commit's state is its list of segments, oldest first: the newest
entry of a key counts. `history`, beside the segments (param_server/segment_parts.py), lists the newest
commits of this shard: [[seq, incarnation, [segment…]]…]. `store`, also beside them, is the identity of the
checkpoint store whose manifests name the segments (roostream/runtime/store_identity.py).

**Lists do not grow for ever, and no commit writes everything.** When a list is long, each commit also writes
some buckets *completely*: every row of them, from memory. Older blocks of these buckets are obsolete, and a
segment without any other block is dropped from the list. As many rows are rewritten as have changed, so disk
and time stay within twice what the changes take.

**Damage is found while memory still has the rows.** Each commit reads back one bucket of the state, and the
segment of the oldest kept commit, before it deletes what only older commits need. The next commit rewrites
the buckets of a damaged part completely.

**A commit is durable where its manifest is.** `send` copies new segments to the checkpoint store before they
are committed, and `fetch` brings back what a lost or damaged disk does not have (segment_copies.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from param_server import row_block as blocks
from param_server.key_value_store import KeyValueStore
from param_server.row_block import RowBlock
from param_server.segment_copies import SegmentCopies
from param_server.segment_parts import BlockEntry, Segment, SegmentBucket, SegmentDirectory, SegmentParts
from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.manifest import KEEP_MANIFESTS, Manifest, StoredFile
from roostream.schema.ids import buckets_of

log = logging.getLogger("roostream.segments")

KEEP_COMMITS = KEEP_MANIFESTS  # a manifest is useless without its segments
FEW_SEGMENTS, MANY_SEGMENTS = 8, 64
_HISTORY, STORE_KEY = b"history", b"store"
_NUM_STORED = len(Segment._fields) - 1  # the manifest says where the copies are
_NAMED = 8
_NONE: frozenset[int] = frozenset()


class Commit(NamedTuple):
    """This shard's part of a commit."""

    seq: int
    incarnation: int
    segments: tuple[Segment, ...]  # oldest first


EMPTY_COMMIT = Commit(0, 0, ())  # before any commit


class SegmentDamage(NamedTuple):
    """A damaged part of a segment."""

    buckets: frozenset[int]  # once they are rewritten completely, the part is not needed
    rows: int  # about how many rows it has


def commit_of(manifest: Manifest, index: int) -> Commit:
    """What `manifest` names of shard `index`.

    Raises:
        CheckpointError: it names no segments of this shard.
    """
    try:
        segments = tuple(Segment.from_plain(s) for s in manifest.shards[index]["segments"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{manifest.name}: expected the segments of shard {index}, got something else ({error!r})"
        ) from None
    return Commit(manifest.seq, manifest.incarnation, segments)


class Segments:
    """The segments of one shard. One thread at a time.

    `shapes`: stack → (width, state width). `buckets`: the shard's buckets, None = all. `accepted`: names of
    parts whose rows may be lost (`<segment>`, `<segment>/<stack>`, `<segment>/<stack>/<bucket>`).
    `store_id`: the checkpoint store of the commits, remembered with the next segment; "" = not known.

    Every method raises UnavailableError if the store cannot be read or written now.
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
        store_id: str = "",
    ) -> None:
        self.store, self.shapes, self.num_buckets = store, dict(shapes), num_buckets
        self.buckets = tuple(range(num_buckets) if buckets is None else buckets)
        self.accepted, self.keep, self.store_id = frozenset(accepted), keep, store_id
        self.damaged: dict[str, SegmentDamage] = {}  # damaged parts of the last commit's state
        self.num_damaged = 0  # damaged parts found since the start
        self.lost: set[str] = set()  # accepted parts that the last restore skipped
        self.needs_rewrite = False  # rows have moved to other stacks: the next commit rewrites every bucket
        self.parts = SegmentParts(store, shapes)
        self._log_rate_limit = LogRateLimit()
        self._restored: Commit | None = None  # since the last `commit`
        self._read_back = ""  # segment that was read back last
        self._sent: dict[str, StoredFile] = {}  # segment → its copy that no manifest names yet

    def buckets_to_rewrite(self, base: Sequence[Segment], share: float) -> frozenset[int]:
        """Buckets that the next segment over `base` should hold completely, where `share` of the rows have
        changed.

        Those of damaged parts; and if the list is long, that share of all buckets, the oldest segment's
        first. None if nothing changed; all if rows have moved to other stacks.
        """
        if self.needs_rewrite:
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
        policy_states: Mapping[str, bytes] | None = None,
        complete: frozenset[int] = _NONE,
    ) -> tuple[Segment, ...]:
        """Store `changes` (stack → block; every row of the buckets in `complete`) over `base`; return the
        segments of the new state.

        `policy_states`: stack → state of its eviction policy; empty ones are left out. The segment is durable
        on return, and part of nothing until a manifest names it.

        **If it fails:** `base` is unchanged. What is left of segment `name` is deleted with the next
        `commit`.
        """
        parts = (
            SegmentBucket(stack, bucket, [part])
            for stack, block in changes.items()
            for bucket, part in blocks.split_by_bucket(
                block, buckets_of(block.keys.id_U, block.keys.table_U, self.num_buckets)
            ).items()
        )
        num_keys = sum(len(block.keys) for block in changes.values())
        return self.write_parts(name, parts, base, policy_states, complete, num_keys=num_keys)

    def write_parts(
        self,
        name: str,
        parts: Iterable[SegmentBucket],
        base: Sequence[Segment],
        policy_states: Mapping[str, bytes] | None = None,
        complete: frozenset[int] = _NONE,
        *,
        num_keys: int | None = None,
        num_bytes: int = 0,
    ) -> tuple[Segment, ...]:
        """As `write`, of changes that come part by part (see `SegmentParts.write`). `num_keys`: number of
        their keys; None: a segment is written even if there are none. `num_bytes`: about how many they are
        in bytes; if the disk has no space for them, nothing is written."""
        states = {stack: state for stack, state in (policy_states or {}).items() if state}
        if num_keys == 0 and not complete and self._has_policy_states(base, states):
            return tuple(base)
        self.store.check_space(num_bytes)
        try:
            self._remember_store()
            state = (*base, self.parts.write(name, parts, complete, states))
            return tuple(
                s for s, live in zip(state, self._live(state), strict=True) if live or s.name == name
            )
        except (CheckpointError, UnavailableError):
            self.discard(name)
            raise

    def send(
        self, state: Sequence[Segment], copies: SegmentCopies, on_progress: Callable[[], None] = lambda: None
    ) -> tuple[Segment, ...]:
        """Copy those segments of a state to the checkpoint store that have no copy yet; return the state with
        its copies.

        **If it fails** (UnavailableError, or CheckpointError: a segment is damaged here, and the next commit
        rewrites its rows): call it again; it continues with the segment that failed.
        """
        for segment in state:
            if segment.copy is None and segment.name not in self._sent:
                try:
                    self._sent[segment.name] = copies.send(self.parts, segment, on_progress)
                except CheckpointError:
                    self._note_damage({segment.name: SegmentDamage(frozenset(self.buckets), segment.rows)})
                    raise
        return tuple(s if s.copy else s._replace(copy=self._sent[s.name]) for s in state)

    def fetch(
        self,
        segments: Iterable[Segment],
        copies: SegmentCopies,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Replace these segments by their copies in the checkpoint store; returns what is wrong with copies,
        whose segments stay as they are. Those without a copy are left out."""
        problems = []
        for segment in segments:
            if segment.copy is not None:
                self._remember_store()
                try:
                    copies.fetch(self.parts, segment, on_progress)
                except CheckpointError as error:
                    log.error("%s", error)
                    problems.append(str(error))
        return problems

    def absent(self, state: Sequence[Segment]) -> list[Segment]:
        """The segments of a state that are not here, or whose directory is damaged."""
        return [segment for segment in state if not self.parts.has_directory(segment)]

    def discard(self, name: str) -> None:
        """Delete a segment that will not be committed. Never raises: the next `commit` deletes what is
        left."""
        self._sent.pop(name, None)
        try:
            self.parts.delete([name])
        except (CheckpointError, UnavailableError) as error:
            text = "an aborted segment could not be deleted (%s); the next commit tries again"
            self._log_rate_limit.warning(log, "discard", text, error)

    def commit(self, commit: Commit) -> None:
        """A manifest names this state: record it, read a part of it back, and delete what none of the newest
        `keep` commits needs.

        Nothing is deleted while something is damaged.
        """
        self.needs_rewrite = False
        self._sent.clear()
        history = self._remember(commit)
        self._drop_obsolete_damage(commit.segments)
        if history:
            self._scrub(history)
        if not self.damaged:
            kept = {s.name for past in history for s in past.segments}
            self.parts.delete([name for name in self.parts.names() if name not in kept])

    def note_restored(self, commit: Commit, linked: Collection[int] | None = None) -> None:
        """Remember that the shard was restored to `commit`. The next commit drops the commits after it.

        If the shard was never told that `commit` succeeded, it is recorded now. Segments that belong to no
        commit are deleted: those whose number is not in `linked`, the numbers of all manifests. With None the
        manifests are unknown, and nothing is deleted. If a step fails, for example on a full disk, a warning
        is logged, and the restore goes on.
        """
        self._restored = commit
        self._sent.clear()
        try:
            history = self.history()
            if linked is not None:  # first: it may free the space for the record
                kept = {s.name for past in (*history, commit) for s in past.segments}
                for name in self.parts.names():
                    if name not in kept and int(name.partition("-")[0]) not in linked:
                        self.discard(name)
            if commit.segments and commit.seq > max((past.seq for past in history), default=0):
                self._write_history([*history, commit])
        except (CheckpointError, UnavailableError) as error:
            log.warning("the restored commit could not be recorded (%s); the next commit tries again", error)

    def read(
        self, segments: Sequence[Segment], buckets: Mapping[str, Collection[int]] | None = None
    ) -> Iterator[SegmentBucket]:
        """Every part of a state (of this shard's buckets, or of the given stacks' buckets), verified as it is
        read.

        Unpublished marks of the newest segment are kept; older ones are obsolete. Stacks that the schema does
        not have any more come first, unless `buckets` are given. Accepted parts that cannot be read are
        skipped and added to `lost` and `damaged`.

        Raises:
            CheckpointError: a segment or a part of it is absent or damaged.
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

    def policy_states(self, segments: Sequence[Segment]) -> dict[str, bytes]:
        """Stack → state of its eviction policy in this state, from the newest segment. Raises as `read`."""
        if not segments or not (directories := self._directories(segments[-1:])):
            return {}
        states = {}
        for stack, checksum in directories[0].policy_checksums.items():
            try:
                states[stack] = self.parts.policy_state(segments[-1].name, stack, checksum)
            except CheckpointError as error:
                self._accept(f"{segments[-1].name}/{stack}/residency", SegmentDamage(_NONE, 0), error)
        return states

    def remembered_store(self) -> str:
        """Identity of the checkpoint store that the segments belong to; "" if none was written since stores
        have identities."""
        return (self.store.get(STORE_KEY) or b"").decode("ascii", "replace")

    def _remember_store(self) -> None:
        """Before the first segment, so that no other store decides about it."""
        if self.store_id and self.remembered_store() != self.store_id:
            self.store.write([(STORE_KEY, self.store_id.encode())])

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written here."""
        return not self.remembered_store() and not self.parts.names() and self.store.get(_HISTORY) is None

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

    def check(
        self,
        segments: Sequence[Segment],
        buckets: Collection[int],
        on_progress: Callable[[], None] = lambda: None,
    ) -> dict[str, SegmentDamage]:
        """Damaged parts of a state that these buckets need. `on_progress` is called after each bucket of a
        stack."""
        found: dict[str, SegmentDamage] = {}
        directories: list[SegmentDirectory] = []
        for segment in reversed(segments):
            try:
                directories.append(self.parts.directory(segment))
            except CheckpointError:
                found[segment.name] = SegmentDamage(frozenset(self.buckets), segment.rows)
        stacks = {*self.shapes, *(stack for directory in directories for stack in directory.blocks)}
        wanted = [(stack, bucket) for stack in sorted(stacks) for bucket in buckets]
        for stack, bucket in wanted:
            for name, entry in _entries(directories, stack, bucket):
                try:
                    self.parts.block(name, stack, bucket, entry)
                except CheckpointError:
                    found[f"{name}/{stack}/{bucket}"] = SegmentDamage(
                        frozenset({bucket}), self._rows_in(stack, entry)
                    )
            on_progress()
        for stack, checksum in directories[0].policy_checksums.items() if directories else ():
            try:
                self.parts.policy_state(directories[0].name, stack, checksum)
            except CheckpointError:
                found[f"{directories[0].name}/{stack}/residency"] = SegmentDamage(_NONE, 0)
        return found

    def explain_damage(
        self, segments: Sequence[Segment], on_progress: Callable[[], None] = lambda: None
    ) -> str:
        """Return a text that says which rows of a state are lost and how to continue without them.
        `on_progress`: as for `check`."""
        found = self.check(segments, self.buckets, on_progress)
        if not found:
            return "no damage was found a moment later; restore again"
        named = ", ".join(
            f"{part} (about {damage.rows} rows)" for part, damage in list(found.items())[:_NAMED]
        )
        more = f" and {len(found) - _NAMED} more parts" if len(found) > _NAMED else ""
        parts = found if len(found) <= _NAMED else dict.fromkeys(part.split("/")[0] for part in found)
        accepted = ", ".join(f'"{part}"' for part in parts)
        return (
            f"damaged of {segments[-1].name} are {named}{more}; restore the shard's home from a backup, "
            f"or continue without these rows by accept_lost_rows = [{accepted}] in the shard's settings"
        )

    def _directories(self, segments: Sequence[Segment]) -> list[SegmentDirectory]:
        """Newest first."""
        found = []
        for segment in reversed(segments):
            try:
                found.append(self.parts.directory(segment))
            except CheckpointError as error:
                self._accept(segment.name, SegmentDamage(frozenset(self.buckets), segment.rows), error)
        return found

    def _blocks(
        self, directories: Sequence[SegmentDirectory], stack: str, bucket: int
    ) -> Iterator[tuple[str, RowBlock]]:
        """(segment, block), newest first."""
        for name, entry in _entries(directories, stack, bucket):
            try:
                yield name, self.parts.block(name, stack, bucket, entry)
            except CheckpointError as error:
                self._accept(
                    f"{name}/{stack}/{bucket}",
                    SegmentDamage(frozenset({bucket}), self._rows_in(stack, entry)),
                    error,
                )

    def _accept(self, part: str, damage: SegmentDamage, error: CheckpointError) -> None:
        """Continue without a part if the settings allow it, else raise the error."""
        names = part.split("/")
        if self.accepted.isdisjoint("/".join(names[:n]) for n in range(1, len(names) + 1)):
            raise error
        log.error("about %d rows are lost, as accept_lost_rows allows: %s", damage.rows, error)
        self.lost.add(part)
        self.damaged[part] = damage

    def _rows_in(self, stack: str, entry: BlockEntry) -> int:
        return blocks.rows_in(entry.bytes, *self.parts.shape(stack))

    def bytes_by_bucket(self, segments: Sequence[Segment]) -> dict[int, int]:
        """Bytes of a state in each bucket of this shard, from directories alone. Raises as `read`."""
        directories = self._directories(segments)
        stacks = {stack for directory in directories for stack in directory.blocks}
        return {
            b: sum(entry.bytes for s in stacks for _, entry in _entries(directories, s, b))
            for b in self.buckets
        }

    def _live(self, state: Sequence[Segment]) -> list[frozenset[int]]:
        """Buckets of each segment whose blocks are not obsolete; if a directory is damaged, all that it could
        hold."""
        own, obsolete = frozenset(self.buckets), set[int]()
        out: list[frozenset[int]] = []
        for segment in reversed(state):
            try:
                directory = self.parts.directory(segment)
                stored = [b for stack in self.shapes for b in directory.blocks.get(stack, ())]
                complete = directory.complete
            except CheckpointError:
                self._note_damage({segment.name: SegmentDamage(frozenset(self.buckets), segment.rows)})
                stored, complete = list(self.buckets), _NONE
            out.append(own.intersection(stored) - obsolete)
            obsolete |= complete
        return out[::-1]

    def _has_policy_states(self, base: Sequence[Segment], states: Mapping[str, bytes]) -> bool:
        try:
            return not self.damaged and self.policy_states(base) == states
        except CheckpointError:
            return False

    def _scrub(self, history: Sequence[Commit]) -> None:
        newest, oldest = history[-1], history[0].segments[-1]
        found = self.check(newest.segments, [self.buckets[newest.seq % len(self.buckets)]])
        if oldest.name != self._read_back:
            found |= self.check([oldest], self.buckets)
        self._read_back = oldest.name
        self._note_damage(found)

    def _note_damage(self, damaged: Mapping[str, SegmentDamage]) -> None:
        for part, damage in damaged.items():
            if part not in self.damaged:
                log.error(
                    "segment part %s is damaged; its rows are in memory, and the next commit rewrites them",
                    part,
                )
                self.num_damaged += 1
                self.damaged[part] = damage

    def _drop_obsolete_damage(self, state: Sequence[Segment]) -> None:
        live = dict(zip((s.name for s in state), self._live(state), strict=True)) if self.damaged else {}
        newest = state[-1].name if state else ""
        for part, damage in list(self.damaged.items()):
            name = part.split("/")[0]
            if name != newest and not damage.buckets & live.get(name, _NONE):
                log.info("damaged segment part %s is not needed any more", part)
                del self.damaged[part]

    def _remember(self, commit: Commit) -> list[Commit]:
        try:
            past = self.history()
        except CheckpointError as error:  # it only tells what may be deleted: start a new one
            log.warning("%s", error)
            past = []
        for newer in (self._restored, commit):
            if newer is not None:
                past = [*(c for c in past if c.seq < newer.seq), newer]
        history = self._write_history([c for c in past if c.segments])
        self._restored = None
        return history

    def _write_history(self, commits: Sequence[Commit]) -> list[Commit]:
        """Store the newest `keep` of these commits, and return them."""
        history = list(commits[-self.keep :])
        listed = [(c.seq, c.incarnation, [s[:_NUM_STORED] for s in c.segments]) for c in history]
        self.store.write([(_HISTORY, msgspec.json.encode(listed))], sync=True)
        return history


def _entries(
    directories: Sequence[SegmentDirectory], stack: str, bucket: int
) -> Iterator[tuple[str, BlockEntry]]:
    """Entries of a bucket, newest first, down to the segment that has it completely."""
    for directory in directories:
        for entry in directory.blocks.get(stack, {}).get(bucket, ()):
            yield directory.name, entry
        if bucket in directory.complete:
            return
