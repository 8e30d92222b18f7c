"""Where committed things live: manifests, incarnations, dense parts, schemas.

A store is a flat space of names such as `manifests/00000012` or `dense/12-3.safetensors`. `create` is the commit of
everything: it either makes the whole object visible under its name, or, if the name exists, changes nothing.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from roo.errors import CheckpointError, ConfigError, nearest

NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}(/[a-z0-9][a-z0-9._-]{0,63})*$")


class CheckpointStore(Protocol):
    def create(self, name: str, data: bytes) -> bool:
        """Durable, atomic, exclusive. True if this call created it; False if the name existed.

        **If it fails** (OSError: disk full, I/O): the name does not exist, or exists whole; call again to learn which.
        """

    def put(self, name: str, data: bytes) -> None:
        """Durable and atomic; replaces. For parts that a manifest names with their checksum. OSError as in `create`."""

    def get(self, name: str) -> bytes:
        """Raises CheckpointError if absent. Does not verify: checksums are the manifest's."""

    def list(self, prefix: str) -> list[str]:
        """Names below `prefix/`, sorted; unfinished objects are never among them."""

    def delete(self, name: str) -> None:
        """Idempotent."""


class FileStore:
    """A directory. Files are written beside their place, fsynced, linked (link(2) is exclusive) or renamed, and then their
    directory is fsynced."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise CheckpointError(f"expected a name like 'manifests/00000012', got {name!r}")
        return self.root / name

    def create(self, name: str, data: bytes) -> bool:
        target = self.path(name)
        temporary = self._write(target, data)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        _sync_directory(target.parent)
        return True

    def put(self, name: str, data: bytes) -> None:
        target = self.path(name)
        os.replace(self._write(target, data), target)
        _sync_directory(target.parent)

    def get(self, name: str) -> bytes:
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{name} is absent from {self.root}") from None

    def list(self, prefix: str) -> list[str]:
        base = self.path(prefix)
        if not base.is_dir():
            return []
        return sorted(f"{prefix}/{p.name}" for p in base.iterdir() if p.is_file() and not p.name.startswith("."))

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def _write(self, target: Path, data: bytes) -> str:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(temporary)
            raise
        return temporary


STORES: Mapping[str, Callable[[str], CheckpointStore]] = {"file": FileStore}
"""Scheme of a URL → what opens the rest of it; a new kind of store is one class and one entry."""


def open_store(url: str | Path) -> CheckpointStore:
    """`/a/directory`, `a/directory` or `file:///a/directory`. Reads and writes nothing yet.

    Raises:
        ConfigError: a scheme that is not known; names those that are.
    """
    scheme, is_url, place = str(url).partition("://")
    if not is_url:
        return FileStore(url)
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise ConfigError(f"expected a store that is a path or begins with {known}, got {str(url)!r}{nearest(scheme, STORES)}")
    if not place.startswith("/"):
        raise ConfigError(f"expected a store like {scheme}:///a/directory, got {str(url)!r}; add the third slash")
    return STORES[scheme](place)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
