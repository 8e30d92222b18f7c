"""Files that are changed while a program reads them: certificates and keys that are renewed."""

from __future__ import annotations

import contextlib
from pathlib import Path


class FileWatcher:
    """Whether files were changed since one last looked: by their size, time and inode, so that a file that is moved into place
    counts, and so does a link that is made to lead elsewhere (as Kubernetes renews a mounted secret)."""

    def __init__(self, *files: Path) -> None:
        self.files = files
        self._stamp = self._look()

    def changed(self) -> bool:
        """Also when one is gone, or back."""
        before, self._stamp = self._stamp, self._look()
        return self._stamp != before

    def _look(self) -> tuple[object, ...]:
        return tuple(_stamp(file) for file in self.files)


def _stamp(file: Path) -> tuple[int, ...] | None:
    with contextlib.suppress(OSError):
        about = file.stat()
        return about.st_mtime_ns, about.st_size, about.st_ino
    return None
