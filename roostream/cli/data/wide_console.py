"""Where tables of many columns are printed: in a terminal as wide as it is, into a file or a pipe as wide as they need be."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_MOST = 240  # columns of text, where nobody looks yet


def wide_console() -> Console:
    """Text as it is, without markup. COLUMNS, where it is set, says how wide."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _MOST
    return Console(markup=False, emoji=False, highlight=False, width=width)
