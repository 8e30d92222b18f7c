"""What every run of a question would make anew and alike: made by the first, kept on disk for the others, gone with the last.

`roostream bench` gives each environment a folder of its own for as long as a question is asked. Only what is set up goes there,
never what is timed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = "BENCH_MADE"
"""The variable that names it; without it everything is made where it is needed."""


def made_once(name: str, make: Callable[[], bytes]) -> bytes:
    """What `make` gives, or gave in a run before. `name`: unique within the question, fit for a file."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return make()
    path = Path(folder) / name
    if path.exists():
        return path.read_bytes()
    found = make()
    whole = path.with_suffix(".making")
    whole.write_bytes(found)
    whole.rename(path)
    return found


@contextlib.contextmanager
def made_folder(name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """As `made_once`, of a folder that `make` fills. Nobody changes it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        with tempfile.TemporaryDirectory() as alone:
            make(Path(alone))
            yield Path(alone)
        return
    path = Path(folder) / name
    if not path.exists():
        whole = path.with_suffix(".making")
        whole.mkdir()
        make(whole)
        whole.rename(path)
    yield path
