"""Log files of children: bounded in size, and their last lines for when one dies.

A child writes straight to its file, opened for appending, so nobody has to read a pipe and nothing stops when the supervisor is
slow. Rotation copies the file aside and truncates it in place: lines written between the two are lost, which a log can bear.
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
    """Move `path` to `path.1` if it is larger than `max_bytes`; whether it did.

    **If it fails** (OSError: disk full): the file is truncated without a copy, which is what a full disk needs.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    older = path.with_name(f"{path.name}.1")
    try:
        shutil.copyfile(path, older)
    except OSError:
        with contextlib.suppress(OSError):
            older.unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


def last_lines(path: Path, count: int = 15, since: int = 0, max_bytes: int = 16_384) -> list[str]:
    """The newest `count` lines after byte `since` (the file's size at some moment; ignored if it was rotated since then)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(size - max_bytes, since if since <= size else 0, 0))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


_LOGGED = re.compile(
    r"\d\d:\d\d:\d\d [EC] \S+ (.*)|error: (.*)"
)  # as programs log (roostream/runtime/program.py), and as commands say it
_NAMED = re.compile(
    r"^[a-z-]+(?: \d+)?: "
)  # by itself, as `roostream.runtime.program.run` begins its last line
_DEFECT = "this is a defect of Roostream"  # what it was stands behind it


def last_words(lines: Sequence[str]) -> str:
    """Why a program ended, of its last lines: the last that tells an error, without time, logger and its own name; else the last
    one. Lines of `log_format = "json"` too. "" = it said nothing."""
    told = [words for line in lines if (words := _error(line)) and _DEFECT not in words]
    return told[-1] if told else next((line.strip() for line in reversed(lines) if line.strip()), "")


def _error(line: str) -> str:
    if line.startswith("{"):
        with contextlib.suppress(ValueError, AttributeError):
            entry = json.loads(line)
            said = str(
                entry.get("error") or entry.get("message", "")
            ).strip()  # a traceback ends with what went wrong
            return (
                _NAMED.sub("", said.rpartition("\n")[2])
                if entry.get("level") in ("ERROR", "CRITICAL")
                else ""
            )
    match = _LOGGED.match(line)
    return _NAMED.sub("", match[1] or match[2] or "") if match else ""
