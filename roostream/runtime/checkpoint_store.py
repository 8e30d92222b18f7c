"""Where committed things live: manifests, incarnations, dense parts, schemas.

A store is a flat space of names such as `manifests/00000012` or `dense/12-3.safetensors`. `create` is the commit of
everything: it either makes the whole object visible under its name, or, if the name exists, changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from roostream.errors import CheckpointError, ConfigError, UnavailableError, nearest
from roostream.runtime.object_store import ObjectStore
from roostream.runtime.store_names import checked, whole_range


class CheckpointStore(Protocol):
    """Each method raises UnavailableError where the store can't be read or written now: full, gone, refused."""

    def create(self, name: str, data: bytes) -> bool:
        """Durable, atomic, exclusive. True if this call created it; False if the name existed.

        **If it fails** (UnavailableError): the name does not exist, or exists whole; call again to learn which.
        """

    def put(self, name: str, data: bytes) -> None:
        """Durable and atomic; replaces. For parts that a manifest names with their checksum.

        **If it fails** (UnavailableError): the name is as it was, or has the new bytes.
        """

    def get(self, name: str) -> bytes:
        """Raises CheckpointError if absent. Does not verify: checksums are the manifest's."""

    def get_range(self, name: str, start: int, size: int) -> bytes:
        """`size` bytes from `start` on. Raises CheckpointError: absent, or it ends before. Threads may call it together."""

    def list(self, prefix: str) -> list[str]:
        """Names below `prefix/`, sorted; unfinished objects are never among them."""

    def delete(self, name: str) -> None:
        """Idempotent."""

    def sweep(self) -> None:
        """Delete what writers that were killed left unfinished. A write that is under way may fail by it, as by a full disk."""


class FileStore:
    """A directory. Files are written beside their place, fsynced, linked (link(2) is exclusive) or renamed, and then their
    directory is fsynced, as is the one above each directory that had to be made. `fsync` is os.fsync."""

    def __init__(self, root: str | Path, *, fsync: Callable[[int], None] = os.fsync) -> None:
        self.root, self._fsync = Path(root), fsync

    def path(self, name: str) -> Path:
        return self.root / checked(name)

    def create(self, name: str, data: bytes) -> bool:
        target = self.path(name)
        with _unavailable(f"{target} can't be written"):
            temporary = self._write(target, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            self._sync_directory(target.parent)
        return True

    def put(self, name: str, data: bytes) -> None:
        target = self.path(name)
        with _unavailable(f"{target} can't be written"):
            os.replace(self._write(target, data), target)
            self._sync_directory(target.parent)

    def get(self, name: str) -> bytes:
        path = self.path(name)
        with _unavailable(f"{path} can't be read"):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                raise CheckpointError(f"{name} is absent from {self.root}") from None

    def get_range(self, name: str, start: int, size: int) -> bytes:
        path = self.path(name)
        with _unavailable(f"{path} can't be read"):
            try:
                with path.open("rb", buffering=0) as file:
                    found = os.pread(file.fileno(), size, start)
            except FileNotFoundError:
                raise CheckpointError(f"{name} is absent from {self.root}") from None
        return whole_range(name, start, size, found)

    def list(self, prefix: str) -> list[str]:
        base = self.path(prefix)
        with _unavailable(f"{base} can't be read"):
            if not base.is_dir():
                return []
            return sorted(
                f"{prefix}/{p.name}" for p in base.iterdir() if p.is_file() and not p.name.startswith(".")
            )

    def delete(self, name: str) -> None:
        path = self.path(name)
        with _unavailable(f"{path} can't be deleted"):
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        with _unavailable(f"{self.root} can't be swept"):
            for path in list(self.root.rglob(".*")):  # no name begins with a dot
                if path.is_file():
                    path.unlink(missing_ok=True)

    def _write(self, target: Path, data: bytes) -> Path:
        self._make_directory(target.parent)
        handle, name = tempfile.mkstemp(prefix=".", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                self._fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _make_directory(self, path: Path) -> None:
        """A directory outlives power loss when its own entry is synced, in the directory above."""
        if path.is_dir():
            return
        self._make_directory(path.parent)
        path.mkdir(exist_ok=True)
        self._sync_directory(path.parent)

    def _sync_directory(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            self._fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"{what} ({error.strerror or error}); free space there or bring it back"
        ) from None


def _file_store(place: str) -> FileStore:
    if not place.startswith("/"):
        raise ConfigError(
            f"expected a store like file:///a/directory, got {'file://' + place!r}; add the third slash"
        )
    return FileStore(place)


STORES: Mapping[str, Callable[[str], CheckpointStore]] = {"file": _file_store, "s3": ObjectStore}
"""Scheme of a URL → what opens the rest of it; a new kind of store is one class and one entry."""


def open_store(url: str | Path) -> CheckpointStore:
    """`/a/directory`, `a/directory`, `file:///a/directory` or `s3://bucket/prefix`. Reads and writes nothing yet.

    Raises:
        ConfigError: a scheme that is not known; names those that are. Or what comes behind it is no place of that kind.
        SetupError: the kind needs a package that isn't installed.
    """
    scheme, is_url, place = str(url).partition("://")
    if not is_url:
        return FileStore(url)
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise ConfigError(
            f"expected a store that is a path or begins with {known}, got {str(url)!r}{nearest(scheme, STORES)}"
        )
    return STORES[scheme](place)
