"""Versions of a table that somebody reads: their files stay, also where newer ones replaced them.

A pin is an object of the warehouse, `pins/<table>.<who>`, that its reader renews and that ends by itself: whoever dies holds
nothing for ever.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from roostream.errors import CheckpointError
from roostream.runtime.checkpoint_store import CheckpointStore

_FOLDER = "pins"


class Pin(NamedTuple):
    """Of a table's version, until a wall time."""

    table: str
    version: int
    until_ms: int


def pin(store: CheckpointStore, who: str, held: Pin) -> None:
    """Hold a version, or go on holding it. `who`: unique among readers, fit for a file's name. A version is held before it is
    read from. UnavailableError: the store can't be written."""
    store.put(_name(held.table, who), json.dumps(held._asdict()).encode())


def unpin(store: CheckpointStore, table: str, who: str) -> None:
    """Idempotent. UnavailableError: the store can't be written; it ends by itself then."""
    store.delete(_name(table, who))


def pinned_versions(store: CheckpointStore, table: str, now_ms: int) -> set[int]:
    """Versions of a table that are held now; pins that ended, and what is no pin, are deleted.

    Raises:
        UnavailableError: the store can't be read: nothing may be deleted that could be held.
    """
    found: set[int] = set()
    for name in store.list(_FOLDER):
        if not name.startswith(f"{_FOLDER}/{table}."):
            continue
        held = _read(store, name)
        if held is not None and held.until_ms > now_ms:
            found.add(held.version)
        else:
            store.delete(name)
    return found


def _read(store: CheckpointStore, name: str) -> Pin | None:
    """None: it has just been taken back, or nobody could have written it."""
    try:
        said = json.loads(store.get(name))
        return Pin(str(said["table"]), int(said["version"]), int(said["until_ms"]))
    except (CheckpointError, ValueError, KeyError, TypeError):
        return None


def _name(table: str, who: str) -> str:
    return f"{_FOLDER}/{table}.{who}"
