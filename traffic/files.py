"""The files of a log: the only place that knows where they are. Another file system is another branch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from roo.config import refusal
from roo.errors import ConfigError


def open_file(path: str) -> BinaryIO:
    """A log's file, to read and to seek; the caller closes it.

    Raises:
        ConfigError: it isn't there or can't be read.
    """
    try:
        return Path(path).open("rb")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise ConfigError(f"{path}: expected a file that can be read, got {error.strerror}") from None


def check_files(key: str, paths: Sequence[str], *, needed: bool) -> None:
    """Told when settings are made, before hours of work.

    Raises:
        Refusal: `needed`, and there is none.
        ConfigError: one isn't there or can't be read.
    """
    if needed and not paths:
        raise refusal(key, "at least one file", paths, "name one")
    for path in paths:
        open_file(path).close()
