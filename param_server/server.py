"""One parameter server shard: rows that workers pull and push, and the commands by which the controller commits and restores.

    calls      pull push read scan owners stats     from any thread, by param_server/server.py
    commands   restore freeze write commit abort    from the member's one thread, docs/protocols.md "Controller"
    rounds     what the publisher takes and settles from its one thread

One lock makes every push, freeze and round one step. Committing:
  4. freeze: evict, copy what changed, begin the next generation; training goes on from here.
  5. write: the copy becomes a segment.
  7. commit: a manifest names it; the older generation is forgotten. Or abort: its rows count as changed again.
Restoring: from committed segments, exactly the rows that changed in either generation, where the state of the manifest is one
that this process was at; every row otherwise. Until that has worked, calls answer UnavailableError.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from param_server.config import ShardIdentity
from param_server.embedding_table import Keys, join_keys, no_keys
from param_server.eviction import EvictionPolicyFactory, ExpiryPolicy
from param_server.gradient_barrier import GradientBarrier, added, check_workers
from param_server.outbox import BucketScan, PublishRound, Rollback
from param_server.restore import FrozenCommit, RestoreTarget, frozen_of, linked, reload, roll_back, target_of
from param_server.segments import EMPTY_COMMIT, Commit, Segments
from param_server.table import GradientPush, PublishableRows, StackTable, build_tables, check_owned
from roostream.errors import (
    CheckpointError,
    FencedError,
    RoostreamError,
    SchemaError,
    UnavailableError,
    WireError,
)
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Header

log = logging.getLogger("roostream.shard")

_BEFORE_ALL = -1
"""No offset: the publisher finds it gone, and tells readers to begin anew."""


class Shard:
    """See the module. `segments` and `store` are used by commands only."""

    def __init__(
        self,
        identity: ShardIdentity,
        segments: Segments,
        store: CheckpointStore,
        clock: Clock,
        residency: EvictionPolicyFactory = ExpiryPolicy,
    ) -> None:
        self.identity, self.segments, self.store, self.clock = identity, segments, store, clock
        self.tables = build_tables(identity, residency)
        self.owners, self.buckets = identity.first_owners, identity.first_owners.buckets_of(identity.index)
        self.incarnation, self.ready = 0, False
        self.committed = EMPTY_COMMIT
        self.num_pulls = self.num_pushes = self.num_repeats = 0
        self._lock = threading.Lock()
        self.sums = GradientBarrier(self._lock)
        self._sequences: dict[int, int] = {}  # worker → last push applied, in this incarnation
        self._frozen: FrozenCommit | None = None
        self._aborted = 0  # seq; a freeze that comes after its abort is refused
        self._plain = False  # the last commit was abandoned: the next one writes no more than it must
        self._broken = ""  # why calls are refused until the next RESTORE
        self._known = (
            True  # rows = `committed` and the changes since; False after a restore that failed in the middle
        )
        self._rows_end: dict[int, int] = {}
        self._rollback: Rollback | None = None
        self._settled_late: bool | None = None  # how a round ended while rows were being restored

    # ShardRpcHandler; param_server/server.py has checked what they carry

    def pull(self, incarnation: int, asked: Sequence[tuple[StackTable, Keys]]) -> list[np.ndarray]:
        """float32 [U, D] a stack; keys without a row read as their initial value. Incarnation 0 reads outside training.

        Raises:
            FencedError: `incarnation` is not this shard's, or a key's bucket isn't.
            UnavailableError: RESTORE has not come, or not worked, yet.
        """
        with self._lock:
            self._check(incarnation, reading=True)
            check_owned(self.identity.index, self.owners, [keys for _, keys in asked])
            self.num_pulls += 1
            return [table.pull(keys) for table, keys in asked]

    def read(self, asked: Sequence[tuple[StackTable, Keys]]) -> tuple[int, list[PublishableRows]]:
        """(incarnation, each stack's rows as far as they may be published), for readers outside training. Raises as `pull`."""
        with self._lock:
            self._check(0, reading=True)
            check_owned(self.identity.index, self.owners, [keys for _, keys in asked])
            return self.incarnation, [
                table.read(keys, self.identity.max_publish_norm) for table, keys in asked
            ]

    def push(self, incarnation: int, update: GradientPush) -> bool:
        """Apply an update whole; False if it had been applied before. One of several workers waits for the others' of its step,
        and is applied with them, or not at all. Raises as `pull`: then nothing was applied.

        **If it fails** otherwise, in the middle (a defect, no memory): the rows are in no known state. Every later call raises
        UnavailableError, and the controller, which is told so, restores everybody.
        """
        with self._lock:
            self._check(incarnation)
            check_owned(self.identity.index, self.owners, [keys for _, keys, _ in update.parts])
            if not self._is_next(update.worker, update.sequence):
                self.num_repeats += 1
                return False
            if update.workers > 1 or self.sums.num_waiting:
                self.sums.push(update, self._apply)
            else:
                self._apply([update])
        return True

    def push_step(self, incarnation: int, updates: Sequence[GradientPush]) -> None:
        """Every worker's push of a step at once, in their order: as `push` of each, which need not wait. Raises as `push`."""
        with self._lock:
            self._check(incarnation)
            for update in updates:
                check_owned(self.identity.index, self.owners, [keys for _, keys, _ in update.parts])
                if not self._is_next(update.worker, update.sequence):
                    raise FencedError(
                        f"worker {update.worker}: push {update.sequence} was applied before; it must be restored"
                    )
            self._apply(updates)

    def _apply(self, pushes: Sequence[GradientPush]) -> None:
        """Inside the lock: one update, of all workers."""
        update = added(pushes) if len(pushes) > 1 else pushes[0]
        for table, keys, _ in update.parts:
            table.reserve(len(keys))
        now_ms = self.clock.now_ms()
        with self._breaking("a push"):
            for table, keys, gradient_UD in update.parts:
                touched_B = table.push(keys, gradient_UD, update.time_ms)
                table.outbox.touch(touched_B, update.oldest_engagement_ms, update.oldest_close_ms, now_ms)
        self._sequences.update((push.worker, push.sequence) for push in pushes)
        self.num_pushes += len(pushes)

    def leave(self) -> None:
        """The process stops: pushes that wait for others are told, so that their calls end."""
        with self._lock:
            self.sums.end("the shard stops")

    def scan(self, table: StackTable, cursor: int, limit: int) -> tuple[list[BucketScan], list[int]]:
        """Of this shard's buckets from number `cursor` on the first, whole, as far as their rows may be published, at one moment:
        one or more, until about `limit` rows are reached; and the buckets left. Raises as `pull`."""
        pages: list[BucketScan] = []
        with self._lock:
            self._check(0, reading=True)
            left = [bucket for bucket in self.buckets if bucket >= cursor]
            each = max(table.num_rows // max(len(self.buckets), 1), 1)
            asked = left[: max(-(-limit // each), 1)]
            for bucket, row_M in zip(asked, table.embeddings.rows_by_bucket(asked), strict=True):
                if sum(len(page.keys) for page in pages) >= max(limit, 1):
                    break
                pages.append(
                    table.outbox.page(bucket, row_M, self.identity.max_publish_norm, self.incarnation)
                )
        return pages, left[len(pages) :]

    def stats(self) -> dict[str, Any]:
        """Plain numbers for reports and metrics."""
        with self._lock:
            tables = self.tables
            return {
                "ready": self.ready,
                "incarnation": self.incarnation,
                "committed_seq": self.committed.seq,
                "segments": len(self.committed.segments),
                "rows": {name: t.num_rows for name, t in tables.items()},
                "bytes": sum(t.num_bytes for t in tables.values()),
                "dirty": sum(t.num_changed() for t in tables.values()) if self.ready else 0,
                "spared": sum(t.residency.num_spared for t in tables.values()),
                "withheld": sum(t.outbox.num_withheld for t in tables.values()),
                "limited": sum(t.num_limited for t in tables.values()),
                "largest_accumulator": {name: t.largest_accumulator for name, t in tables.items()},
                "damaged": len(self.segments.damaged),
                "damages": self.segments.num_damaged,
                "broken": self._broken,
                "pulls": self.num_pulls,
                "pushes": self.num_pushes,
                "repeats": self.num_repeats,
                "waiting": self.sums.num_waiting,
                "rows_end": {str(p): offset for p, offset in self._rows_end.items()},
                "rolling_back": self._rollback is not None,
            }

    @contextlib.contextmanager
    def _breaking(self, what: str) -> Iterator[None]:
        """Inside the lock, around what leaves the rows in no known state when it ends half-way."""
        try:
            yield
        except BaseException as error:
            self.ready = self._known = False
            self._broken = f"{what} ended half-way ({error!r:.200})"
            self.sums.end(self._broken)
            log.exception("%s: everybody must be restored", self._broken)
            raise

    def _is_next(self, worker: int, sequence: int) -> bool:
        """False: applied before. Raises FencedError where a push in between was lost."""
        last = self._sequences.get(worker, 0)
        if sequence > last + 1:
            raise FencedError(
                f"expected push {last + 1} of worker {worker}, got {sequence}: one was lost, the worker must be restored"
            )
        return sequence == last + 1

    def _check(self, incarnation: int, reading: bool = False) -> None:
        """Inside the lock, at the beginning of what it admits."""
        if incarnation != self.incarnation and not (reading and incarnation == 0):
            raise FencedError(
                f"expected incarnation {self.incarnation}, got {incarnation}: the older one is over"
            )
        if not self.ready:
            why = f": {self._broken}" if self._broken else ""
            raise UnavailableError(f"shard {self.identity.index} waits for RESTORE{why}; try again")

    # Commands

    def execute(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Do one command of the controller; its result's fields.

        Raises:
            FencedError: the command is of an older incarnation.
            CheckpointError: what it needs is damaged or absent. UnavailableError: it can't be read or written now.
        """
        kind, incarnation = command.get("kind"), int(command.get("incarnation", 0))
        if kind == "restore":
            return self.restore(incarnation, str(command.get("manifest", "")))
        if incarnation != self.incarnation:
            raise FencedError(
                f"{kind}: expected incarnation {self.incarnation}, got {incarnation}: the older one is over"
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
        """4. Fix what commit `seq` will contain; rows are evicted by the watermark, here and only here. Fails in the middle as
        `push` does."""
        whole = self._to_rewrite()
        started_s = time.perf_counter()
        with self._lock:
            self._check(self.incarnation)
            if seq <= self._aborted:
                raise FencedError(
                    f"expected a commit above {self._aborted} to freeze, got {seq}: it was aborted"
                )
            if self.sums.num_waiting:
                raise CheckpointError(
                    f"expected every push to be answered at a freeze, got {self.sums.num_waiting} that wait"
                )
            if self._frozen:
                raise CheckpointError(
                    f"expected commit {self._frozen.seq} to be committed or aborted before {seq} is frozen"
                )
            with self._breaking("a freeze"):
                generations = {name: table.freeze(watermark_ms, whole) for name, table in self.tables.items()}
                self._frozen = frozen_of(
                    seq, self.incarnation, generations, whole, self.tables, self._rows_end
                )
        rows = sum(len(generation.block.keys) for generation in generations.values())
        return {"rows": rows, "paused_ms": (time.perf_counter() - started_s) * 1000}

    def _to_rewrite(self) -> frozenset[int]:
        """Buckets of which the next segment should hold every row, though they have not all changed."""
        with self._lock:
            changed = sum(table.num_changed() for table in self.tables.values())
            rows = sum(table.num_rows for table in self.tables.values())
        try:
            return self.segments.to_rewrite(
                self.committed.segments, 0.0 if self._plain else changed / max(rows, 1)
            )
        except UnavailableError as error:
            log.warning("old segments are not written anew this time: %s", error)
            return frozenset()

    def write(self, seq: int) -> dict[str, Any]:
        """5. Store what was frozen; the segments that are the state of commit `seq`. Again after a failure: the same."""
        frozen = self._expect_frozen(seq)
        frozen.segments = self.segments.write(
            frozen.name, frozen.changes, self.committed.segments, frozen.residency, frozen.whole
        )
        for name, block in frozen.changes.items():
            self.tables[name].note_state(block.state_LA)
        return {"segments": [s._asdict() for s in frozen.segments], "rows_end": dict(frozen.rows_end)}

    def commit(self, seq: int) -> dict[str, Any]:
        """7. A manifest names what was written."""
        if self._frozen is None and self.committed.seq == seq:
            return {}
        frozen = self._expect_frozen(seq)
        if frozen.segments is None:
            raise CheckpointError(f"expected commit {seq} to be written before it is committed")
        with self._lock:
            self.committed, self._frozen = Commit(frozen.seq, frozen.incarnation, frozen.segments), None
            self._plain = False
        try:
            self.segments.commit(self.committed)
        except (CheckpointError, UnavailableError) as error:
            log.warning("old segments could not be deleted (%s); the next commit tries again", error)
        return {}

    def abort(self, seq: int) -> dict[str, Any]:
        """No commit up to `seq` has a manifest but those committed: what is frozen of them counts as changed again, its segment
        goes, and they can't be frozen any more."""
        with self._lock:
            self._aborted = max(self._aborted, seq)
            frozen = self._frozen if self._frozen and self._frozen.seq <= seq else None
            if frozen:
                for name, keys in frozen.changed.items():
                    self.tables[name].unfreeze(keys)
                self._frozen, self._plain = None, True
        if frozen:
            self.segments.discard(frozen.name)
        return {}

    def _expect_frozen(self, seq: int) -> FrozenCommit:
        if self._frozen is None or self._frozen.seq != seq:
            raise CheckpointError(
                f"expected commit {seq} to be frozen, got {self._frozen.seq if self._frozen else 'none'}"
            )
        return self._frozen

    def restore(self, incarnation: int, name: str) -> dict[str, Any]:
        """Be at manifest `name` ("" = the beginning), in `incarnation`; older ones are fenced from here on, also if it fails.

        **If it fails** (CheckpointError, UnavailableError, ConfigError): calls answer UnavailableError until a RESTORE of a later
        incarnation, of this manifest or another, has worked.
        """
        with self._lock:
            if incarnation < self.incarnation or (incarnation == self.incarnation and self.ready):
                raise FencedError(
                    f"expected an incarnation above {self.incarnation}, got {incarnation}: the older one is over"
                )
            self.incarnation, self.ready = incarnation, False
            self.sums.end(f"incarnation {incarnation} has begun")
        target = target_of(self.identity, self.store, name)
        states = [self.committed.segments, self._frozen.segments if self._frozen else None]
        known, self._known = self._known, False
        self.segments.lost.clear()
        try:
            same = known and not self.segments.moved and target.owners == self.owners
            self.owners, self.buckets = target.owners, target.owners.buckets_of(self.identity.index)
            self.segments.buckets = tuple(self.buckets)
            if same and target.commit.segments in states:
                frozen = self._frozen.changed if self._frozen else {}
                roll_back(self.tables, frozen, self.segments, target.commit.segments)
            else:
                reload(self.tables, self.segments, target.commit.segments)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self.segments.explain(target.commit.segments)}") from None
        self.segments.restored(target.commit, linked(self.store))
        with self._lock:
            self._restored(target)
        log.info(
            "shard %d restored to %s as incarnation %d",
            self.identity.index,
            name or "the beginning",
            incarnation,
        )
        return {"rows": sum(t.num_rows for t in self.tables.values())}

    def _restored(self, target: RestoreTarget) -> None:
        for table in self.tables.values():
            table.forget_changes()
            if self._settled_late is not None:
                table.outbox.settle(self._settled_late)
            table.outbox.begin()
        self._sequences.clear()
        self._settled_late = None
        self._frozen, self._known, self.committed = None, True, target.commit
        self._aborted, self._broken = 0, ""
        partitions = {self.identity.partition_of(b) for b in self.buckets} if self.identity.publishing else ()
        known = {} if self.segments.lost else target.rows_end  # of lost rows nobody knows what readers have
        self._rows_end = {p: known.get(p, _BEFORE_ALL if self.segments.lost else 0) for p in partitions}
        self._rollback = (
            Rollback(self.incarnation, dict(self._rows_end), frozenset(self.buckets)) if partitions else None
        )
        self.ready = True

    # Rounds

    def rollback(self) -> Rollback | None:
        """What the publisher has to do before the next round; None = nothing."""
        with self._lock:
            return self._rollback if self.ready else None

    def republish(self, incarnation: int, stack: str, keys: Keys) -> None:
        """Readers have seen these keys in a state that may be over."""
        with self._lock:
            if self.ready and incarnation == self.incarnation and stack in self.tables:
                self.tables[stack].mark_unpublished(keys)

    def rolled_back(self, incarnation: int, rows_end: Mapping[int, int]) -> None:
        """The barriers are written, and every key behind them is marked."""
        with self._lock:
            if self.ready and incarnation == self.incarnation:
                self._rows_end.update(rows_end)
                self._rollback = None

    def take_round(self) -> PublishRound | None:
        """Everything unpublished; None where that is nothing, or a rollback comes first. `settle_round` must follow."""
        with self._lock:
            if not self.ready or self._rollback:
                return None
            deltas = [
                d for table in self.tables.values() for d in table.outbox.take(self.identity.max_publish_norm)
            ]
            return PublishRound(self.incarnation, deltas)

    def settle_round(self, taken: PublishRound, acknowledged: bool, rows_end: Mapping[int, int]) -> None:
        """The round's deltas are all at offsets below `rows_end` (partition → offset), or may be lost and are due again."""
        with self._lock:
            if not self.ready:
                self._settled_late = acknowledged
                return
            same = taken.incarnation == self.incarnation
            for table in self.tables.values():
                table.outbox.settle(acknowledged, same)
            if same and acknowledged:
                self._rows_end.update(rows_end)


MAX_SCAN_ROWS = 1 << 20

Asked: TypeAlias = tuple[StackTable, Keys, Sequence[np.ndarray]]


class ShardRpcHandler:
    """`handle` is an RPC handler over one shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        """One call.

        Raises:
            FencedError: `incarnation` is not the shard's, or a key's bucket isn't.
            UnavailableError: RESTORE has not come, or not worked, yet; or other workers' pushes of this step didn't come.
            SchemaError, WireError: what was sent doesn't fit; nothing of it was applied.
        """
        match method:
            case "pull":
                asked = self._asked(header, arrays, 2)
                return {}, self.shard.pull(
                    integer(header, "incarnation"), [(table, keys) for table, keys, _ in asked]
                )
            case "read":
                incarnation, read = self.shard.read(
                    [(table, keys) for table, keys, _ in self._asked(header, arrays, 2)]
                )
                return {"incarnation": incarnation}, [array for rows in read for array in rows]
            case "push":
                return {"applied": self._push(header, arrays)}, ()
            case "scan":
                return self._scan(header)
            case "owners":
                (incarnation, _), owners = self.shard.read([]), self.shard.owners
                return {
                    "incarnation": incarnation,
                    "version": owners.version,
                    "num_owners": owners.num_owners,
                }, [owners.owner_B]
            case "stats":
                return self.shard.stats(), ()
        raise RoostreamError(f"expected a call of owners, pull, push, read, scan or stats, got {method!r}")

    def _push(self, header: Header, arrays: Sequence[np.ndarray]) -> bool:
        return self.shard.push(integer(header, "incarnation"), self.update_of(header, arrays))

    def update_of(self, header: Header, arrays: Sequence[np.ndarray]) -> GradientPush:
        """What a push carries, checked. Raises SchemaError, WireError: it doesn't fit."""
        asked = self._asked(header, arrays, 3)
        for table, keys, (gradient_UD,) in asked:
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
            parts=[(table, keys, gradient_UD) for table, keys, (gradient_UD,) in asked],
            step=integer(header, "step") if workers > 1 else 0,
            workers=workers,
            clip_row_norm=_norm(header) if workers > 1 else 0.0,
        )

    def _scan(self, header: Header) -> tuple[Header, Sequence[np.ndarray]]:
        """Whole buckets from number `cursor` on, until `limit` rows are reached. Each comes as it is at one moment: `buckets`
        says [bucket, incarnation, sequence, settles at], see `server.BucketScan`."""
        table = self._table(header.get("stack", ""))
        cursor, limit = integer(header, "cursor"), min(integer(header, "limit"), MAX_SCAN_ROWS)
        pages, left = self.shard.scan(table, cursor, limit)
        answer = {
            "cursor": left[0] if left else -1,
            "incarnation": max((p.incarnation for p in pages), default=0),
            "buckets": [[p.bucket, p.incarnation, p.sequence, p.settles_at] for p in pages],
        }
        keys = join_keys(no_keys(), *(p.keys for p in pages))
        rows_ND = np.concatenate([np.zeros((0, table.width), np.float32), *(p.rows_MD for p in pages)])
        counts = [len(p.keys) for p in pages]
        return answer, [
            keys.table_U,
            keys.id_U,
            rows_ND,
            np.repeat(np.array([p.sequence for p in pages], np.uint64), counts),
        ]

    def _asked(self, header: Header, arrays: Sequence[np.ndarray], each: int) -> list[Asked]:
        """Per stack named in the header: its table, keys and further arrays."""
        stacks = header.get("stacks")
        if not isinstance(stacks, list) or len(arrays) != each * len(stacks):
            raise WireError(
                "bad_shape", f"expected stacks: [name…] and {each} arrays for each, got {len(arrays)} arrays"
            )
        out: list[Asked] = []
        for n, name in enumerate(stacks):
            table = self._table(name)
            table_U, id_U, *rest = arrays[each * n : each * (n + 1)]
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


def _norm(header: Header) -> float:
    value = header.get("clip_row_norm", 0.0)
    if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise WireError(
            "bad_shape", f"expected a number from 0 on as 'clip_row_norm' in the header, got {value!r}"
        )
    return float(value)


def integer(header: Header, key: str) -> int:
    """A header's 64-bit integer; raises WireError where there is none."""
    value = header.get(key)
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise WireError("bad_shape", f"expected an integer {key!r} in the header, got {value!r}")
    return value
