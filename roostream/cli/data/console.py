"""A bar of what takes long, on a terminal; elsewhere nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")
Tell = Callable[[int, int | None], None]
"""(done, of so many; None = as was said before)"""


@contextlib.contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Tell]:
    """`total` None: not known yet."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, each told when the next one is asked for."""
    with progress_bar(what, total) as tell:
        for done, item in enumerate(items, 1):
            yield item
            tell(done, None)


_MOST = 240  # columns of text, where nobody looks yet


def wide_console() -> Console:
    """Text as it is, without markup. COLUMNS, where it is set, says how wide."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _MOST
    return Console(markup=False, emoji=False, highlight=False, width=width)
