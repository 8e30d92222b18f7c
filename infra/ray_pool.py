"""A pool of copies of one program on the nodes of a Ray cluster (package extra `ray`).

Each copy has an actor, which runs and watches it as `ProcessPool` does on this machine. Ray places the actors
and reports lost nodes; no data of the project goes through Ray.
"""

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
from infra.process_pool import ProcessPool
from roostream.errors import UnavailableError, needs_extra

log = logging.getLogger("roostream.pool")

CPUS_PER_COPY = 1.0
_END_S = 25.0  # longer than the stop time limit of a copy

BuildCopy = Callable[[int, Path], Program]
"""Maps a number and the copy's own folder to its program."""


class CopyActor:
    """The Ray actor: runs one copy as a child of the actor's process, which ends with it."""

    def __init__(self, build_copy: BuildCopy, number: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="roostream-", ignore_cleanup_errors=True)
        self._pool = ProcessPool(lambda _: build_copy(number, Path(self._folder.name)))
        self._pool.resize(1)
        self._ended = threading.Event()

    def wait_for_end(self) -> None:
        """Block until `end`. A caller that waits for this call notices the actor's death."""
        self._ended.wait()

    def pids(self) -> list[int]:
        """Process id of the copy on its node; empty while it is restarted."""
        return self._pool.pids()

    def end(self) -> None:
        """Stop the copy within its time limit; `wait_for_end` returns then."""
        self._pool.close()
        self._folder.cleanup()
        self._ended.set()


@dataclasses.dataclass(frozen=True)
class _PlacedCopy:
    """An actor, and Ray's reference of its `wait_for_end` call."""

    actor: Any
    ended: Any


class RayPool:
    """See `ProgramPool`. An actor restarts a copy that dies. The next `resize` replaces an actor that died,
    alone or with its node, wherever the cluster has room. Copies for which there is no room wait in Ray's
    queue."""

    def __init__(self, build_copy: BuildCopy, name: str) -> None:
        """`build_copy` is pickled and called on the nodes, where this project must be installed. `name`
        prefixes copy names.

        Raises:
            ConfigError: Ray is not installed.
            UnavailableError: this machine belongs to no cluster.
        """
        with needs_extra("a pool of programs on a cluster", "ray"):
            import ray
        self._ray, self._build_copy, self._name = ray, build_copy, name
        self._connected = not ray.is_initialized()
        if self._connected:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
            try:
                ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError:
                raise UnavailableError(
                    "expected a Ray cluster that this machine belongs to, found none; "
                    "`ray start` joins one, RAY_ADDRESS names it"
                ) from None
        self._actor_class = ray.remote(num_cpus=CPUS_PER_COPY, max_concurrency=3, max_restarts=0)(CopyActor)
        self._copies: dict[int, _PlacedCopy] = {}
        self._ending: list[tuple[int, _PlacedCopy]] = []
        self._is_closed = False

    def resize(self, count: int) -> None:
        """Start or end copies, so that this many run. Raises UnavailableError if the cluster does not answer;
        the running copies go on."""
        with self._ray_errors():
            self._drop_ended()
            for number in [number for number in self._copies if number >= count]:
                self._end(number)
            for number in range(count):
                if number not in self._copies:
                    actor = self._actor_class.remote(self._build_copy, number)
                    self._copies[number] = _PlacedCopy(actor, actor.wait_for_end.remote())

    def members(self) -> list[str]:
        """Includes copies that Ray has not placed yet."""
        with self._ray_errors():
            self._drop_ended()
        numbers = {*self._copies, *(number for number, _ in self._ending)}
        return [f"{self._name}-{number}" for number in sorted(numbers)]

    def pids(self) -> list[int]:
        """Process ids of all copies, each on its own node."""
        with self._ray_errors():
            pids = self._ray.get([copy.actor.pids.remote() for copy in self._copies.values()], timeout=_END_S)
        return [pid for pids_of_copy in pids for pid in pids_of_copy]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(UnavailableError), self._ray_errors():
            for number in list(self._copies):
                self._end(number)
            if pending := [copy.ended for _, copy in self._ending]:
                self._ray.wait(pending, num_returns=len(pending), timeout=_END_S)
            for _, copy in self._ending:
                self._ray.kill(copy.actor)
        self._copies, self._ending = {}, []
        if self._connected:
            self._ray.shutdown()

    def _end(self, number: int) -> None:
        copy = self._copies.pop(number)
        copy.actor.end.remote()
        self._ending.append((number, copy))

    def _drop_ended(self) -> None:
        for number in [number for number, copy in self._copies.items() if self._has_ended(copy)]:
            del self._copies[number]
            log.warning("%s-%d was lost with its node or its actor; it is placed again", self._name, number)
        ended = [(number, copy) for number, copy in self._ending if self._has_ended(copy)]
        for _, copy in ended:
            self._ray.kill(copy.actor)
        self._ending = [each for each in self._ending if each not in ended]

    def _has_ended(self, copy: _PlacedCopy) -> bool:
        return bool(self._ray.wait([copy.ended], timeout=0)[0])

    @contextlib.contextmanager
    def _ray_errors(self) -> Iterator[None]:
        """Turn Ray's errors into UnavailableError."""
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise UnavailableError(f"the Ray cluster does not answer: {error}") from None
