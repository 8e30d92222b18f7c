"""Simulates a full disk with the kernel's limit of file sizes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """Limit every file that this process writes to `num_bytes`: longer writes fail midway, as on a full
    disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
