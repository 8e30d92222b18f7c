"""Log files of child processes: rotation, the last lines, and the last error.

A child appends to its file directly, so no pipe must be read, and a slow supervisor blocks no child. Rotation
copies the file and truncates it in place: lines that are written between the two steps are lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path


def rotate(path: Path, max_bytes: int) -> bool:
    """Move the content of `path` to `path.1` if the file is larger than `max_bytes`; returns whether it was.

    **If the copy fails** (disk full), the file is truncated without a copy, which frees disk space. A file
    that cannot be read or truncated stays as it is.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except OSError:
        return False
    older = path.with_name(f"{path.name}.1")
    try:
        shutil.copyfile(path, older)
    except OSError:
        with contextlib.suppress(OSError):
            older.unlink(missing_ok=True)
    try:
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def last_lines(path: Path, count: int = 15, since: int = 0, max_bytes: int = 16_384) -> list[str]:
    """The newest `count` lines behind byte `since`, which is ignored if the file was rotated in between."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(size - max_bytes, since if since <= size else 0, 0))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


# An error line as programs log it (roostream/runtime/program.py), or as commands print it.
_ERROR_LINE = re.compile(r"\d\d:\d\d:\d\d [EC] \S+ (.*)|error: (.*)")
_PROGRAM_NAME = re.compile(r"^[a-z-]+(?: \d+)?: ")
_DEFECT = "this is a defect of Roostream"  # the line after it says what happened


def last_error(lines: Sequence[str]) -> str:
    """The last error in a program's last lines, without time, logger and program name; else the last line; ""
    = no lines.

    Understands text lines and lines of `log_format = "json"`.
    """
    errors = [text for line in lines if (text := _error_text(line)) and _DEFECT not in text]
    return errors[-1] if errors else next((line.strip() for line in reversed(lines) if line.strip()), "")


def _error_text(line: str) -> str:
    if line.startswith("{"):
        with contextlib.suppress(ValueError, AttributeError):
            entry = json.loads(line)
            if entry.get("level") not in ("ERROR", "CRITICAL"):
                return ""
            text = str(entry.get("error") or entry.get("message", "")).strip()
            return _PROGRAM_NAME.sub("", text.rpartition("\n")[2])  # the last line of a traceback
    match = _ERROR_LINE.match(line)
    return _PROGRAM_NAME.sub("", match[1] or match[2] or "") if match else ""
