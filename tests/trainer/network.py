"""The simulated network between programs: RPCs, heartbeats and the checkpoint store. Faults are given as
data.

`MessageFaults` draws random faults of single messages. A `FaultSchedule` lists faults that last for a range
of rounds: dead links, slow shards, an unusable store, wrong clocks. All faults end, so that every run can
finish.
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
    """No call of `source` arrives at `target`. Between two workers, parts of gradient sums are lost; these
    are one-way messages without answers."""

    source: str
    target: str
    first: int  # round
    rounds: int
    answers_only: bool = False  # calls are executed, but their answers are lost


class SlowShard(NamedTuple):
    """A shard that executes or answers calls late. Its heartbeats stay on time: another thread sends them."""

    shard: str
    first: int
    rounds: int
    rounds_late: int
    executes_late: bool = False  # False: it executes at once, and answers late


class StoreFault(NamedTuple):
    """A fault of the store, as one program or all programs see it."""

    kind: str  # "unmounted" (an empty folder is at the mount point), "read-only" or "unavailable"
    first: int  # round
    rounds: int
    who: str = ""  # program; "" = all


class WrongClock(NamedTuple):
    """The wall clock of one program jumps by `ms`, and jumps back at the end."""

    who: str  # program
    first: int  # round
    rounds: int
    ms: int


class FaultSchedule(NamedTuple):
    """Faults that last for a range of rounds."""

    links: tuple[DeadLink, ...] = ()
    slow: tuple[SlowShard, ...] = ()
    store: tuple[StoreFault, ...] = ()
    clocks: tuple[WrongClock, ...] = ()


class Network:
    """Applies a fault schedule in the current round. `fault_counts`: how often each fault had an effect."""

    def __init__(self, schedule: FaultSchedule) -> None:
        self.schedule, self.round = schedule, 0
        self.fault_counts: Counter[str] = Counter()

    def deliver(self, source: str, target: str, *, is_answer: bool = False) -> None:
        """Deliver a request to `target`, or its answer to `source`. Raises TransportError: it is lost."""
        for link in self.schedule.links:
            if (
                link[:2] == (source, target)
                and link.answers_only == is_answer
                and 0 <= self.round - link.first < link.rounds
            ):
                self.fault_counts[f"{source} → {target}{', answers' * is_answer}"] += 1
                raise TransportError(f"{target} can't be reached")

    def can_receive(self, worker: int, other: int) -> bool:
        """Whether messages of worker `other` arrive at `worker`."""
        try:
            self.deliver(f"worker {other}", f"worker {worker}")
        except TransportError:
            return False
        return True

    def store_fault(self, who: str) -> str:
        """The kind of fault of the store for this program now; "" = none."""
        for fault in self.schedule.store:
            if fault.who in ("", who) and 0 <= self.round - fault.first < fault.rounds:
                self.fault_counts[f"store {fault.kind}"] += 1
                return fault.kind
        return ""

    def clock_error_ms(self, who: str) -> int:
        """The error of this program's wall clock now."""
        for wrong in self.schedule.clocks:
            if wrong.who == who and 0 <= self.round - wrong.first < wrong.rounds:
                self.fault_counts[f"clock of {who}"] += 1
                return wrong.ms
        return 0

    def slowness(self, shard: str) -> SlowShard | None:
        """The fault that makes this shard slow now, if any."""
        for slow in self.schedule.slow:
            if slow.shard == shard and 0 <= self.round - slow.first < slow.rounds:
                self.fault_counts[f"{shard} {'begins' if slow.executes_late else 'answers'} late"] += 1
                return slow
        return None


