"""The parameter server's client: one pull and one push for each batch and shard, with all stacks in it.

The keys of a batch are unique (`roostream.wire.lookup`). They are split by shard once, sent to all shards in
parallel, and the answers are put back into their positions. Readers outside training use a `Replica`.

Letters: U unique keys of a stack, M keys of one shard, D width, S shards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from param_server import kernels
from param_server.embedding_table import Keys
from param_server.row_block import RowBlock
from roostream.errors import ConfigError, RoostreamError, TransportError, UnavailableError, WireError
from roostream.runtime.backoff import Backoff
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS
from roostream.runtime.rpc.transport import Answer, Arrays, Header, Transport
from roostream.schema.schema import Schema
from roostream.wire.lookup import Lookup, StackLookup

_MAX_WRITE_BYTES = 16 << 20  # of rows and states in one message
_TIMEOUT_S, _CHECK_TIMEOUT_S = 30.0, 5.0  # of one call


class ShardKeys(NamedTuple):
    """The keys of one stack that one shard owns: positions in U, and the keys."""

    stack: str
    at_M: np.ndarray | slice
    table_M: np.ndarray
    id_M: np.ndarray


class Client:
    """The client of one worker. `pull` may run in parallel to `push`; pushes are sequential. Call `close` to
    end its threads."""

    def __init__(
        self,
        schema: Schema,
        transports: Sequence[Transport],
        *,
        worker: int,
        num_buckets: int = DEFAULT_BUCKETS,
        resend_for_s: float | None = 5.0,
        clock: Clock | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.schema, self.transports, self.worker, self.num_buckets = schema, transports, worker, num_buckets
        self.resend_for_s, self.clock, self.stop = resend_for_s, clock or SystemClock(), stop
        self.incarnation, self.workers = 0, 1
        self.owners = BucketMap.modulo(num_buckets, len(transports))
        self._width = {name: tables[0].dim for name, tables in schema.stacks.items()}
        self._sequence_S = [0] * len(transports)
        self._lost = ""
        self._push_lock, self._split_lock = threading.Lock(), threading.Lock()
        self._splits: WeakKeyDictionary[Lookup, list[list[ShardKeys]]] = WeakKeyDictionary()
        self.pool = (
            ThreadPoolExecutor(max(2 * len(transports), 1), "param-client") if len(transports) > 1 else None
        )

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        """The shards were restored: pushes start again, from this number of workers a step, and buckets are
        owned as `owners` says.

        `owners` None = bucket mod shards. No push may be in progress.

        Raises:
            ConfigError: the map has another number of buckets or shards; nothing was changed.
        """
        owners = owners or BucketMap.modulo(self.num_buckets, len(self.transports))
        owners.check(self.num_buckets, len(self.transports))
        with self._push_lock, self._split_lock:
            self.incarnation, self.workers, self.owners = incarnation, workers, owners
            self._sequence_S = [0] * len(self.transports)
            self._lost = ""
            self._splits.clear()

    def check_order(self) -> None:
        """Check that the transports are in the order of the shards' indices. Otherwise every pull would be
        refused, and restoring all members would not help.

        Raises:
            ConfigError: another shard answers.
            UnavailableError, TransportError: a shard does not answer.
        """
        for index, transport in enumerate(self.transports):
            answer, _ = transport.call("stats", {}, timeout_s=_CHECK_TIMEOUT_S)
            if answer.get("index", index) != index:
                raise ConfigError(
                    f"shards: expected the address of shard {index} at place {index}, got that of shard "
                    f"{answer['index']}; list the addresses in the order of the shards' `index`"
                )

    def pull(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D], aligned with the lookup; keys without a row read as their initial value.

        Raises:
            FencedError: the shards are in another incarnation than this client. UnavailableError,
            TransportError: a shard waits to be restored, or could not be reached for `resend_for_s`.
        """
        out = {n: np.empty((len(s.id_U), self._width[n]), np.float32) for n, s in lookup.stacks.items()}

        def pull_from(shard: int, shares: Sequence[ShardKeys]) -> None:
            arrays = [a for share in shares for a in (share.table_M, share.id_M)]
            header = {"incarnation": self.incarnation, "stacks": [share.stack for share in shares]}
            _, rows = self._call(shard, "pull", header, arrays)
            for share, rows_MD in zip(shares, rows, strict=True):
                if isinstance(share.at_M, slice):
                    out[share.stack] = rows_MD
                else:
                    kernels.put_rows(out[share.stack], share.at_M, rows_MD)

        self._each_shard(self._shares(lookup), pull_from)
        return out

    def push(
        self,
        lookup: Lookup,
        gradients: Mapping[str, np.ndarray],
        *,
        step: int,
        time_ms: int,
        oldest_engagement_ms: int = 0,
        oldest_close_ms: int = 0,
        clip_row_norm: float = 0.0,
    ) -> None:
        """Apply gradients (stack → float32 [U, D], aligned with the lookup) on every shard; all have applied
        them on return.

        Stacks of the lookup without a gradient are left as they are. Several workers push at the same steps,
        also with an empty lookup: a shard adds the pushes of all workers for `step`, clips each row's sum to
        a norm of `clip_row_norm` (0 = no limit), and answers when the sum is applied. A call without an
        answer is repeated with the same sequence number, which a shard applies once.

        Raises:
            WireError: a gradient has another shape; nothing was sent, and training can continue.
            WireError `non_finite`: a shard rejected it.
            FencedError: the shards are in another incarnation.
            UnavailableError, TransportError: as `pull`.

        **If it fails** after something was sent, every further push is rejected until `set_incarnation`.
        """
        parts = {
            stack: checked_gradient(stack, gradient_UD, (len(lookup.stacks[stack].id_U), self._width[stack]))
            for stack, gradient_UD in gradients.items()
        }
        shares = [[share for share in of_shard if share.stack in parts] for of_shard in self._shares(lookup)]
        header: Header = {
            "worker": self.worker,
            "step": step,
            "time_ms": time_ms,
            "oldest_engagement_ms": oldest_engagement_ms,
            "oldest_close_ms": oldest_close_ms,
        }
        if self.workers > 1:
            header |= {"workers": self.workers, "clip_row_norm": clip_row_norm}
        with self._changing_rows():
            self._each_shard(
                shares,
                lambda shard, keys: self._push_to(shard, keys, header, parts),
                every=self.workers > 1,
            )

    # Of workers that hold the rows themselves (trainer/row_home.py)

    def records(self, stack: str, buckets: Sequence[int]) -> Iterator[tuple[Keys, np.ndarray]]:
        """(keys, float32 [M, D + A]): all rows of these buckets with their states, in pieces of at least one
        row. Nothing may add or remove rows meanwhile. Raises as `pull`."""
        for shard in range(len(self.transports)):
            owned = [bucket for bucket in buckets if self.owners.owner_B[bucket] == shard]
            start, end = 0, 1
            while owned and start < end:
                header = {"incarnation": self.incarnation, "stack": stack, "buckets": owned, "start": start}
                answer, (table_M, id_M, rows_MD, state_MA) = self._call(shard, "records", header, [])
                start, end = start + len(id_M), int(answer["end"])
                if len(id_M):
                    yield Keys(table_M, id_M), np.concatenate([rows_MD, state_MA], axis=1)

    def overwrite(self, stack: str, block: RowBlock) -> None:
        """Set rows with their states at their shards, in messages of limited size; the next commit contains
        them.

        Raises as `pull`. **If it fails**, every further push and write is rejected until `set_incarnation`.
        """

        def write(shard: int, shares: Sequence[ShardKeys]) -> None:
            (share,) = shares
            part = block if isinstance(share.at_M, slice) else block.take(share.at_M)
            row_bytes = max(part.rows_LD[:1].nbytes + part.state_LA[:1].nbytes, 1)
            each = max(_MAX_WRITE_BYTES // row_bytes, 1)
            for start in range(0, len(part.keys), each):
                piece = part.take(np.arange(start, min(start + each, len(part.keys))))
                sequence = self._sequence_S[shard] + 1
                header = {"incarnation": self.incarnation, "worker": self.worker, "sequence": sequence}
                arrays = [
                    piece.keys.table_U,
                    piece.keys.id_U,
                    piece.stamp_ms_L,
                    piece.rows_LD,
                    piece.state_LA,
                ]
                self._call(shard, "overwrite", {**header, "stacks": [stack]}, arrays)
                self._sequence_S[shard] = sequence

        lookup = Lookup({stack: StackLookup(block.keys.table_U, block.keys.id_U, {})})
        with self._changing_rows():
            self._each_shard(split_by_owner(lookup, self.owners), write)

    def contains(self, stack: str, keys: Keys) -> np.ndarray:
        """bool [M]: the keys that have a row. Raises as `pull`."""
        found_M = np.zeros(len(keys), np.bool_)

        def ask_shard(shard: int, shares: Sequence[ShardKeys]) -> None:
            (share,) = shares
            header = {"incarnation": self.incarnation, "stacks": [stack]}
            _, (has_M,) = self._call(shard, "contains", header, [share.table_M, share.id_M])
            found_M[share.at_M] = has_M.astype(np.bool_)

        lookup = Lookup({stack: StackLookup(keys.table_U, keys.id_U, {})})
        self._each_shard(split_by_owner(lookup, self.owners), ask_shard)
        return found_M

    def close(self) -> None:
        """End the threads; the transports belong to the caller."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def _changing_rows(self) -> Iterator[None]:
        """One call at a time changes rows, and none after one that may have been lost."""
        with self._push_lock:
            if self._lost:
                raise UnavailableError(
                    f"a push before this one was lost ({self._lost}); waiting to be restored"
                )
            try:
                yield
            except RoostreamError as error:
                self._lost = str(error) or type(error).__name__
                raise

    def _push_to(
        self, shard: int, shares: Sequence[ShardKeys], header: Header, gradients: Mapping[str, np.ndarray]
    ) -> None:
        """Push the gradients of one shard's keys."""
        arrays = []
        for share in shares:
            gradient_UD, is_all = gradients[share.stack], isinstance(share.at_M, slice)
            part_MD = gradient_UD if is_all else kernels.take_rows(gradient_UD, share.at_M)
            arrays += [share.table_M, share.id_M, part_MD]
        sequence, stacks = self._sequence_S[shard] + 1, [share.stack for share in shares]
        fields = {"incarnation": self.incarnation, "sequence": sequence, "stacks": stacks}
        self._call(shard, "push", {**header, **fields}, arrays)
        self._sequence_S[shard] = sequence

    def _call(self, shard: int, method: str, header: Header, arrays: Arrays) -> Answer:
        """Call a shard, again if it does not answer. Pushes and writes have a sequence number, so a shard
        applies a repeated one once; the other calls change nothing."""
        backoff = Backoff(
            what=f"shard {shard}", timeout_s=self.resend_for_s, first_s=0.05, max_s=0.5, clock=self.clock
        )
        transport = self.transports[shard]
        return backoff.until(
            lambda: transport.call(method, header, arrays, timeout_s=_TIMEOUT_S), (TransportError,), self.stop
        )

    def _shares(self, lookup: Lookup) -> list[list[ShardKeys]]:
        """Each shard's keys, cached as long as the lookup exists."""
        with self._split_lock:
            shares = self._splits.get(lookup)
            if shares is None:
                shares = self._splits[lookup] = split_by_owner(lookup, self.owners)
            return shares

    def _each_shard(
        self,
        shares: Sequence[Sequence[ShardKeys]],
        do: Callable[[int, Sequence[ShardKeys]], None],
        *,
        every: bool = False,
    ) -> None:
        """Call all shards in parallel (with `every` also those without keys); wait for all, then raise the
        first error."""
        busy = [(shard, share) for shard, share in enumerate(shares) if share or every]
        if self.pool is None or len(busy) < 2:
            for shard, share in busy:
                do(shard, share)
            return
        futures = [self.pool.submit(do, shard, share) for shard, share in busy]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]


