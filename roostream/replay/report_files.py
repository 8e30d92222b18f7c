"""Write reports atomically: JSON with stable keys (docs/protocols.md, section Reports), and pages."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from roostream.errors import ConfigError


class ReportFiles(NamedTuple):
    """Paths of a report's JSON and HTML page; None = not written."""

    data: Path | None
    page: Path | None

    def check(self) -> None:
        """Check before long work that the files can be written; creates the folder of the page.

        Raises:
            ConfigError: a folder does not exist or cannot be written.
        """
        if self.page is not None:
            try:
                self.page.parent.mkdir(exist_ok=True)
            except OSError as error:
                text = f"{self.page.parent}: cannot create the report's folder ({error.strerror})"
                raise ConfigError(text) from None
        check_report(str(self.data or ""))


def report_files(path: str) -> ReportFiles:
    """The files for an option `--report`.

    A name with a suffix is a JSON file. An existing folder, a name without suffix or one that ends in `/` is
    a folder for report.json and report.html. "" writes nothing.
    """
    if not path:
        return ReportFiles(None, None)
    target = Path(path)
    if target.is_dir() or path.endswith("/") or (not target.suffix and not target.exists()):
        return ReportFiles(target / "report.json", target / "report.html")
    return ReportFiles(target, None)


def write_report(path: str | Path, report: Mapping[str, object]) -> None:
    """Replace `path` atomically by the report as JSON.

    Raises:
        ConfigError: the file cannot be written; an existing file is unchanged.
    """
    write_atomically(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


def write_atomically(path: str | Path, text: str) -> None:
    """Like `write_report`, for any text. What a link, a device or a pipe leads to is written in place."""
    target = Path(path)
    if _is_link_or_device(target):
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _not_writable(target, error) from None
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _not_writable(target, error) from None


def _is_link_or_device(target: Path) -> bool:
    """Such a file must not be replaced: another `/dev/null` breaks the machine."""
    return target.is_symlink() or (target.exists() and not target.is_file())


def _not_writable(target: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{target}: the report cannot be written ({error.strerror}); choose another file")


def check_report(path: str) -> None:
    """Check before long work that a report can be written. Raises ConfigError: not a file in a writable
    folder."""
    if path and Path(path).is_dir():
        text = f"{path}: expected a file for the report, got a folder; name a file in it such as report.json"
        raise ConfigError(text)
    if _is_link_or_device(Path(path)):
        return
    folder = Path(path).absolute().parent
    if path and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"{path}: expected a report file in an existing, writable folder, got {folder}; create the folder"
        )
