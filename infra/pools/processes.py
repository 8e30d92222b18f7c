"""So many copies of one program, whoever runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from infra.child import Program
from infra.supervisor import Supervisor


class Pool(Protocol):
    """Copies are numbered from 0; one that dies is started again. Not thread-safe."""

    def resize(self, count: int) -> None:
        """Have the first `count` run; others are told to end and not waited for."""

    def members(self) -> list[str]:
        """Names of those that run, or are being started or ended."""

    def close(self) -> None:
        """End all, by force those that don't. Idempotent."""


class ProcessPool:
    """See `Pool`: child processes of this one."""

    def __init__(self, copy: Callable[[int], Program]) -> None:
        """`copy`: number → the program, each with a name of its own."""
        self._copy = copy
        self._supervisor = Supervisor(lambda: None).open()
        self._names: list[str] = []
        self._is_closed = False

    def resize(self, count: int) -> None:
        copies = [self._copy(number) for number in range(count)]
        over, self._names = self._names[count:], [copy.name for copy in copies]
        self._supervisor.release(over)
        self._supervisor.want(copies)

    def members(self) -> list[str]:
        return list(self._supervisor.slots)

    def pids(self) -> list[int]:
        """Of those that run now."""
        children = [slot.child for slot in list(self._supervisor.slots.values())]
        return [child.pid for child in children if child is not None]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed, self._names = True, []
            self._supervisor.stop(self.members())
            self._supervisor.close()