class MessageFaults:
    """Random faults of single messages. There are at most `max_faults`, so that every run ends; without a
    seed there are none."""

    def __init__(self, seed: int | None, *, probability: float = 0.15, max_faults: int = 60) -> None:
        self.random = random.Random(seed)
        self.probability, self.remaining = probability, 0 if seed is None else max_faults
        self.injected: Counter[str] = Counter()
        self.delayed: list[Callable[[], object]] = []  # copies of messages that have not arrived yet

    def draw(self, *faults: str) -> str:
        """Return one of these faults, or "" for none."""
        if not self.remaining or self.random.random() >= self.probability:
            return ""
        self.remaining -= 1
        fault = self.random.choice(faults)
        self.injected[fault] += 1
        return fault

    def deliver_delayed(self) -> None:
        """Deliver some of the delayed copies in random order. Their answers are dropped."""
        self.random.shuffle(self.delayed)
        while self.delayed and self.random.random() < 0.5:
            with contextlib.suppress(RoostreamError):
                self.delayed.pop()()


class ProgramClock:
    """The clock of one program. Its wall clock may be wrong; its monotonic clock is the simulation's."""

    def __init__(self, clock: Clock, who: str, network: Network) -> None:
        self.clock, self.who, self.network = clock, who, network

    def now_ms(self) -> int:
        return self.clock.now_ms() + self.network.clock_error_ms(self.who)

    def monotonic_s(self) -> float:
        return self.clock.monotonic_s()

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        return self.clock.sleep(seconds, stop)


class FlakyMemoryStore(MemoryStore):
    """An in-memory store in which random calls fail, before or after they take effect. No call fails while
    `reliable` is true."""

    def __init__(self, message_faults: MessageFaults) -> None:
        super().__init__()
        self.message_faults, self.reliable = message_faults, True

    def _fault(self, method: str, when: str) -> None:
        super()._fault(method, when)
        if not self.reliable and self.message_faults.draw("store away"):
            raise UnavailableError(f"{method}: the store is away")


class FlakyBucketStore(FlakyMemoryStore):
    """A `FlakyMemoryStore` that keeps its objects in a bucket of a real S3 server."""

    def __init__(self, message_faults: MessageFaults, bucket: ObjectStore) -> None:
        super().__init__(message_faults)
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
        def observed_chunks() -> Iterator[bytes]:
            part = 0
            for part, chunk in enumerate(chunks):
                self.before_part(name, part)
                self._fault("put_stream", "before")
                yield chunk
            self.before_part(name, part + 1)

        self.bucket.put_stream(name, observed_chunks(), size)
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
    """The connection of one program to the store. While the store is unmounted, calls go to `mount_point`,
    the empty folder below it."""

    def __init__(self, store: MemoryStore, mount_point: MemoryStore, who: str, network: Network) -> None:
        self.mounted, self.mount_point, self.who, self.network = store, mount_point, who, network

    def create(self, name: str, data: bytes) -> bool:
        return self._call(lambda store: store.create(name, data), writes=True)

    def put(self, name: str, data: bytes) -> None:
        self._call(lambda store: store.put(name, data), writes=True)

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        self._call(lambda store: store.put_stream(name, chunks, size), writes=True)

    def get(self, name: str) -> bytes:
        return self._call(lambda store: store.get(name))

    def get_range(self, name: str, start: int, size: int) -> bytes:
        return self._call(lambda store: store.get_range(name, start, size))

    def list(self, prefix: str) -> list[str]:
        return self._call(lambda store: store.list(prefix))

    def delete(self, name: str) -> None:
        self._call(lambda store: store.delete(name), writes=True)

    def sweep(self) -> None:
        self._call(lambda store: store.sweep(), writes=True)

    def _call(self, do: Callable[[MemoryStore], T], *, writes: bool = False) -> T:
        fault = self.network.store_fault(self.who)
        if fault == "unavailable" or (fault == "read-only" and writes):
            raise UnavailableError(f"the store is {fault}")
        try:
            self.network.deliver(self.who, STORE)
            result = do(self.mount_point if fault == "unmounted" else self.mounted)
            self.network.deliver(self.who, STORE, is_answer=True)
        except TransportError:
            raise UnavailableError("the store is away") from None
        return result


