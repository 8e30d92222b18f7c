"""So many copies of one program on the nodes of a Ray cluster (package extra `ray`): on each seat an actor, which runs and
watches one copy as `ProcessPool` does on this machine. Ray places actors and tells of nodes that are lost; nothing else of ours
goes through it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra.child import Program
from infra.pools.processes import ProcessPool
from roostream.errors import ConfigError, UnavailableError

log = logging.getLogger("roostream.pool")

CPUS = 1.0  # that a seat takes of its node
_END_S = 25.0  # above the longest end of a copy

Copy = Callable[[int, Path], Program]
"""Number, folder of that copy alone → the program."""


class Seat:
    """The actor: one copy, as a child of the actor's process, which ends with it."""

    def __init__(self, copy: Copy, number: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="roostream-", ignore_cleanup_errors=True)
        self._pool = ProcessPool(lambda _: copy(number, Path(self._folder.name)))
        self._pool.resize(1)
        self._ended = threading.Event()

    def stay(self) -> None:
        """Until `end`: who waits for it hears of the actor's death."""
        self._ended.wait()

    def pids(self) -> list[int]:
        """Of the copy's process on its node; none while it is started again."""
        return self._pool.pids()

    def end(self) -> None:
        """The copy within its time limit, then `stay`."""
        self._pool.close()
        self._folder.cleanup()
        self._ended.set()


@dataclasses.dataclass(frozen=True)
class _Seated:
    """An actor, and what is told when it is over."""

    actor: Any
    over: Any


class RayPool:
    """See `Pool`. A copy that dies is started again by its actor; of an actor that dies, with its node or alone, the next
    `resize` makes another, wherever there is room. What there is no room for waits at Ray."""

    def __init__(self, copy: Copy, kind: str) -> None:
        """`copy`: called on the nodes, where this project has to be installed; goes there as a pickle. `kind`: of the names.

        Raises:
            ConfigError: the package isn't there. UnavailableError: this machine belongs to no cluster.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"expected {error.name} to run programs on its cluster; pip install 'roostream[ray]'"
            ) from None
        self._ray, self._copy, self._kind = ray, copy, kind
        self._connected = not ray.is_initialized()
        if self._connected:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to others
            try:
                ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError:
                raise UnavailableError(
                    "expected a Ray cluster that this machine belongs to, found none; `ray start` joins one, RAY_ADDRESS names it"
                ) from None
        self._seat = ray.remote(num_cpus=CPUS, max_concurrency=3, max_restarts=0)(Seat)
        self._seats: dict[int, _Seated] = {}
        self._ending: list[tuple[int, _Seated]] = []
        self._is_closed = False

    def resize(self, count: int) -> None:
        """Raises UnavailableError: the cluster doesn't answer now; those that run go on."""
        with self._asked():
            self._look()
            for number in [number for number in self._seats if number >= count]:
                self._release(number)
            for number in range(count):
                if number not in self._seats:
                    actor = self._seat.remote(self._copy, number)
                    self._seats[number] = _Seated(actor, actor.stay.remote())

    def members(self) -> list[str]:
        """Those at Ray that no node has room for, too."""
        with self._asked():
            self._look()
        return [
            f"{self._kind}-{number}"
            for number in sorted({*self._seats, *(number for number, _ in self._ending)})
        ]

    def pids(self) -> list[int]:
        """Of all copies, each on its own node."""
        with self._asked():
            found = self._ray.get([held.actor.pids.remote() for held in self._seats.values()], timeout=_END_S)
        return [pid for its in found for pid in its]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(UnavailableError), self._asked():
            for number in list(self._seats):
                self._release(number)
            if waits := [held.over for _, held in self._ending]:
                self._ray.wait(waits, num_returns=len(waits), timeout=_END_S)
            for _, held in self._ending:
                self._ray.kill(held.actor)
        self._seats, self._ending = {}, []
        if self._connected:
            self._ray.shutdown()

    def _release(self, number: int) -> None:
        held = self._seats.pop(number)
        held.actor.end.remote()
        self._ending.append((number, held))

    def _look(self) -> None:
        """Forget those that are over."""
        for number in [number for number, held in self._seats.items() if self._is_over(held)]:
            del self._seats[number]
            log.warning("%s-%d is gone with what ran it; another one is placed", self._kind, number)
        over = [(number, held) for number, held in self._ending if self._is_over(held)]
        for _, held in over:
            self._ray.kill(held.actor)
        self._ending = [each for each in self._ending if each not in over]

    def _is_over(self, held: _Seated) -> bool:
        return bool(self._ray.wait([held.over], timeout=0)[0])

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """What Ray says of itself, in our terms."""
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise UnavailableError(f"the Ray cluster doesn't do what it is asked: {error}") from None
