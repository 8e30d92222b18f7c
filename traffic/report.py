"""Reports as files: JSON with stable keys (see "Reports" in docs/protocols.md), written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from roo.errors import ConfigError


def write_report(path: str | Path, report: Mapping[str, object]) -> None:
    """Replace `path`; a reader never sees half a report.

    Raises:
        ConfigError: it can't be written; the file that was there stays.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{target}: the report can't be written ({error.strerror}); choose another --report") from None


def check_report(path: str) -> None:
    """Refuse a report path before hours of work: ConfigError unless its folder is there and can be written."""
    folder = Path(path).resolve().parent
    if path and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"{path}: expected a report file in an existing folder that can be written, got {folder}; create it")
