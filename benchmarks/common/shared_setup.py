"""Set-up shared by several subjects of one process: opened for the first subject, closed after the last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedSetup(Generic[T]):
    """`make` returns a context manager of the set-up. Subjects that are open at the same time pass equal
    arguments."""

    def __init__(self, make: Callable[..., contextlib.AbstractContextManager[T]]) -> None:
        self._make = make
        self._made: list[T] = []
        self._users, self._stack = 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def open(self, *arguments: Any, **named: Any) -> Iterator[T]:
        if not self._made:
            self._made.append(self._stack.enter_context(self._make(*arguments, **named)))
        self._users += 1
        try:
            yield self._made[0]
        finally:
            self._users -= 1
            if not self._users:
                self._made.clear()
                self._stack.close()