def split_by_owner(lookup: Lookup, owners: BucketMap) -> list[list[ShardKeys]]:
    """Each owner's keys; stacks without keys are left out."""
    num_owners = owners.num_owners
    shares: list[list[ShardKeys]] = [[] for _ in range(num_owners)]
    for stack, found in lookup.stacks.items():
        if len(found.id_U) == 0:
            continue
        if num_owners == 1:
            shares[0].append(ShardKeys(stack, slice(None), found.table_U, found.id_U))
            continue
        order_U, starts_S1 = np.empty(len(found.id_U), np.int64), np.empty(num_owners + 1, np.int64)
        kernels.split_by_shard(found.table_U, found.id_U, owners.owner_B, num_owners, order_U, starts_S1)
        for owner, owned in enumerate(shares):
            at_M = order_U[starts_S1[owner] : starts_S1[owner + 1]]
            if len(at_M):
                owned.append(ShardKeys(stack, at_M, found.table_U[at_M], found.id_U[at_M]))
    return shares


def checked_gradient(stack: str, gradient_UD: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The gradient, contiguous. Raises WireError: it has another shape."""
    if gradient_UD.shape != shape or gradient_UD.dtype != np.float32:
        raise WireError(
            "bad_shape",
            f"stack {stack}: expected a float32 gradient of {shape}, got {gradient_UD.dtype} "
            f"{gradient_UD.shape}",
        )
    return np.ascontiguousarray(gradient_UD)
