"""Notices changes of files, such as renewed certificates and keys."""

from __future__ import annotations

import contextlib
from pathlib import Path


class FileWatcher:
    """Compares size, modification time and inode of files. It therefore also notices a file that was moved
    into place, and a symbolic link that was changed (as Kubernetes does for a mounted secret)."""

    def __init__(self, *files: Path) -> None:
        self.files = files
        self._stamp = self._stamps()

    def changed(self) -> bool:
        """Whether a file changed, appeared or disappeared since the last call."""
        before, self._stamp = self._stamp, self._stamps()
        return self._stamp != before

    def _stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(file) for file in self.files)


def _stamp(file: Path) -> tuple[int, ...] | None:
    with contextlib.suppress(OSError):
        stat = file.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
    return None
