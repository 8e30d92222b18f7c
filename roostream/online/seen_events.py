"""The events that were counted already, so that a repeated one counts once.

Clients retry, Kafka delivers at least once, and a producer may send its log again. An engagement is known by
its event id within its request; a list by its request id; a page that adds candidates to a list by the
request id and the page's items. The ids are remembered for each Kafka key: for the user, without a user for
the session, with neither for the request. So a repeated event finds the ids of the first one.

A repetition is recognized within SEEN_MS of event time, if it is among the MAX_SEEN newest events of its key.
Beyond these bounds, which bound the memory, it counts again.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from roostream.errors import CheckpointError
from roostream.schema.ids import MASK64, as_int64, key_bytes, sample_id, signed

MAX_SEEN = 256
SEEN_MS = 3_600_000
_VERSION = b"\x01"


class EventId(NamedTuple):
    """What a repeated event has in common with the first one."""

    key: int  # int64 of the Kafka key
    id: int  # int64


def engagement_id(header: tuple[int, int, str, str], event_id: int) -> EventId | None:
    """The identity of an engagement; `header` is user, session, surface, request id.

    None without a request id or an event id: such an engagement can't be recognized, and the joiner refuses
    it.
    """
    user_id, session_id, _, request_id = header
    if not request_id or not event_id:
        return None
    key = key_bytes(user_id & MASK64, session_id, request_id)
    return EventId(_key(key), signed(sample_id(key, request_id, event_id)))


def list_id(
    header: tuple[int, int, str, str], item_ids: Sequence[int] | np.ndarray, has_ro: bool
) -> EventId | None:
    """The identity of a shown list, or of a page that adds candidates to one (`has_ro` is False).

    None without a request id.
    """
    user_id, session_id, _, request_id = header
    if not request_id:
        return None
    key = key_bytes(user_id & MASK64, session_id, request_id)
    id_ = sample_id(key, request_id)
    if not has_ro:
        item_n = np.unique(as_int64(item_ids))
        id_ = xxhash.xxh3_64_intdigest(id_.to_bytes(8, "little") + item_n.tobytes())
    return EventId(_key(key), signed(id_))


class SeenEvents:
    """The events of one key that were counted: ids and event times in ms, in the order of time."""

    def __init__(self, ids: Iterable[int] = (), times: Iterable[int] = ()) -> None:
        self._ids, self._times = array("q", ids), array("q", times)
        self._time_of = dict(zip(self._ids, self._times, strict=True))

    @property
    def newest_ms(self) -> int:
        """The newest event time; 0 if there is none."""
        return self._times[-1] if self._times else 0

    def add(self, id_: int, time_ms: int) -> bool:
        """Remember an event; False and no change if it is remembered already."""
        ids, times = self._ids, self._times
        known_ms = self._time_of.get(id_)
        if known_ms is not None and abs(known_ms - time_ms) < SEEN_MS:
            return False
        index = bisect.bisect_right(times, time_ms)
        ids.insert(index, id_)
        times.insert(index, time_ms)
        self._time_of[id_] = time_ms if known_ms is None else max(known_ms, time_ms)
        num_old = max(bisect.bisect_right(times, times[-1] - SEEN_MS), len(times) - MAX_SEEN)
        if num_old:
            for old, at_ms in zip(ids[:num_old], times[:num_old], strict=True):
                if self._time_of.get(old) == at_ms:
                    del self._time_of[old]
            del ids[:num_old], times[:num_old]
        return True

    def to_bytes(self) -> bytes:
        """The version, then all ids, then all times, each 8 bytes little-endian."""
        return _VERSION + self._ids.tobytes() + self._times.tobytes()


def seen_from_bytes(data: bytes) -> SeenEvents:
    """Read seen events. Raises CheckpointError: bytes of another format."""
    if data[:1] != _VERSION or len(data) % 16 != 1:
        raise CheckpointError(
            f"expected the ids of counted events in version 1, got {len(data)} other bytes; delete them"
        )
    ids, times = np.frombuffer(data, dtype="<i8", offset=1).reshape(2, -1).tolist()
    return SeenEvents(ids, times)


def _key(key: bytes) -> int:
    return int.from_bytes(key, "little", signed=True)
