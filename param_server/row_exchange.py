"""Rows held by the workers themselves: each worker has a shard, and all workers exchange requests and answers
at once.

    pull   split by owner ─► all_to_all: keys ─► each owner answers all ─► all_to_all: rows ─► into place
    push   split by owner ─► all_to_all: keys, gradients ─► each owner applies one update ─► all_to_all: done

Both are collective calls: a worker without keys takes part too. A message is the frame of a shard's RPC call
(docs/protocols.md), one a peer with all stacks in it. Keys, rules, sums and errors are those of shards, so
rows are equal to the bit to rows at separate shards. A worker's own part is neither sent nor encoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from param_server.client import ShardKeys, checked_gradient, part_of, put_share, split_by_owner
from param_server.server import Shard, ShardRpcHandler, integer
from roostream.errors import ConfigError, RoostreamError, UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.rpc import frames
from roostream.runtime.rpc.client import error_of
from roostream.runtime.rpc.server import error_body
from roostream.runtime.rpc.transport import Header
from roostream.wire.lookup import Lookup


class Peers(Protocol):
    """The workers of one incarnation."""

    index: int
    workers: int

    def all_to_all(self, parts: Sequence[np.ndarray], about: str) -> list[np.ndarray]:
        """Exchange one part (uint8) with each worker; the own part comes back unchanged.

        All workers call it in the same order. `about`, the same for all, names the exchange: parts of one
        name have similar sizes.

        Raises:
            UnavailableError: a worker is gone or too late; all must be restored.
        """


@dataclasses.dataclass(frozen=True)
class ExchangeCall:
    """A call of a shard, before it is encoded."""

    method: str
    header: Header
    arrays: list[np.ndarray]


class RowExchange:
    """The rows client of one worker that holds `shard`. As `param_server.client.Client`, but `pull` and
    `push` are collective."""

    def __init__(self, shard: Shard, peers: Peers) -> None:
        self.shard, self.peers, self.calls = shard, peers, ShardRpcHandler(shard)
        self.incarnation, self.owners = 0, shard.identity.first_owners
        self.sent_bytes = 0  # sent to other workers so far
        self._sequence = 0
        self._lost = ""

    def meet(self, peers: Peers) -> None:
        """Set the workers of the next incarnation; `set_incarnation` follows. No call may be in progress."""
        self.peers = peers

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        """As `Client.set_incarnation`, after the shards were restored.

        Raises:
            ConfigError: the owners are not the workers. Nothing was changed.
        """
        owners = owners or self.shard.identity.first_owners
        owners.check(self.shard.identity.num_buckets, self.peers.workers)
        if workers != self.peers.workers:
            raise ConfigError(f"expected {self.peers.workers} workers that hold rows, got {workers}")
        self.incarnation, self.owners, self._sequence, self._lost = incarnation, owners, 0, ""

    def pull(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D], aligned with the lookup; keys without a row read as their initial value.

        Raises:
            FencedError, UnavailableError: an owner is in another incarnation, or gone; all must be restored.
        """
        tables = self.shard.tables
        out = {
            name: np.empty((len(stack.id_U), tables[name].width), np.float32)
            for name, stack in lookup.stacks.items()
        }
        shares = split_by_owner(lookup, self.owners)
        calls = [
            ExchangeCall("pull", {"incarnation": self.incarnation, "stacks": _stacks(owned)}, _keys(owned))
            for owned in shares
        ]
        for owned, arrays in zip(shares, self._round(calls, self._pulled), strict=True):
            for share, rows_MD in zip(owned, arrays, strict=True):
                put_share(out, share, rows_MD)
        return out

    def push(
        self, lookup: Lookup, gradients: Mapping[str, np.ndarray], *, step: int, time_ms: int, **more: Any
    ) -> None:
        """Apply the gradients of all workers (stack → float32 [U, D], aligned with the lookup), each row's
        sum at its owner.

        `more`: as in `Client.push`.

        Raises:
            WireError: a gradient has another shape (nothing was sent, and the others wait until their time
            limit), or is not finite. FencedError, UnavailableError: as `pull`.

        **If it fails**, other owners may have applied theirs: every further push is rejected until
        `set_incarnation`.
        """
        if self._lost:
            raise UnavailableError(f"a push before this one was lost ({self._lost}); waiting to be restored")
        tables = self.shard.tables
        parts = {
            n: checked_gradient(n, g, (len(lookup.stacks[n].id_U), tables[n].width))
            for n, g in gradients.items()
        }
        self._sequence += 1
        header = {
            "oldest_engagement_ms": 0,
            "oldest_close_ms": 0,
            "clip_row_norm": 0.0,
            **more,
            "step": step,
            "time_ms": time_ms,
        }
        header |= {"incarnation": self.incarnation, "worker": self.peers.index, "sequence": self._sequence}
        header |= {"workers": self.peers.workers}
        calls = []
        for owned in split_by_owner(lookup, self.owners):
            sent = [share for share in owned if share.stack in parts]
            arrays = [a for s in sent for a in (s.table_M, s.id_M, part_of(parts[s.stack], s))]
            calls.append(ExchangeCall("push", {**header, "stacks": _stacks(sent)}, arrays))
        try:
            self._round(calls, self._pushed)
        except RoostreamError as error:
            self._lost = str(error) or type(error).__name__
            raise

    def close(self) -> None:
        """Peers and shard belong to the caller."""

    def _round(self, own_calls: Sequence[ExchangeCall], do: Any) -> list[list[np.ndarray]]:
        """Send everyone's calls to their owners; return the answers to this worker's calls."""
        me = self.peers.index
        method = own_calls[me].method
        parts = [_NOTHING if n == me else self._sent(_encoded(call)) for n, call in enumerate(own_calls)]
        got = self.peers.all_to_all(parts, method)
        calls = [own_calls[n] if n == me else _call_of(data) for n, data in enumerate(got)]
        answers: list[list[np.ndarray] | RoostreamError] = do(calls)
        back = [_NOTHING if n == me else self._sent(_answer(answer)) for n, answer in enumerate(answers)]
        received = [
            answers[n] if n == me else _answer_of(data)
            for n, data in enumerate(self.peers.all_to_all(back, f"{method} answered"))
        ]
        for answer in received:
            if isinstance(answer, RoostreamError):
                raise answer
        return [answer for answer in received if not isinstance(answer, RoostreamError)]

    def _pulled(self, calls: Sequence[ExchangeCall]) -> list[list[np.ndarray] | RoostreamError]:
        out: list[list[np.ndarray] | RoostreamError] = []
        for call in calls:
            try:
                out.append(list(self.calls.handle("pull", call.header, call.arrays)[1]))
            except RoostreamError as error:
                out.append(error)
        return out

    def _pushed(self, calls: Sequence[ExchangeCall]) -> list[list[np.ndarray] | RoostreamError]:
        """Apply one update of all workers; every worker gets the same outcome."""
        try:
            updates = [self.calls.decode_push(call.header, call.arrays) for call in calls]
            self.shard.push_step(integer(calls[0].header, "incarnation"), updates)
        except RoostreamError as error:
            return [error for _ in calls]
        return [[] for _ in calls]

    def _sent(self, data: np.ndarray) -> np.ndarray:
        self.sent_bytes += len(data)
        return data


