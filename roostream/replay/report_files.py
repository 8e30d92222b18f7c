"""Reports as files: JSON with stable keys (see "Reports" in docs/protocols.md), written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from roostream.errors import ConfigError


class ReportFiles(NamedTuple):
    """Where a report goes; None = nowhere."""

    data: Path | None
    page: Path | None

    def check(self) -> None:
        """Refuse a path before hours of work; a folder that is named for the report is made.

        Raises:
            ConfigError: its folder isn't there or can't be written.
        """
        if self.page is not None:
            try:
                self.page.parent.mkdir(exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{self.page.parent}: expected a folder for the report, got {error.strerror}; choose another"
                ) from None
        check_report(str(self.data or ""))


def report_files(path: str) -> ReportFiles:
    """`F.json` (any name with a suffix) is a file; an existing folder, a name without a suffix or one that ends in `/` is a
    folder, which gets report.json and a page with figures; "" is nothing."""
    if not path:
        return ReportFiles(None, None)
    target = Path(path)
    if target.is_dir() or path.endswith("/") or (not target.suffix and not target.exists()):
        return ReportFiles(target / "report.json", target / "report.html")
    return ReportFiles(target, None)


def write_report(path: str | Path, report: Mapping[str, object]) -> None:
    """Replace `path`; a reader never sees half a report.

    Raises:
        ConfigError: it can't be written; the file that was there stays.
    """
    write_atomically(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


def write_atomically(path: str | Path, text: str) -> None:
    """As `write_report`, of any text."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(
            f"{target}: the report can't be written ({error.strerror}); choose another --report"
        ) from None


def check_report(path: str) -> None:
    """Refuse a report path before hours of work: ConfigError unless it is a file's, in a folder that can be written."""
    if path and Path(path).is_dir():
        raise ConfigError(
            f"{path}: expected a file for the report, got a folder; name a file in it, such as report.json"
        )
    folder = Path(path).resolve().parent
    if path and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"{path}: expected a report file in an existing folder that can be written, got {folder}; create it"
        )
