"""Pins: table versions that are being read. Their files stay, even if newer files have replaced them.

A pin is an object `pins/<table>.<owner>` that its reader renews and that expires by itself, so a dead reader
keeps nothing. A pin that is renewed holds also if the clock of its reader, or of who asks, is wrong.

The object `pins/folder` stays. A folder without it is not known to have all pins: it may not be mounted.
"""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

from roostream.errors import CheckpointError
from roostream.runtime.checkpoint_store import CheckpointStore

_FOLDER = "pins"
FOLDER_MARK = f"{_FOLDER}/folder"
_FIRST_SEEN_MS = 86_400_000  # clocks that are further apart matter only if a compactor starts meanwhile
log = logging.getLogger("roostream.warehouse")


class VersionPin(NamedTuple):
    """A table version that is kept until a wall-clock time."""

    table: str
    version: int
    until_ms: int


def pin_version(store: CheckpointStore, owner: str, version_pin: VersionPin) -> None:
    """Pin a version, or renew the pin. Pin a version before reading from it.

    `owner`: unique among readers and valid as a file name.

    Raises:
        UnavailableError: the store cannot be written.
    """
    store.put(_name(version_pin.table, owner), json.dumps(version_pin._asdict()).encode())


def pinned_versions(
    store: CheckpointStore, table: str, now_ms: int, known: dict[str, bytes] | None = None
) -> set[int]:
    """The versions of a table that are pinned now. Expired pins are deleted, and so are objects that are no
    pins.

    `known`: the pins that earlier calls found, empty at first; it is updated. A pin that has changed since
    was renewed, so it holds. One that is new to the caller holds until a day after its time.

    Raises:
        UnavailableError: the store cannot be read; then no version may be considered free.
    """
    found: set[int] = set()
    for name in store.list(_FOLDER):
        if not name.startswith(_name(table, "")):
            continue
        try:
            data = store.get(name)
            body = json.loads(data)
            version, until_ms = int(body["version"]), int(body["until_ms"])
            is_renewed = known is not None and (
                known[name] != data if name in known else now_ms - until_ms < _FIRST_SEEN_MS
            )
            if known is not None:
                known[name] = data
        except CheckpointError:  # just deleted
            continue
        except (ValueError, KeyError, TypeError, OverflowError):
            log.warning("%s is not a pin and is deleted; readers write their pins again", name)
            until_ms, is_renewed = 0, False
        if until_ms > now_ms or is_renewed:
            found.add(version)
        else:
            store.delete(name)
    return found


def _name(table: str, owner: str) -> str:
    return f"{_FOLDER}/{table}.{owner}"
