"""The identity of a checkpoint store: a random number that is written once, at the store's first use.

An empty answer of a store means one of two things: nothing was ever committed, or the volume is not mounted
(or the path or prefix is wrong). Only the identity tells them apart. Every program opens its store with
`open_checkpoint_store`, and each shard remembers the identity with its rows, so that nothing is restored,
replaced or deleted on the word of another store (docs/decisions/0036).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import CheckpointStore, FileStore, open_store
from roostream.runtime.health import Health

log = logging.getLogger("roostream.store")
T = TypeVar("T")

IDENTITY_NAME = "identity"
"""Name of the object: `{"format": 1, "store": "<32 hex digits>"}`."""

_FORMAT = 1
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_USED_FOLDERS = ("manifests", "incarnations")
"""A store that has any of these objects was used before stores had identities."""


def find_identity(store: CheckpointStore) -> str | None:
    """The identity of `store`; None if it has none.

    Raises:
        UnavailableError: the store cannot be read, or its identity is damaged.
    """
    try:
        data = store.get(IDENTITY_NAME)
    except CheckpointError:
        return None
    try:
        found = str(json.loads(data)["store"])
    except (ValueError, KeyError, TypeError):
        found = ""
    if not _IDENTITY.fullmatch(found):
        raise UnavailableError(
            f"the object {IDENTITY_NAME!r} of the checkpoint store is damaged; delete it and run "
            "`roostream checkpoint init --identity ID` with the ID that the shards name when they refuse "
            "another store"
        )
    return found


def ensure_identity(
    store: CheckpointStore,
    location: str = "the checkpoint store",
    *,
    first_use: bool = False,
    wanted: str = "",
) -> str:
    """Return the identity of `store`. A store that was used before stores had identities gets one, and so
    does an empty one at its `first_use`. Of several callers the first one decides. `wanted`: the number to
    write; "" = a random one.

    Raises:
        UnavailableError: the store cannot be read or written, or it is empty and this is not its first use.
        ConfigError: the store has another identity than `wanted`, or `wanted` is not one.
    """
    if wanted and not _IDENTITY.fullmatch(wanted):
        raise ConfigError(f"expected an identity of 32 hexadecimal digits, got {wanted!r}")
    found = find_identity(store)
    if found is None:
        if not first_use and not any(store.list(folder) for folder in _USED_FOLDERS):
            raise UnavailableError(_no_identity(location))
        body = {"format": _FORMAT, "store": wanted or secrets.token_hex(16)}
        store.create(IDENTITY_NAME, json.dumps(body, sort_keys=True).encode())
        found = find_identity(store)
        if found is None:
            raise UnavailableError(_no_identity(location))
        log.info("%s is store %s from now on", location, found)
    if wanted and found != wanted:
        raise ConfigError(
            f"expected {location} to be store {wanted}, got store {found}; use another location"
        )
    return found


def check_same_store(store: CheckpointStore, expected: str) -> None:
    """Check that a member's store is the controller's, whose identity is `expected` ("" = not stated).

    Raises:
        UnavailableError: the member's store cannot be read, or is empty.
        ConfigError: it is another store.
    """
    if expected and (found := ensure_identity(store)) != expected:
        raise ConfigError(
            f"expected the checkpoint store {expected}, in which the controller commits, got store {found}; "
            "give all programs the same setting `store`"
        )


def init_store(url: str | Path, wanted: str = "") -> str:
    """Create the store at `url` if it does not exist; returns its identity. Idempotent. Raises as
    `ensure_identity`."""
    return create_store(open_store(url), str(url), wanted)


def create_store(store: CheckpointStore, location: str = "the checkpoint store", wanted: str = "") -> str:
    """`init_store` for an opened store."""
    if isinstance(store, FileStore):
        store.make_root()
    return ensure_identity(store, location, first_use=True, wanted=wanted)


def _no_identity(location: str) -> str:
    return (
        f"{location} has no object {IDENTITY_NAME!r}: its volume is not mounted, or the setting `store` "
        "names another place; make it available again, or create a new store with `roostream checkpoint init`"
    )


class IdentifiedStore:
    """A checkpoint store that answers only as long as it is the same one.

    Its identity is read before every change, after every write and list, and when an object is absent. A
    store without identity, or with another one than before, counts as unavailable: the caller retries, and
    continues when the store is back. Nothing is created in the place of a volume that is not mounted.
    """

    def __init__(self, store: CheckpointStore, location: str) -> None:
        """`location`: where the store is, for messages."""
        self.store, self.location = store, location
        self.identity = ""  # the first that was read

    def verify(self) -> str:
        """Return the store's identity.

        Raises:
            UnavailableError: the store cannot be read, is empty, or is another one than before.
        """
        if not self.identity:
            self.identity = ensure_identity(self.store, self.location)
            return self.identity
        found = find_identity(self.store)
        if found is None:
            raise UnavailableError(_no_identity(self.location))
        if found != self.identity:
            raise UnavailableError(
                f"{self.location} was store {self.identity} and is store {found} now; bring the first one "
                "back, or restart all programs with the right setting `store`"
            )
        return found

    def create(self, name: str, data: bytes) -> bool:
        self.verify()
        is_created = self.store.create(name, data)
        self.verify()  # the volume may have gone meanwhile: then this was written somewhere else
        return is_created

    def put(self, name: str, data: bytes) -> None:
        self.verify()
        self.store.put(name, data)
        self.verify()

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        self.verify()
        self.store.put_stream(name, chunks, size)
        self.verify()

    def get(self, name: str) -> bytes:
        try:
            return self.store.get(name)
        except CheckpointError:
            self.verify()
            raise

    def get_range(self, name: str, start: int, size: int) -> bytes:
        try:
            return self.store.get_range(name, start, size)
        except CheckpointError:
            self.verify()
            raise

    def list(self, prefix: str) -> list[str]:
        names = self.store.list(prefix)
        self.verify()
        return names

    def delete(self, name: str) -> None:
        self.verify()
        self.store.delete(name)

    def sweep(self) -> None:
        self.verify()
        self.store.sweep()


def open_checkpoint_store(url: str | Path) -> IdentifiedStore:
    """Open the checkpoint store of a deployment. Reads and writes nothing yet. Raises as `open_store`."""
    return IdentifiedStore(open_store(url), str(url))


def wait_for_store(
    call: Callable[[], T],
    stop: threading.Event | None = None,
    *,
    health: Health | None = None,
    timeout_s: float | None = None,
) -> T:
    """Repeat `call`, which must be idempotent, until the checkpoint store is available; return its result.
    `health` reports the wait.

    Raises:
        UnavailableError: `timeout_s` passed, or `stop` was set. Other errors of `call` pass through.
    """
    what = "the checkpoint store"
    with health.waiting(what) if health else contextlib.nullcontext():
        return Backoff(what=what, timeout_s=timeout_s).until(call, (UnavailableError,), stop)
