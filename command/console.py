"""Where the demo and `status` print: a live table on a terminal, plain lines without one."""

from __future__ import annotations

import logging

from rich.console import Console


class ConsoleHandler(logging.Handler):
    """Log lines of the stack through rich, so that they appear above a live table. Passwords never reach a log."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = {"WARNING": "yellow", "ERROR": "red"}.get(record.levelname, "")
        self.console.print(record.getMessage(), style=style, markup=False, highlight=False, soft_wrap=True)
