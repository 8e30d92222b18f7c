"""What the names of committed things look like in every kind of store, and what a part of one is held against."""

from __future__ import annotations

import re

from roostream.errors import CheckpointError

NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}(/[a-z0-9][a-z0-9._-]{0,63})*$")


def checked(name: str) -> str:
    """`name`. Raises CheckpointError: it could lead out of the store, or mean another thing elsewhere."""
    if not NAME.fullmatch(name):
        raise CheckpointError(f"expected a name like 'manifests/00000012', got {name!r}")
    return name


def whole_range(name: str, start: int, size: int, found: bytes) -> bytes:
    """`found`. Raises CheckpointError: it is not all that was asked for."""
    if len(found) != size:
        raise CheckpointError(f"{name} is cut off: expected {size} bytes from {start} on, got {len(found)}")
    return found
