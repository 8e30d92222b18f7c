"""What lies between the programs of a simulation: calls, beats and a store, with faults that are data.

`Disorder` draws what becomes of one message. A `DeadLink` lasts: from one round to another nothing of one
program's calls arrives at the other, or they arrive and their answers don't. A `SlowShard` lasts too: what it
is asked, or its answer, is late by rounds. Everything is well again in the end, so that every run ends.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from roostream.errors import RoostreamError, TransportError, UnavailableError
from roostream.runtime.checkpoint_store import ObjectStore
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Arrays, Header
from roostream.runtime.store_identity import IDENTITY_NAME
from tests.trainer.actors import Killed, wait_until
from tests.trainer.fake_shard import FakeShard
from tests.trainer.memory_store import MemoryStore
from tests.trainer.real_shard import RealShard
from trainer.control.controller import Controller

T = TypeVar("T")
CONTROLLER, STORE = "controller", "store"


class DeadLink(NamedTuple):
    """Between two workers it is the parts of sums on their way that don't arrive; they have no answers."""

    source: str  # who calls
    target: str
    first: int  # round
    rounds: int
    answers_only: bool = False  # what is asked is done, and the caller doesn't hear of it


class SlowShard(NamedTuple):
    """Beats are as quick as ever: another thread sends them."""

    shard: str
    first: int
    rounds: int
    late: int  # rounds
    begins_late: bool = False  # it does late what it is asked; else it does it at once, and answers late


class StoreFault(NamedTuple):
    """What becomes of the store, for one program or for all."""

    kind: str  # "unmounted" (an empty folder is in its place), "read-only" or "unavailable"
    first: int  # round
    rounds: int
    who: str = ""  # "" = everyone


class WrongClock(NamedTuple):
    """The wall clock of one program is wrong by `ms`: it jumps there and back."""

    who: str
    first: int  # round
    rounds: int
    ms: int


class Lasting(NamedTuple):
    """Faults that last."""

    links: tuple[DeadLink, ...] = ()
    slow: tuple[SlowShard, ...] = ()
    store: tuple[StoreFault, ...] = ()
    clocks: tuple[WrongClock, ...] = ()


class Network:
    """`lasting` by the round that it is; `struck` counts what each fault did."""

    def __init__(self, lasting: Lasting) -> None:
        self.lasting, self.round = lasting, 0
        self.struck: Counter[str] = Counter()

    def reach(self, source: str, target: str, *, is_answer: bool = False) -> None:
        """A request on its way to `target`, or its answer back. Raises TransportError: it doesn't arrive."""
        for link in self.lasting.links:
            if (
                link[:2] == (source, target)
                and link.answers_only == is_answer
                and 0 <= self.round - link.first < link.rounds
            ):
                self.struck[f"{source} → {target}{', answers' * is_answer}"] += 1
                raise TransportError(f"{target} can't be reached")

    def hears(self, worker: int, other: int) -> bool:
        """Whether what `other` tells `worker` arrives."""
        try:
            self.reach(f"worker {other}", f"worker {worker}")
        except TransportError:
            return False
        return True

    def store_fault(self, who: str) -> str:
        """What is wrong with the store of `who` now; "" = nothing."""
        for fault in self.lasting.store:
            if fault.who in ("", who) and 0 <= self.round - fault.first < fault.rounds:
                self.struck[f"store {fault.kind}"] += 1
                return fault.kind
        return ""

    def clock_error_ms(self, who: str) -> int:
        """By how much the wall clock of `who` is wrong now."""
        for wrong in self.lasting.clocks:
            if wrong.who == who and 0 <= self.round - wrong.first < wrong.rounds:
                self.struck[f"clock of {who}"] += 1
                return wrong.ms
        return 0

    def late(self, shard: str) -> SlowShard | None:
        """How it is slow now."""
        for slow in self.lasting.slow:
            if slow.shard == shard and 0 <= self.round - slow.first < slow.rounds:
                self.struck[f"{shard} {'begins' if slow.begins_late else 'answers'} late"] += 1
                return slow
        return None


