"""What commands print: JSON, tables, progress bars, and numbers and times as text."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from roostream.errors import printable

if TYPE_CHECKING:  # rich is imported when something is printed
    from rich.console import Console
    from rich.table import Table

NONE = "–"
Row = tuple[str, str]
T = TypeVar("T")
UpdateProgress = Callable[[int, int | None], None]
"""Called with the number done and the total; None = unchanged total."""
_CALENDAR_END_MS = 253_402_300_800_000  # the year 10000
_WIDTH = 240  # of output that is not a terminal


def print_json(report: object) -> None:
    """Print a report as indented JSON. Infinity and NaN, which JSON does not have, become null."""
    click.echo(json.dumps(_finite(report), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_report(as_json: bool, report: object, rows: Iterable[Row], title: str) -> None:
    """Print the report as JSON, or its rows as a table."""
    if as_json:
        print_json(report)
    else:
        print_rows(rows, title)


def print_rows(rows: Iterable[Row], title: str) -> None:
    """Print rows of name and text below a title."""
    from rich.console import Console

    Console().print(render_rows(rows, title))


def render_rows(lines: Iterable[Row], title: str, footer: Sequence[str] = ()) -> Table:
    """A table of two columns without header. Text is never interpreted as markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(title)),
        title_justify="left",
        show_header=False,
        caption=Text("\n".join(map(printable, footer))) if footer else None,
        caption_justify="left",
    )
    table.add_column(style="bold", overflow="fold")  # wrapped only on a very narrow terminal
    table.add_column(overflow="fold")  # a path in it ends with the line number that matters
    for name, text in lines:
        table.add_row(Text(printable(name)), Text(plain(text)))
    return table


def print_columns(
    title: str, columns: Sequence[str], groups: Iterable[Iterable[Sequence[str]]], left: Collection[str]
) -> None:
    """Print a wide table with groups of lines. Columns in `left` hold text, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        named = column in left
        table.add_column(column, justify="left" if named else "right", no_wrap=not named, overflow="fold")
    for group in groups:
        for cells in group:
            table.add_row(*cells)
        table.add_section()
    wide_console().print(table)


def print_sentences(sentences: Iterable[str]) -> None:
    """Print each sentence as an item of a list."""
    for sentence in sentences:
        wide_console().print(f"• {sentence}", soft_wrap=True)


def wide_console() -> Console:
    """A console without markup, as wide as the terminal or COLUMNS, else 240 characters."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)


@contextlib.contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[UpdateProgress]:
    """A progress bar on stderr, if that is a terminal. `total` None = unknown: the bar moves, and the time
    counts.

    Everything that may take longer than two seconds has one. It is removed at the end.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left)
    console = Console(stderr=True, markup=False, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Pass the items through with a progress bar."""
    with progress_bar(what, total) as update:
        for done, item in enumerate(items, 1):
            yield item
            update(done, None)


def plain(text: str) -> str:
    """Remove control characters, except line ends."""
    return "\n".join(map(printable, text.split("\n")))


def number(value: float | None, digits: int = 0) -> str:
    """The number as text, with separators of thousands."""
    return NONE if value is None else f"{value:,.{digits}f}"


def duration(ms: float | None) -> str:
    """A duration as text, in ms, s or min."""
    if ms is None:
        return NONE
    if ms < 1000:
        return f"{ms:.0f} ms"
    return f"{ms / 1000:.1f} s" if ms < 120_000 else f"{ms / 60_000:.1f} min"


def clock(ms: float | None) -> str:
    """A time as text in UTC. A time beyond the calendar, such as one in microseconds, is a number."""
    if not ms or ms < 0:
        return NONE
    if ms >= _CALENDAR_END_MS:
        return f"{ms:,.0f} ms since 1970"
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
