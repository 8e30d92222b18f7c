"""One parameter server shard: rows that workers pull and push, and the controller's commands that commit and
restore them.

    RPC calls  pull push read scan owners stats records overwrite contains
                                                    from any thread, checked by ShardRpcHandler
    commands   restore freeze write commit abort    from the controller agent's thread (docs/protocols.md)
    publishing take_round, settle_round, …          from the publisher's thread

One lock makes every call atomic. Work that grows with the rows holds it for some milliseconds at a time, so
calls go on meanwhile; pushes wait for the end of a freeze. Heartbeats read `stats`, which needs no lock.

A commit on a shard (step numbers as in docs/protocols.md):
  4. freeze: evict, start the next generation; training continues from here.
  5. write: find the rows of the generation before and copy them as they were at the freeze, bucket by bucket,
     into a segment.
  7. commit: a manifest names the segment; the older generation is dropped. Or abort: its rows count as
     changed again.
A restore reads committed segments: only the rows that changed in either generation if this process was at the
manifest's state before, else all rows. Until it has succeeded, calls raise UnavailableError.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from param_server.config import ShardIdentity
from param_server.embedding_table import MAX_SLICES, Keys, join_keys, slices_of
from param_server.eviction import EvictionPolicyFactory, ExpiryPolicy
from param_server.gradient_barrier import GradientBarrier, check_workers, sum_pushes
from param_server.outbox import BucketScan, Delta, PlannedDelta, PublishRound, Rollback, run_to_end
from param_server.restore import (
    FrozenCommit,
    RestoreTarget,
    check_home,
    manifest_numbers,
    reload,
    restore_target,
    roll_back,
)
from param_server.row_block import MAX_BLOCK_BYTES, RowBlock, with_gone
from param_server.segment_copies import SegmentCopies
from param_server.segment_parts import Segment, SegmentBucket
from param_server.segments import EMPTY_COMMIT, Commit, Segments
from param_server.table import (
    FrozenRows,
    GradientPush,
    PublishableRows,
    StackTable,
    build_tables,
    check_owned,
)
from roostream.errors import (
    CheckpointError,
    FencedError,
    OtherVersionError,
    RoostreamError,
    SchemaError,
    UnavailableError,
    WireError,
)
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Header
from roostream.runtime.store_identity import check_same_store, ensure_identity
from roostream.schema.ids import buckets_of

log = logging.getLogger("roostream.shard")

T = TypeVar("T")

_SHORT_HOLD_S, _YIELD_S, _FREEZE_YIELD_S = 2e-4, 1e-3, 1e-4
"""After the lock was held for longer than the first, pause for the second before the next step, so that calls
that wait for the lock get their turn. The pause is shorter while a freeze pauses training."""

_BEFORE_ALL = -1
"""An offset that never exists: the publisher finds it gone and tells replicas to bootstrap again."""


class Shard:
    """See the module. Only commands use `segments` and `store`."""

    def __init__(
        self,
        identity: ShardIdentity,
        segments: Segments,
        store: CheckpointStore,
        clock: Clock,
        eviction: EvictionPolicyFactory = ExpiryPolicy,
        *,
        copies: SegmentCopies | None = None,
        uploads: bool = False,
    ) -> None:
        """`uploads`: copy every segment to the checkpoint store before its commit. `copies`: how copies are
        written and read; None = in `store`, with the usual sizes."""
        self.identity, self.segments, self.store, self.clock = identity, segments, store, clock
        self._keep_commits = segments.keep  # of the settings; the controller may want more
        self.copies, self.uploads = copies or SegmentCopies(store, identity.index), uploads
        self.tables = build_tables(identity, eviction)
        self.owners, self.buckets = identity.first_owners, identity.first_owners.buckets_of(identity.index)
        self.incarnation, self.ready = 0, False
        self.committed = EMPTY_COMMIT
        self.num_pulls = self.num_pushes = self.num_repeats = 0
        self._lock = threading.Lock()
        self.barrier = GradientBarrier(self._lock)
        self.sequences: dict[int, int] = {}  # worker → last push applied, in this incarnation
        self._frozen: FrozenCommit | None = None
        self._aborted = 0  # seq; a freeze that comes after its abort is rejected
        self._minimal = False  # the last commit was aborted: the next one rewrites no old buckets
        self._broken = ""  # why calls are rejected until the next restore
        self._consistent = True  # rows = `committed` + changes; False after a restore that failed half-way
        self._rows_end: dict[int, int] = {}
        self._rollback: Rollback | None = None
        self._settled_late: bool | None = None  # outcome of a round that ended during a restore
        self._is_freezing = False
        self._frozen_over = threading.Condition(self._lock)  # a freeze has ended
        # Grows while a command is at work, so that the controller and the agent see that it does not hang.
        self.progress = 0

    # Calls; `ShardRpcHandler` has checked what they carry

    def pull(self, incarnation: int, requests: Sequence[tuple[StackTable, Keys]]) -> list[np.ndarray]:
        """float32 [U, D] for each stack; keys without a row read as their initial value. Incarnation 0 reads
        outside training.

        Raises:
            FencedError: `incarnation` is not this shard's, or another shard owns a key's bucket.
            UnavailableError: the shard has not been restored yet.
        """
        with self._lock:
            self._check(incarnation, reading=True)
            check_owned(self.identity.index, self.owners, [keys for _, keys in requests])
            self.num_pulls += 1
            return [table.embeddings.gather(keys) for table, keys in requests]

    def read(self, requests: Sequence[tuple[StackTable, Keys]]) -> tuple[int, list[PublishableRows]]:
        """(incarnation, each stack's rows as far as they may be published), for readers outside training.
        Raises as `pull`."""
        with self._lock:
            self._check(0, reading=True)
            check_owned(self.identity.index, self.owners, [keys for _, keys in requests])
            return self.incarnation, [
                table.read(keys, self.identity.max_publish_norm) for table, keys in requests
            ]

    def push(self, incarnation: int, update: GradientPush) -> bool:
        """Apply an update completely; False if it had been applied before. Raises as `pull`; then nothing was
        applied.

        The push of one of several workers waits for the others of its step and is applied with them, or not
        at all.

        **If it fails** otherwise, half-way (a defect, no memory): the rows are in no known state. Every later
        call raises UnavailableError, and the controller restores all programs.
        """
        with self._lock:
            self._wait_for_freeze()
            self._check(incarnation)
            check_owned(self.identity.index, self.owners, [keys for _, keys, _ in update.parts])
            if not self._is_next(update.worker, update.sequence):
                self.num_repeats += 1
                return False
            if update.workers > 1 or self.barrier.num_waiting:
                self.barrier.push(update, self._apply)
            else:
                self._apply([update])
        return True

    def overwrite(
        self,
        stack: str,
        block: RowBlock,
        *,
        incarnation: int,
        worker: int = 0,
        sequence: int = 0,
    ) -> bool:
        """Set rows and states that workers have trained; the next commit contains them. `sequence`: number of
        this call among the pushes and writes of `worker` in `incarnation`; 0 = a worker of this process.
        False: it had been applied before.

        Raises:
            UnavailableError: the shard waits to be restored.
            FencedError: `incarnation` is not this shard's, or another shard owns a key's bucket.
        """
        with self._lock:
            self._wait_for_freeze()
            self._check(incarnation)
            check_owned(self.identity.index, self.owners, [block.live])
            if sequence and not self._is_next(worker, sequence):
                self.num_repeats += 1
                return False
            with self._breaking("a write of rows"):
                table = self.tables[stack]
                table.outbox.note_change(table.overwrite(block), 0, 0, self.clock.now_ms())
            if sequence:
                self.sequences[worker] = sequence
        return True

    def records(
        self, incarnation: int, table: StackTable, buckets: Sequence[int], start: int, limit: int
    ) -> tuple[Keys, np.ndarray, np.ndarray, int]:
        """(keys, float32 [M, D], float32 [M, A], end): rows of these buckets with their states, from place
        `start` on, at most `limit`; `end`: how many there are. Places hold until a row is added or removed.
        Raises as `pull`."""
        with self._lock:
            self._check(incarnation)
            row_N = table.index.in_buckets(buckets)
            row_M = row_N[start : start + limit]
            return (
                table.index.keys_at(row_M),
                table.embeddings.rows_ND[row_M],
                table.state_NA[row_M],
                len(row_N),
            )

    def contains(self, incarnation: int, table: StackTable, keys: Keys) -> np.ndarray:
        """bool [M]: the keys that have a row. Raises as `pull`."""
        with self._lock:
            self._check(incarnation)
            check_owned(self.identity.index, self.owners, [keys])
            return table.index.find(keys) >= 0

    def _wait_for_freeze(self) -> None:
        """A push that comes during a freeze belongs to the next generation; called with the lock held. A
        freeze always ends, also if it fails."""
        while self._is_freezing:
            self._frozen_over.wait()

    def _apply(self, pushes: Sequence[GradientPush]) -> None:
        """Apply the pushes of a step as one update; called with the lock held."""
        update = sum_pushes(pushes) if len(pushes) > 1 else pushes[0]
        for table, keys, _ in update.parts:
            table.reserve(len(keys))
        now_ms = self.clock.now_ms()
        with self._breaking("a push"):
            for table, keys, gradient_UD in update.parts:
                touched_B = table.push(keys, gradient_UD, update.time_ms)
                table.outbox.note_change(
                    touched_B, update.oldest_engagement_ms, update.oldest_close_ms, now_ms
                )
        self.sequences.update((push.worker, push.sequence) for push in pushes)
        self.num_pushes += len(pushes)

    def leave(self) -> None:
        """The process stops: abort the open step, so that waiting calls end."""
        with self._lock:
            self.barrier.abort("the shard stops")

    def scan(
        self, table: StackTable, cursor: int, limit: int, max_rows: int
    ) -> tuple[list[BucketScan], list[int], int]:
        """(pages, buckets left, slices of the first one left): complete buckets from number `cursor` on, as
        far as their rows may be published, all at one moment.

        At least one bucket is returned, then more until about `limit` rows. A bucket of more than `max_rows`
        is not returned; if it is the first one, no page is, and the last number says in how many slices
        `scan_slice` gives it, else it is 0. Raises as `pull`.
        """
        pages: list[BucketScan] = []
        with self._lock:
            self._check(0, reading=True)
            left = [bucket for bucket in self.buckets if bucket >= cursor]
            mean_rows = max(table.num_rows // max(len(self.buckets), 1), 1)
            candidates = left[: max(-(-limit // mean_rows), 1)]
            for bucket, row_M in zip(candidates, table.embeddings.rows_by_bucket(candidates), strict=True):
                if sum(len(page.keys) for page in pages) >= max(limit, 1):
                    break
                if len(row_M) > max_rows:
                    num_slices = 1 << (-(-2 * len(row_M) // max_rows) - 1).bit_length()
                    return pages, left[len(pages) :], 0 if pages else num_slices
                pages.append(
                    table.outbox.scan_bucket(bucket, row_M, self.identity.max_publish_norm, self.incarnation)
                )
        return pages, left[len(pages) :], 0

    def scan_slice(self, table: StackTable, bucket: int, index: int, num_slices: int) -> BucketScan:
        """One slice of a bucket (`slices_of`), as it is at this moment. Raises as `pull`."""
        with self._lock:
            self._check(0, reading=True)
            if bucket not in self.buckets:
                raise UnavailableError(
                    f"shard {self.identity.index} does not own bucket {bucket} now; try again"
                )
            row_M = table.embeddings.index.in_buckets((bucket,))
            slice_M = slices_of(table.embeddings.index.keys_at(row_M), self.identity.num_buckets, num_slices)
            return table.outbox.scan_bucket(
                bucket, row_M[slice_M == index], self.identity.max_publish_norm, self.incarnation
            )

    def stats(self) -> dict[str, Any]:
        """Plain numbers for heartbeats, status reports and metrics. Any thread.

        Takes no lock and costs the same for any number of rows, because a heartbeat must not wait for data.
        The numbers may belong to slightly different moments.
        """
        tables = self.tables
        return {
            "ready": self.ready,
            "index": self.identity.index,
            "incarnation": self.incarnation,
            "committed_seq": self.committed.seq,
            "segments": len(self.committed.segments),
            "rows": {name: t.num_rows for name, t in tables.items()},
            "bytes": sum(t.num_bytes for t in tables.values()),
            "dirty": sum(t.num_changed() for t in tables.values()) if self.ready else 0,
            "spared": sum(t.eviction.num_spared for t in tables.values()),
            "withheld": sum(t.outbox.num_withheld for t in tables.values()),
            "limited": sum(t.num_limited for t in tables.values()),
            "largest_accumulator": {name: t.largest_accumulator for name, t in tables.items()},
            "damaged": len(self.segments.damaged),
            "damages": self.segments.num_damaged,
            "sent_bytes": self.copies.sent_bytes,
            "fetched_bytes": self.copies.fetched_bytes,
            "broken": self._broken,
            "pulls": self.num_pulls,
            "pushes": self.num_pushes,
            "repeats": self.num_repeats,
            "waiting": self.barrier.num_waiting,
            "rows_end": {str(p): offset for p, offset in dict(self._rows_end).items()},
            "rolling_back": self._rollback is not None,
            "progress": self.progress,
        }

    def answers(self, timeout_s: float) -> bool:
        """Whether the lock that calls need becomes free within `timeout_s`. False for long: a deadlock."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._lock.release()
        return True

    def _in_steps(
        self,
        steps: Generator[None, None, T],
        check: Callable[[], None] = lambda: None,
        yield_s: float = _YIELD_S,
    ) -> T:
        """Run a generator with the lock held in each of its steps, and free between them; return its result.
        `check` is called with the lock held before each step, and may raise."""
        while True:
            with self._lock:
                check()
                began_s = time.perf_counter()
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
            self._advance()
            if time.perf_counter() - began_s >= _SHORT_HOLD_S:
                time.sleep(yield_s)

    def _advance(self) -> None:
        self.progress += 1

    @contextlib.contextmanager
    def _breaking(self, what: str) -> Iterator[None]:
        """Around changes that leave the rows in no known state if they fail half-way; called with the lock
        held."""
        try:
            yield
        except BaseException as error:
            self._break(what, error)
            raise

    def _break(self, what: str, error: BaseException) -> None:
        """Called with the lock held."""
        self.ready = self._consistent = False
        self._broken = f"{what} failed half-way ({error!r:.200})"
        self.barrier.abort(self._broken)
        log.exception("%s: all programs must be restored", self._broken)

    def _is_next(self, worker: int, sequence: int) -> bool:
        """False: the push was applied before. Raises FencedError: a push in between was lost."""
        last = self.sequences.get(worker, 0)
        if sequence > last + 1:
            raise FencedError(
                f"expected push {last + 1} of worker {worker}, got {sequence}: one was lost; restore the "
                "worker"
            )
        return sequence == last + 1

    def _check(self, incarnation: int, reading: bool = False) -> None:
        """Check incarnation and state before a call is served; called with the lock held."""
        if incarnation != self.incarnation and not (reading and incarnation == 0):
            raise FencedError(
                f"expected incarnation {self.incarnation}, got {incarnation}: the older one has ended"
            )
        if not self.ready:
            why = f": {self._broken}" if self._broken else ""
            raise UnavailableError(f"shard {self.identity.index} waits to be restored{why}; try again")

    def execute(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Execute one command of the controller; return the result's fields.

        Raises:
            FencedError: the command belongs to an older incarnation.
            CheckpointError: data that it needs are damaged or absent.
            UnavailableError: they cannot be read or written now.
        """
        kind, incarnation = command.get("kind"), int(command.get("incarnation", 0))
        if kind == "restore":
            name, store_id = str(command.get("manifest", "")), str(command.get("store", ""))
            self.segments.keep = max(self._keep_commits, int(command.get("keep_commits", 0)))
            return self.restore(incarnation, name, store_id)
        if incarnation != self.incarnation:
            raise FencedError(
                f"{kind}: expected incarnation {self.incarnation}, got {incarnation}: the older one has ended"
            )
        seq = int(command.get("seq", 0))
        match kind:
            case "freeze":
                return self.freeze(seq, int(command["watermark_ms"]))
            case "write":
                return self.write(seq)
            case "commit":
                return self.commit(seq)
            case "abort":
                return self.abort(seq)
        raise RoostreamError(f"expected a command of freeze, write, commit, abort or restore, got {kind!r}")

    def freeze(self, seq: int, watermark_ms: int) -> dict[str, Any]:
        """Step 4: fix what commit `seq` will contain. Rows are evicted by the watermark here and nowhere
        else.

        A failure half-way leaves the state that `push` describes.
        """
        complete = self._buckets_to_rewrite()
        started_s = time.perf_counter()
        with self._lock:
            self._check(self.incarnation)
            if seq <= self._aborted:
                raise FencedError(
                    f"expected a commit above {self._aborted} to freeze, got {seq}: it was aborted"
                )
            if self.barrier.num_waiting:
                raise CheckpointError(f"expected no waiting push at a freeze, got {self.barrier.num_waiting}")
            if self._frozen:
                raise CheckpointError(
                    f"expected commit {self._frozen.seq} to be committed or aborted before {seq} is frozen"
                )
            self._is_freezing = True
            # What is published during the freeze lies behind these offsets, so a restore reads it again.
            rows_end = dict(self._rows_end)
        try:
            rows = {
                name: self._freeze_table(table, watermark_ms, complete) for name, table in self.tables.items()
            }
            self._frozen = FrozenCommit(
                seq=seq,
                incarnation=self.incarnation,
                rows=rows,
                complete=complete,
                policy_states={name: table.eviction.state() for name, table in self.tables.items()},
                rows_end=rows_end,
            )
        except BaseException as error:
            with self._lock:
                self._break("a freeze", error)
            raise
        finally:
            with self._lock:
                self._is_freezing = False
                self._frozen_over.notify_all()
        return {
            "rows": sum(frozen.num_changed for frozen in rows.values()),
            "paused_ms": (time.perf_counter() - started_s) * 1000,
        }

    def _freeze_table(self, table: StackTable, watermark_ms: int, complete: frozenset[int]) -> FrozenRows:
        self._in_steps(table.evict(table.due_rows(watermark_ms)), yield_s=_FREEZE_YIELD_S)
        with self._lock:
            unpublished = table.outbox.tombstones()
        gone = table.gone_keys(unpublished)
        with self._lock:
            return table.freeze(*gone, complete)

    def _buckets_to_rewrite(self) -> frozenset[int]:
        """Buckets whose rows the next segment should all contain, so that older segments can be deleted."""
        changed = sum(table.num_changed() for table in self.tables.values())
        rows = sum(table.num_rows for table in self.tables.values())
        try:
            return self.segments.buckets_to_rewrite(
                self.committed.segments, 0.0 if self._minimal else changed / max(rows, 1)
            )
        except UnavailableError as error:
            log.warning("old segments are not rewritten this time: %s", error)
            return frozenset()

    def write(self, seq: int) -> dict[str, Any]:
        """Step 5: store the frozen rows, here and as a copy in the checkpoint store if `uploads`; return the
        segments of commit `seq`. After a failure it can be called again."""
        frozen = self._expect_frozen(seq)
        if frozen.segments is None:
            for name, rows in frozen.rows.items():
                rows.set_rows(*self._in_steps(self.tables[name].mark(rows)))
            frozen.segments = self.segments.write_parts(
                frozen.name,
                self._frozen_parts(frozen),
                self.committed.segments,
                frozen.policy_states,
                frozen.complete,
                num_keys=sum(map(len, frozen.rows.values())),
                num_bytes=sum(len(rows) * self.tables[name].row_bytes for name, rows in frozen.rows.items()),
            )
            for name, rows in frozen.rows.items():
                self._in_steps(self.tables[name].release(rows))
        if self.uploads:
            frozen.segments = self.segments.send(frozen.segments, self.copies, self._advance)
        return {"segments": [s.plain() for s in frozen.segments], "rows_end": dict(frozen.rows_end)}

    def _frozen_parts(self, frozen: FrozenCommit) -> Iterator[SegmentBucket]:
        """The frozen rows by bucket; a large bucket comes in several blocks."""
        for name, rows in frozen.rows.items():
            table, num_buckets = self.tables[name], self.identity.num_buckets
            bucket_M = table.index.bucket_N[rows.row_M]
            order_M = np.argsort(bucket_M, kind="stable")
            edge_B = np.searchsorted(bucket_M[order_M], np.arange(num_buckets + 1))
            gone_bucket_G = buckets_of(rows.gone.id_U, rows.gone.table_U, num_buckets)
            max_rows = max(MAX_BLOCK_BYTES // table.row_bytes, 1)
            for bucket in range(num_buckets):
                at_M = order_M[edge_B[bucket] : edge_B[bucket + 1]]
                gone_M = np.flatnonzero(gone_bucket_G == bucket)
                for start in range(0, max(len(at_M), int(len(gone_M) > 0)), max_rows):
                    block = self._in_steps(table.copy_frozen(rows, at_M[start : start + max_rows]))
                    table.track_accumulators(block.state_LA)
                    if start + max_rows >= len(at_M):
                        block = with_gone(block, rows.gone.take(gone_M), rows.unpublished_G[gone_M])
                    yield SegmentBucket(name, bucket, [block])
                    self._advance()

    def commit(self, seq: int) -> dict[str, Any]:
        """Step 7: a manifest names what was written."""
        if self._frozen is None and self.committed.seq == seq:
            return {}
        frozen = self._expect_frozen(seq)
        if frozen.segments is None:
            raise CheckpointError(f"expected commit {seq} to be written before it is committed")
        with self._lock:
            self.committed, self._frozen = Commit(frozen.seq, frozen.incarnation, frozen.segments), None
            self._minimal = False
        try:
            self.segments.commit(self.committed)
        except (CheckpointError, UnavailableError) as error:
            log.warning("old segments could not be deleted (%s); the next commit tries again", error)
        return {}

    def abort(self, seq: int) -> dict[str, Any]:
        """No commit up to `seq` has a manifest, except those committed: their frozen rows count as changed
        again, their segment is deleted, and they cannot be frozen any more."""
        with self._lock:
            self._aborted = max(self._aborted, seq)
            frozen = self._frozen if self._frozen and self._frozen.seq <= seq else None
        if frozen:
            for name, rows in frozen.rows.items():
                self._in_steps(self.tables[name].unfreeze(rows))
            self._frozen, self._minimal = None, True
            self.segments.discard(frozen.name)
        return {}

    def _expect_frozen(self, seq: int) -> FrozenCommit:
        if self._frozen is None or self._frozen.seq != seq:
            raise CheckpointError(
                f"expected commit {seq} to be frozen, got {self._frozen.seq if self._frozen else 'none'}"
            )
        return self._frozen

    def restore(self, incarnation: int, name: str, store_id: str = "") -> dict[str, Any]:
        """Go to manifest `name` ("" = the beginning) in `incarnation`. Older incarnations are fenced from now
        on, also if it fails. `store_id`: identity of the controller's checkpoint store; "" = not stated.

        Segments that the home does not have, or has damaged, are fetched from their copies in the checkpoint
        store.

        **If it fails** (CheckpointError, UnavailableError, ConfigError): calls raise UnavailableError until a
        restore in a later incarnation, of this manifest or another, has succeeded. The home has what it had,
        and the segments that were fetched.
        """
        with self._lock:
            if incarnation < self.incarnation or (incarnation == self.incarnation and self.ready):
                raise FencedError(
                    f"expected an incarnation above {self.incarnation}, got {incarnation}: the older one "
                    "has ended"
                )
            self.incarnation, self.ready = incarnation, False
            self.barrier.abort(f"incarnation {incarnation} has begun")
        if store_id:
            check_same_store(self.store, store_id)
        elif self.segments.remembered_store():
            store_id = ensure_identity(self.store)
        target = restore_target(self.identity, self.store, name)
        check_home(self.segments, self.store, store_id, target.commit, self.identity.index, incarnation)
        state = target.commit.segments
        self.segments.store_id = store_id
        # Segments that have no copy may be on a volume that is not mounted: then nothing is fetched.
        waits = self.segments.is_empty and any(segment.copy is None for segment in state)
        absent = [] if waits else self.segments.absent(state)
        problems = self._fetch(absent)
        states = [self.committed.segments, self._frozen.segments if self._frozen else None]
        consistent, self._consistent = self._consistent, False
        self.segments.lost.clear()
        try:
            same = consistent and not self.segments.needs_rewrite and target.owners == self.owners
            self.owners, self.buckets = target.owners, target.owners.buckets_of(self.identity.index)
            self.segments.buckets = tuple(self.buckets)
            try:
                if same and state in states:
                    frozen = self._frozen.rows if self._frozen else {}
                    roll_back(self.tables, frozen, self.segments, state, self._advance)
                else:
                    reload(self.tables, self.segments, state, self._advance)
            except OtherVersionError:
                raise
            except CheckpointError:
                found = self.segments.check(state, self.buckets, self._advance)
                damaged = {part.split("/")[0] for part in found}
                damaged -= {segment.name for segment in absent}
                if waits or not any(segment.copy and segment.name in damaged for segment in state):
                    raise
                problems += self._fetch([segment for segment in state if segment.name in damaged])
                reload(self.tables, self.segments, state, self._advance)
        except OtherVersionError:
            raise
        except CheckpointError as error:
            text = "; ".join([str(error), *problems, self.segments.explain_damage(state, self._advance)])
            if waits:  # an older manifest would lose the rows of all shards since
                raise UnavailableError(
                    f"the home of shard {self.identity.index} is empty, but {name} names rows in it: mount "
                    f"its volume and restart the shard ({text})"
                ) from None
            raise CheckpointError(text) from None
        # A store without commits proves nothing: it may have lost the manifest that names a segment of this
        # home. Only shards that were told of that commit refuse to start over (`check_home`).
        self.segments.note_restored(target.commit, manifest_numbers(self.store) if name else None)
        with self._lock:
            self._finish_restore(target)
        log.info(
            "shard %d restored to %s as incarnation %d",
            self.identity.index,
            name or "the beginning",
            incarnation,
        )
        return {"rows": sum(t.num_rows for t in self.tables.values())}

    def _fetch(self, segments: Sequence[Segment]) -> list[str]:
        """Replace these segments by their copies; returns what is wrong with copies."""
        began_s, before = self.clock.monotonic_s(), self.copies.fetched_bytes
        problems = self.segments.fetch(segments, self.copies, self._advance)
        if fetched := self.copies.fetched_bytes - before:
            log.info(
                "shard %d fetched %d segments from the checkpoint store: %d rows, %d bytes in %.3f s",
                self.identity.index,
                sum(segment.copy is not None for segment in segments) - len(problems),
                sum(segment.rows for segment in segments if segment.copy),
                fetched,
                self.clock.monotonic_s() - began_s,
            )
        return problems

    def _finish_restore(self, target: RestoreTarget) -> None:
        for table in self.tables.values():
            table.clear_changes()
            if self._settled_late is not None:
                run_to_end(table.outbox.settle(self._settled_late))
            table.outbox.begin_incarnation()
        self.sequences.clear()
        self._settled_late = None
        self._frozen, self._consistent, self.committed = None, True, target.commit
        self._aborted, self._broken = 0, ""
        partitions = {self.identity.partition_of(b) for b in self.buckets} if self.identity.publishing else ()
        known = {} if self.segments.lost else target.rows_end  # what replicas have of lost rows is unknown
        self._rows_end = {p: known.get(p, _BEFORE_ALL if self.segments.lost else 0) for p in partitions}
        self._rollback = (
            Rollback(self.incarnation, dict(self._rows_end), frozenset(self.buckets)) if partitions else None
        )
        self.ready = True

    def rollback(self) -> Rollback | None:
        """What the publisher must do before the next round; None = nothing."""
        with self._lock:
            return self._rollback if self.ready else None

    def republish(self, incarnation: int, stack: str, keys: Keys) -> None:
        """Replicas have seen these keys in a state that may have been rolled back."""
        with self._lock:
            if self.ready and incarnation == self.incarnation and stack in self.tables:
                self.tables[stack].mark_unpublished(keys)

    def rolled_back(self, incarnation: int, rows_end: Mapping[int, int]) -> None:
        """The barriers are written, and every key that replicas saw before them is marked."""
        with self._lock:
            if self.ready and incarnation == self.incarnation:
                self._rows_end.update(rows_end)
                self._rollback = None

    def take_round(self) -> PublishRound | None:
        """Take all rows that are not published yet, to publish them. None before a restore, and while a
        rollback must be published first. Call `settle_round` afterwards.

        Raises:
            UnavailableError: a restore has begun meanwhile; nothing is in flight.
        """
        with self._lock:
            if not self.ready or self._rollback:
                return None
            taken = PublishRound(self.incarnation, [])
        try:
            for table in self.tables.values():
                outbox = table.outbox
                rows = self._in_steps(outbox.collect(), lambda: self._check_round(taken))
                planned = outbox.plan(*rows)
                with self._lock:
                    self._check_round(taken)
                    taken.deltas.extend(outbox.number(planned))
        except BaseException:
            self.settle_round(taken, False, {})
            raise
        return taken

    def copy_delta(self, taken: PublishRound, planned: PlannedDelta) -> Delta | None:
        """One delta of the round, with its rows as they are now; None: there is nothing to send.

        Raises:
            UnavailableError: a restore has begun meanwhile.
        """
        with self._lock:
            self._check_round(taken)
            return self.tables[planned.stack].outbox.copy(planned, self.identity.max_publish_norm)

    def _check_round(self, taken: PublishRound) -> None:
        """Called with the lock held."""
        if not self.ready or taken.incarnation != self.incarnation:
            raise UnavailableError(
                "a restore has begun during a publishing round; the next round sends its rows"
            )

    def settle_round(self, taken: PublishRound, acknowledged: bool, rows_end: Mapping[int, int]) -> None:
        """The round's deltas are all at offsets below `rows_end` (partition → offset), or may be lost and are
        due again."""

        def check() -> None:
            if not self.ready:
                self._settled_late = acknowledged
                raise _RestoreBegunError

        with contextlib.suppress(_RestoreBegunError):
            for table in self.tables.values():
                same = taken.incarnation == self.incarnation
                self._in_steps(table.outbox.settle(acknowledged, same), check)
            with self._lock:
                check()
                if taken.incarnation == self.incarnation and acknowledged:
                    self._rows_end.update(rows_end)


class _RestoreBegunError(Exception):
    """Ends the settling of a publishing round: a restore has begun, which settles the round itself."""


MAX_SCAN_ROWS, MAX_SCAN_BYTES = 1 << 20, 64 << 20
"""Limits of one answer. A bucket with more bytes is read in slices, far below the size of a frame."""
MAX_LOCKED_BYTES = 32 << 20
"""Further buckets are added to an answer up to this size, because they are copied while the lock is held."""

StackRequest: TypeAlias = tuple[StackTable, Keys, Sequence[np.ndarray]]


class ShardRpcHandler:
    """Serves the RPC calls of a shard (docs/protocols.md, "Shard") and checks their arguments."""

    def __init__(self, shard: Shard, max_scan_bytes: int = MAX_SCAN_BYTES) -> None:
        self.shard, self.max_scan_bytes = shard, max_scan_bytes

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        """Serve one call.

        Raises:
            FencedError: `incarnation` is not the shard's, or another shard owns a key's bucket.
            UnavailableError: the shard is not restored yet, or another worker's push of this step is missing.
            SchemaError, WireError: the arguments do not fit; nothing was applied.
        """
        match method:
            case "pull":
                requests = [(table, keys) for table, keys, _ in self._requests(header, arrays, 2)]
                return {}, self.shard.pull(integer(header, "incarnation"), requests)
            case "read":
                requests = [(table, keys) for table, keys, _ in self._requests(header, arrays, 2)]
                incarnation, read = self.shard.read(requests)
                return {"incarnation": incarnation}, [array for rows in read for array in rows]
            case "push":
                push = self.decode_push(header, arrays)
                return {"applied": self.shard.push(integer(header, "incarnation"), push)}, ()
            case "scan":
                return self._scan(header)
            case "records":
                return self._records(header)
            case "overwrite":
                return {"applied": self._overwrite(header, arrays)}, ()
            case "contains":
                table, keys, _ = self._request(header, arrays, 2)
                found_M = self.shard.contains(integer(header, "incarnation"), table, keys)
                return {}, [found_M.astype(np.uint8)]
            case "owners":
                (incarnation, _), owners = self.shard.read([]), self.shard.owners
                return {
                    "incarnation": incarnation,
                    "version": owners.version,
                    "num_owners": owners.num_owners,
                }, [owners.owner_B]
            case "stats":
                return self.shard.stats(), ()
        raise RoostreamError(
            "expected a call of contains, overwrite, owners, pull, push, read, records, scan or stats, got "
            f"{method!r}"
        )

    def _records(self, header: Header) -> tuple[Header, Sequence[np.ndarray]]:
        table = self._table(header.get("stack", ""))
        buckets = header.get("buckets")
        known = self.shard.identity.num_buckets
        if not isinstance(buckets, list) or not all(type(b) is int and 0 <= b < known for b in buckets):
            raise WireError("bad_shape", f"expected a list of buckets 0..{known - 1}, got {buckets!r:.100}")
        start, limit = integer(header, "start"), max(MAX_LOCKED_BYTES // table.row_bytes, 1)
        if start < 0:
            raise WireError(
                "bad_shape", f"expected `start`, the number of the first row, to be 0 or more, got {start}"
            )
        keys, rows_MD, state_MA, end = self.shard.records(
            integer(header, "incarnation"), table, buckets, start, limit
        )
        return {"end": end}, [keys.table_U, keys.id_U, rows_MD, state_MA]

    def _overwrite(self, header: Header, arrays: Sequence[np.ndarray]) -> bool:
        table, keys, (stamp_ms_M, rows_MD, state_MA) = self._request(header, arrays, 5)
        count, state_width = len(keys), table.state_NA.shape[1]
        shapes = [stamp_ms_M.shape, rows_MD.shape, state_MA.shape]
        kinds = [array.dtype for array in (stamp_ms_M, rows_MD, state_MA)]
        if shapes != [(count,), (count, table.width), (count, state_width)] or kinds != [
            np.dtype(np.int64),
            np.dtype(np.float32),
            np.dtype(np.float32),
        ]:
            raise WireError(
                "bad_shape",
                f"stack {table.name}: expected stamp i8[{count}], rows f4[{count}, {table.width}] and state "
                f"f4[{count}, {state_width}], got {shapes} of {kinds}",
            )
        block = RowBlock(
            keys=keys,
            unpublished_K=np.zeros(count, np.uint8),
            stamp_ms_L=stamp_ms_M,
            rows_LD=rows_MD,
            state_LA=state_MA,
        )
        return self.shard.overwrite(
            table.name,
            block,
            incarnation=integer(header, "incarnation"),
            worker=integer(header, "worker"),
            sequence=integer(header, "sequence"),
        )

    def decode_push(self, header: Header, arrays: Sequence[np.ndarray]) -> GradientPush:
        """The checked content of a push. Raises SchemaError, WireError: it does not fit."""
        requests = self._requests(header, arrays, 3)
        for table, keys, (gradient_UD,) in requests:
            table.check_gradient(keys, gradient_UD)
        workers = integer(header, "workers") if "workers" in header else 1
        if workers != 1:
            check_workers(integer(header, "worker"), workers)
        return GradientPush(
            worker=integer(header, "worker"),
            sequence=integer(header, "sequence"),
            time_ms=integer(header, "time_ms"),
            oldest_engagement_ms=integer(header, "oldest_engagement_ms"),
            oldest_close_ms=integer(header, "oldest_close_ms"),
            parts=[(table, keys, gradient_UD) for table, keys, (gradient_UD,) in requests],
            step=integer(header, "step") if workers > 1 else 0,
            workers=workers,
            clip_row_norm=_clip_norm(header) if workers > 1 else 0.0,
        )

    def _scan(self, header: Header) -> tuple[Header, Sequence[np.ndarray]]:
        """Return the rows of whole buckets, beginning with number `cursor`, until `limit` rows are reached.
        Each bucket is as it was at one moment. With `num_slices`: only slice `slice` of bucket `cursor`.

        `buckets` in the answer: [bucket, incarnation, sequence, settles_at], see `BucketScan`. `num_slices`
        in the answer: bucket `cursor` is too large for one answer and must be read in so many slices; 0 = it
        is not.
        """
        table, cursor = self._table(header.get("stack", "")), integer(header, "cursor")
        if "num_slices" in header:
            num_slices = integer(header, "num_slices")
            if not 1 <= num_slices <= MAX_SLICES:
                raise WireError("bad_shape", f"expected 1 to {MAX_SLICES} slices, got {num_slices}")
            pages = [self.shard.scan_slice(table, cursor, integer(header, "slice"), num_slices)]
            left, num_slices = list[int](), 0
        else:
            limit = min(integer(header, "limit"), MAX_SCAN_ROWS, MAX_LOCKED_BYTES // (4 * table.width))
            max_rows = max(self.max_scan_bytes // (4 * table.width + 20), 1)
            pages, left, num_slices = self.shard.scan(table, cursor, limit, max_rows)
        answer = {
            "cursor": left[0] if left else -1,
            "incarnation": max((p.incarnation for p in pages), default=0),
            "buckets": [[p.bucket, p.incarnation, p.sequence, p.settles_at] for p in pages],
            "num_slices": num_slices,
        }
        keys = join_keys(*(p.keys for p in pages))
        rows_ND = np.concatenate([np.zeros((0, table.width), np.float32), *(p.rows_MD for p in pages)])
        counts = [len(p.keys) for p in pages]
        return answer, [
            keys.table_U,
            keys.id_U,
            rows_ND,
            np.repeat(np.array([p.sequence for p in pages], np.uint64), counts),
        ]

    def _request(self, header: Header, arrays: Sequence[np.ndarray], arrays_each: int) -> StackRequest:
        """As `_requests`, of a call about a single stack."""
        requests = self._requests(header, arrays, arrays_each)
        if len(requests) != 1:
            raise WireError("bad_shape", f"expected one stack in a call, got {len(requests)}")
        return requests[0]

    def _requests(self, header: Header, arrays: Sequence[np.ndarray], arrays_each: int) -> list[StackRequest]:
        """For each stack named in the header: its table, keys and further arrays."""
        stacks = header.get("stacks")
        if (
            not isinstance(stacks, list)
            or len({str(name) for name in stacks}) < len(stacks)
            or len(arrays) != arrays_each * len(stacks)
        ):
            raise WireError(
                "bad_shape",
                f"expected stacks: [name…], each once, and {arrays_each} arrays for each, got {len(arrays)} "
                "arrays",
            )
        out: list[StackRequest] = []
        for n, name in enumerate(stacks):
            table = self._table(name)
            table_U, id_U, *rest = arrays[arrays_each * n : arrays_each * (n + 1)]
            if (
                table_U.dtype != np.uint32
                or id_U.dtype != np.int64
                or table_U.ndim != 1
                or table_U.shape != id_U.shape
            ):
                raise WireError(
                    "bad_shape",
                    f"stack {name}: expected table u4[U] and id i8[U], got {table_U.shape} {id_U.shape}",
                )
            keys = Keys(table_U, id_U)
            table.check_keys(keys)
            out.append((table, keys, rest))
        return out

    def _table(self, name: object) -> StackTable:
        table = self.shard.tables.get(str(name))
        if table is None:
            known = ", ".join(self.shard.tables)
            raise SchemaError(f"expected a stack of {known}, got {name!r}; use the same schema as the shards")
        return table


def _clip_norm(header: Header) -> float:
    value = header.get("clip_row_norm", 0.0)
    if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise WireError(
            "bad_shape",
            f"expected a finite number of at least 0 as 'clip_row_norm' in the header, got {value!r}",
        )
    return float(value)


def integer(header: Header, key: str) -> int:
    """Return a 64-bit integer of the header. Raises WireError: it is missing, not an integer, or too
    large."""
    value = header.get(key)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:  # a bool is an int, too
        raise WireError("bad_shape", f"expected an integer {key!r} in the header, got {value!r}")
    return value