class Disorder:
    """What becomes of messages: `draw` names a fault, or "" for none. After `most` faults the network is
    well, so that every run ends."""

    def __init__(self, seed: int | None, *, share: float = 0.15, most: int = 60) -> None:
        self.random = random.Random(seed)
        self.share, self.left = share, 0 if seed is None else most
        self.drawn: Counter[str] = Counter()
        self.late: list[Callable[[], object]] = []  # copies that are still on their way

    def draw(self, *faults: str) -> str:
        if not self.left or self.random.random() >= self.share:
            return ""
        self.left -= 1
        fault = self.random.choice(faults)
        self.drawn[fault] += 1
        return fault

    def deliver_late(self) -> None:
        """Some copies arrive now, in any order; nobody waits for their answers."""
        self.random.shuffle(self.late)
        while self.late and self.random.random() < 0.5:
            with contextlib.suppress(RoostreamError):
                self.late.pop()()


class ProgramClock:
    """The clock of one program: time passes as for all of them, and the wall clock may be wrong."""

    def __init__(self, clock: Clock, who: str, network: Network) -> None:
        self.clock, self.who, self.network = clock, who, network

    def now_ms(self) -> int:
        return self.clock.now_ms() + self.network.clock_error_ms(self.who)

    def monotonic_s(self) -> float:
        return self.clock.monotonic_s()

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        return self.clock.sleep(seconds, stop)


class ShakyStore(MemoryStore):
    """A store that now and then can't be read or written for a call, before or after it had its effect;
    `well` while a test looks."""

    def __init__(self, disorder: Disorder) -> None:
        super().__init__()
        self.disorder, self.well = disorder, True

    def _fault(self, method: str, when: str) -> None:
        super()._fault(method, when)
        if not self.well and self.disorder.draw("store away"):
            raise UnavailableError(f"{method}: the store is away")


class BucketStore(ShakyStore):
    """A `ShakyStore` whose objects are in a bucket of a real S3 server."""

    def __init__(self, disorder: Disorder, bucket: ObjectStore) -> None:
        super().__init__(disorder)
        self.bucket = bucket
        for name, data in self.objects.items():
            bucket.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._fault("create", "before")
        self.before_create(name)
        is_new = self.bucket.create(name, data)
        self._fault("create", "after")
        return is_new

    def put(self, name: str, data: bytes) -> None:
        self._fault("put", "before")
        self.bucket.put(name, data)

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        def sent() -> Iterator[bytes]:
            part = 0
            for part, chunk in enumerate(chunks):
                self.before_part(name, part)
                self._fault("put_stream", "before")
                yield chunk
            self.before_part(name, part + 1)

        self.bucket.put_stream(name, sent(), size)
        self._fault("put_stream", "after")

    def get(self, name: str) -> bytes:
        if name != IDENTITY_NAME:
            self._fault("get", "before")
        return self.bucket.get(name)

    def get_range(self, name: str, start: int, size: int) -> bytes:
        self._fault("get", "before")
        return self.bucket.get_range(name, start, size)

    def list(self, prefix: str) -> list[str]:
        self._fault("list", "before")
        return self.bucket.list(prefix)

    def delete(self, name: str) -> None:
        self.bucket.delete(name)


class StoreLink:
    """The store as one program reaches it. `mount_point` is what is there while the store is not mounted."""

    def __init__(self, store: MemoryStore, mount_point: MemoryStore, who: str, network: Network) -> None:
        self.mounted, self.mount_point, self.who, self.network = store, mount_point, who, network

    def create(self, name: str, data: bytes) -> bool:
        return self._reached(lambda store: store.create(name, data), writes=True)

    def put(self, name: str, data: bytes) -> None:
        self._reached(lambda store: store.put(name, data), writes=True)

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        self._reached(lambda store: store.put_stream(name, chunks, size), writes=True)

    def get(self, name: str) -> bytes:
        return self._reached(lambda store: store.get(name))

    def get_range(self, name: str, start: int, size: int) -> bytes:
        return self._reached(lambda store: store.get_range(name, start, size))

    def list(self, prefix: str) -> list[str]:
        return self._reached(lambda store: store.list(prefix))

    def delete(self, name: str) -> None:
        self._reached(lambda store: store.delete(name), writes=True)

    def sweep(self) -> None:
        self._reached(lambda store: store.sweep(), writes=True)

    def _reached(self, do: Callable[[MemoryStore], T], *, writes: bool = False) -> T:
        fault = self.network.store_fault(self.who)
        if fault == "unavailable" or (fault == "read-only" and writes):
            raise UnavailableError(f"the store is {fault}")
        try:
            self.network.reach(self.who, STORE)
            done = do(self.mount_point if fault == "unmounted" else self.mounted)
            self.network.reach(self.who, STORE, is_answer=True)
        except TransportError:
            raise UnavailableError("the store is away") from None
        return done


