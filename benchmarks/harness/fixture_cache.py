"""On-disk cache of set-up data shared by the runs of one benchmark.

`roostream bench` gives each environment a folder for the time of a benchmark. Only set-up data goes there,
nothing that is timed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = "BENCH_FIXTURES"
"""Environment variable with the folder; without it nothing is cached."""


def cached_bytes(name: str, make: Callable[[], bytes]) -> bytes:
    """The result of `make`, from this run or an earlier one. `name` is a file name, unique within the
    benchmark."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return make()
    path = Path(folder) / name
    if path.exists():
        return path.read_bytes()
    content = make()
    temporary = path.with_suffix(".making")
    temporary.write_bytes(content)
    temporary.rename(path)
    return content


@contextlib.contextmanager
def cached_folder(name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """The same for a folder that `make` fills. The folder is read-only by convention."""
    folder = os.environ.get(FOLDER)
    if not folder:
        with tempfile.TemporaryDirectory() as temporary_folder:
            make(Path(temporary_folder))
            yield Path(temporary_folder)
        return
    path = Path(folder) / name
    if not path.exists():
        temporary = path.with_suffix(".making")
        temporary.mkdir()
        make(temporary)
        temporary.rename(path)
    yield path
