"""Set-up shared by several subjects of one process: opened for the first subject, closed after the last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def opened_with(make: Callable[..., T]) -> Callable[..., contextlib.AbstractContextManager[T]]:
    """A context manager of `make(opened, *arguments)`, at whose end the exit stack `opened` is closed."""

    @contextlib.contextmanager
    def open_(*arguments: Any) -> Iterator[T]:
        with contextlib.ExitStack() as opened:
            yield make(opened, *arguments)

    return open_


class SharedSetup(Generic[T]):
    """`make` returns a context manager. Subjects that are open at the same time pass equal arguments."""

    def __init__(self, make: Callable[..., contextlib.AbstractContextManager[T]]) -> None:
        self._make, self._users, self._opened = make, 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def open(self, *arguments: Any) -> Iterator[T]:
        if not self._users:
            self._value = self._opened.enter_context(self._make(*arguments))
        self._users += 1
        try:
            yield self._value
        finally:
            self._users -= 1
            if not self._users:
                del self._value
                self._opened.close()