class Ways(Protocol):
    """What a wire needs of its simulation."""

    network: Network
    disorder: Disorder
    clock: Clock


class Wire:
    """A transport of one program to whichever process is behind a shard's place now."""

    def __init__(
        self, ways: Ways, source: str, shard: str, find: Callable[[], FakeShard | RealShard | None]
    ) -> None:
        self.ways, self.source, self.shard, self.find = ways, source, shard, find

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Any:
        network, disorder = self.ways.network, self.ways.disorder
        network.reach(self.source, self.shard)
        fault = disorder.draw("lost", "answer lost", "twice", "late copy")
        if fault == "lost":
            raise TransportError(f"{method}: lost")
        slow = network.late(self.shard)
        if slow is not None and slow.begins_late:
            try:
                self._wait(slow.late)
            except (TransportError, Killed):  # nobody waits any more, and it still does it
                disorder.late.append(lambda: self._handle(method, header, arrays))
                raise
        if fault == "late copy":
            disorder.late.append(lambda: self._handle(method, header, arrays))
        answer = self._handle(method, header, arrays)
        if fault == "twice":
            answer = self._handle(method, header, arrays)
        if slow is not None and not slow.begins_late:
            self._wait(slow.late)
        if fault == "answer lost":
            raise TransportError(f"{method}: the answer was lost")
        network.reach(self.source, self.shard, is_answer=True)
        return answer

    def close(self) -> None: ...

    def _handle(self, method: str, header: Header, arrays: Arrays) -> Any:
        shard = self.find()
        if shard is None:
            raise TransportError(f"{method}: connection refused")
        return shard.handle(method, dict(header), [np.array(a) for a in arrays])

    def _wait(self, rounds: int) -> None:
        """Raises TransportError: the caller's patience, or the shard, has ended before."""
        network, shard = self.ways.network, self.find()
        until = network.round + rounds
        try:
            wait_until(
                lambda: network.round >= until or self.find() is not shard, self.ways.clock, "an answer"
            )
        except UnavailableError as error:
            raise TransportError(str(error)) from None
        if self.find() is not shard:
            raise TransportError("the connection was closed")


class BeatWire:
    """A member's transport to whichever controller there is. `overtake` lets the member beat once more, from
    its other thread, while an answer is on its way."""

    def __init__(
        self,
        ways: Ways,
        source: str,
        find: Callable[[], Controller | None],
        overtake: Callable[[], None] = lambda: None,
    ) -> None:
        self.ways, self.source, self.find, self.overtake = ways, source, find, overtake

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Any:
        network, disorder = self.ways.network, self.ways.disorder
        network.reach(self.source, CONTROLLER)
        fault = disorder.draw(
            "beat lost", "beat's answer lost", "beat twice", "late copy of a beat", "late answer"
        )
        if fault == "beat lost":
            raise TransportError("beat: lost")
        if fault == "late copy of a beat":
            disorder.late.append(lambda: self._handle(header))
        answer = self._handle(header)
        if fault == "beat twice":
            answer = self._handle(header)
        if fault == "beat's answer lost":
            raise TransportError("beat: the answer was lost")
        network.reach(self.source, CONTROLLER, is_answer=True)
        if fault == "late answer":
            self.overtake()
        return answer, []

    def close(self) -> None: ...

    def _handle(self, header: Header) -> Header:
        controller = self.find()
        if controller is None:
            raise TransportError("beat: connection refused")
        return copied(controller.handle("beat", copied(header), ())[0])


def copied(header: Header) -> Header:
    """As it arrives: through bytes."""
    arrived: Header = msgspec.msgpack.decode(
        msgspec.msgpack.encode(header, enc_hook=lambda number: number.item())
    )
    return arrived