class SimulatedSystem(Protocol):
    """The parts of a simulation that the transports use."""

    network: Network
    message_faults: MessageFaults
    clock: Clock


class ShardTransport:
    """A program's transport to a shard. `find` returns the shard's current process; None: it is dead."""

    def __init__(
        self,
        system: SimulatedSystem,
        source: str,
        shard: str,
        find: Callable[[], FakeShard | RealShard | None],
    ) -> None:
        self.system, self.source, self.shard, self.find = system, source, shard, find

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Any:
        network, message_faults = self.system.network, self.system.message_faults
        network.deliver(self.source, self.shard)
        fault = message_faults.draw("lost", "answer lost", "twice", "late copy")
        if fault == "lost":
            raise TransportError(f"{method}: lost")
        slow = network.slowness(self.shard)
        if slow is not None and slow.executes_late:
            try:
                self._wait(slow.rounds_late)
            except (TransportError, Killed):  # the shard executes the call although the caller has given up
                message_faults.delayed.append(lambda: self._handle(method, header, arrays))
                raise
        if fault == "late copy":
            message_faults.delayed.append(lambda: self._handle(method, header, arrays))
        answer = self._handle(method, header, arrays)
        if fault == "twice":
            answer = self._handle(method, header, arrays)
        if slow is not None and not slow.executes_late:
            self._wait(slow.rounds_late)
        if fault == "answer lost":
            raise TransportError(f"{method}: the answer was lost")
        network.deliver(self.source, self.shard, is_answer=True)
        return answer

    def close(self) -> None: ...

    def _handle(self, method: str, header: Header, arrays: Arrays) -> Any:
        shard = self.find()
        if shard is None:
            raise TransportError(f"{method}: connection refused")
        return shard.handle(method, dict(header), [np.array(a) for a in arrays])

    def _wait(self, rounds: int) -> None:
        """Wait until the answer comes. Raises TransportError: the caller's time limit or the shard's process
        ended before."""
        network, shard = self.system.network, self.find()
        until = network.round + rounds
        try:
            wait_until(
                lambda: network.round >= until or self.find() is not shard, self.system.clock, "an answer"
            )
        except UnavailableError as error:
            raise TransportError(str(error)) from None
        if self.find() is not shard:
            raise TransportError("the connection was closed")


class HeartbeatTransport:
    """A member's transport to the controller. `find` returns the current controller. `overtake` sends a
    second heartbeat from the member's other thread, while the answer to the first one is delayed."""

    def __init__(
        self,
        system: SimulatedSystem,
        source: str,
        find: Callable[[], Controller | None],
        overtake: Callable[[], None] = lambda: None,
    ) -> None:
        self.system, self.source, self.find, self.overtake = system, source, find, overtake

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Any:
        network, message_faults = self.system.network, self.system.message_faults
        network.deliver(self.source, CONTROLLER)
        fault = message_faults.draw(
            "beat lost", "beat's answer lost", "beat twice", "late copy of a beat", "late answer"
        )
        if fault == "beat lost":
            raise TransportError("beat: lost")
        if fault == "late copy of a beat":
            message_faults.delayed.append(lambda: self._handle(header))
        answer = self._handle(header)
        if fault == "beat twice":
            answer = self._handle(header)
        if fault == "beat's answer lost":
            raise TransportError("beat: the answer was lost")
        network.deliver(self.source, CONTROLLER, is_answer=True)
        if fault == "late answer":
            self.overtake()
        return answer, []

    def close(self) -> None: ...

    def _handle(self, header: Header) -> Header:
        controller = self.find()
        if controller is None:
            raise TransportError("beat: connection refused")
        return through_msgpack(controller.handle("beat", through_msgpack(header), ())[0])


def through_msgpack(header: Header) -> Header:
    """Encode and decode a header, as a real transport does."""
    decoded: Header = msgspec.msgpack.decode(
        msgspec.msgpack.encode(header, enc_hook=lambda number: number.item())
    )
    return decoded
