"""Progress bars on a terminal, and consoles for wide tables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")
UpdateProgress = Callable[[int, int | None], None]
"""Called with the number done and the total; None = unchanged total."""


@contextlib.contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[UpdateProgress]:
    """A progress bar on stderr, if that is a terminal. `total` None = unknown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Pass the items through with a progress bar."""
    with progress_bar(what, total) as update:
        for done, item in enumerate(items, 1):
            yield item
            update(done, None)


_WIDTH = 240  # of output that is not a terminal


def wide_console() -> Console:
    """A console without markup: as wide as the terminal or COLUMNS, else 240 characters, so that tables are
    not cut."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)
