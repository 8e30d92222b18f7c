"""A pool of numbered copies of one program. `ProcessPool` runs them on this machine, `infra.ray_pool.RayPool`
on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from infra.child import Program
from infra.supervisor import Supervisor


class ProgramPool(Protocol):
    """Copies are numbered from 0. A copy that dies is started again. Not thread-safe."""

    def resize(self, count: int) -> None:
        """Run the first `count` copies. The others are asked to stop; the call does not wait for them."""

    def members(self) -> list[str]:
        """Names of the copies that run, start or stop."""

    def close(self) -> None:
        """Stop all copies; kill those that miss their time limit. Idempotent."""


class ProcessPool:
    """See `ProgramPool`: child processes of this one."""

    def __init__(self, build_copy: Callable[[int], Program]) -> None:
        """`build_copy` maps a number to a program with a name of its own."""
        self._build_copy = build_copy
        self._supervisor = Supervisor().open()
        self._names: list[str] = []
        self._is_closed = False

    def resize(self, count: int) -> None:
        copies = [self._build_copy(number) for number in range(count)]
        surplus, self._names = self._names[count:], [copy.name for copy in copies]
        self._supervisor.remove(surplus)
        self._supervisor.start(copies)

    def members(self) -> list[str]:
        return list(self._supervisor.slots)

    def pids(self) -> list[int]:
        """Process ids of the copies that run now."""
        return [slot.pid for slot in list(self._supervisor.slots.values()) if slot.pid is not None]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed, self._names = True, []
            self._supervisor.stop(self.members())
            self._supervisor.close()