_NOTHING = np.zeros(0, np.uint8)


def _stacks(shares: Sequence[ShardKeys]) -> list[str]:
    return [share.stack for share in shares]


def _keys(shares: Sequence[ShardKeys]) -> list[np.ndarray]:
    return [array for share in shares for array in (share.table_M, share.id_M)]


def _encoded(call: ExchangeCall) -> np.ndarray:
    return _bytes(frames.encode(frames.CALL, {"method": call.method, "header": call.header}, call.arrays))


def _answer(answer: list[np.ndarray] | RoostreamError) -> np.ndarray:
    if isinstance(answer, RoostreamError):
        return _bytes(frames.encode(frames.ERROR, error_body(answer)))
    return _bytes(frames.encode(frames.ANSWER, {"header": {}}, answer))


def _bytes(buffers: Sequence[Any]) -> np.ndarray:
    return np.frombuffer(b"".join(buffers), np.uint8)


def _parsed(data: np.ndarray) -> tuple[int, frames.Body, list[np.ndarray]]:
    """Kind, header and arrays of a frame. Raises WireError: it is damaged, or something else."""
    raw = np.ascontiguousarray(data).data
    prefix = frames.parse_prefix(raw[: frames.PREFIX_BYTES])
    ends = frames.PREFIX_BYTES + prefix.header_bytes
    head, payload = raw[frames.PREFIX_BYTES : ends], np.frombuffer(raw[ends:], np.uint8).copy()  # aligned
    frames.check(prefix, raw[: frames.PREFIX_BYTES], head, payload)
    body = frames.parse_header(prefix, head)
    return prefix.kind, body, frames.views(body, payload)


def _call_of(data: np.ndarray) -> ExchangeCall:
    _, body, arrays = _parsed(data)
    return ExchangeCall(str(body["method"]), body["header"], arrays)


def _answer_of(data: np.ndarray) -> list[np.ndarray] | RoostreamError:
    kind, body, arrays = _parsed(data)
    return error_of(body) if kind == frames.ERROR else arrays
