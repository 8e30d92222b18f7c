"""What a sample's record says beyond its batch, as columns: who asked, what was folded in, how its bytes were made.

With them a record can be written again byte for byte (roostream/warehouse/rebuild.py), so a topic can be filled from the warehouse and
labels can be derived anew.

    user_id, session_id, request_id, model_version     the header's; the record's key follows from the first three
    close_reason, num_duplicates                        the sample's
    given                                               which optional parts there were, a sum of GIVEN
    parts                                               candidates of each impression; null where one had them all
    event__id, …                                        a list with an entry for each engagement that was folded in
    raw                                                 the record itself, where the other columns don't make it again; else null
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roostream.wire import roo_pb2 as pb
from roostream.wire.columnar import FlatColumn, Form

HAS_RO, HAS_SCORES, HAS_POSITIONS, HAS_PROPENSITIES, HAS_WEIGHT = GIVEN = (1, 2, 4, 8, 16)

PLAIN: Mapping[str, Form] = {
    "user_id": Form("request", "id", "i8"),
    "session_id": Form("request", "id", "i8"),
    "request_id": Form("request", "text", "O"),
    "model_version": Form("request", "text", "O"),
    "close_reason": Form("request", "id", "i4"),
    "num_duplicates": Form("request", "id", "i8"),
    "given": Form("request", "id", "i4"),
}
EVENTS: Mapping[str, Form] = {
    "event__id": Form("request", "number", "i8", is_list=True),
    "event__candidate": Form("request", "id", "i4", is_list=True),
    "event__action": Form("request", "text", "O", is_list=True),
    "event__value": Form("request", "float", "f4", is_list=True),
    "event__time_ms": Form("request", "time", "i8", is_list=True),
}
ENVELOPE: Mapping[str, Form] = {
    **PLAIN,
    "parts": Form("request", "id", "i4", is_list=True),
    **EVENTS,
    "raw": Form("request", "number", "bytes"),
}
_NUMPY = {"i8": np.int64, "i4": np.int32, "f4": np.float32, "O": object}


def envelope_of(samples: Sequence[pb.Sample]) -> dict[str, FlatColumn]:
    """The columns of ENVELOPE but `raw`, of samples that a decoder accepted."""
    headers = [s.header for s in samples]
    plain: dict[str, list[Any]] = {
        "user_id": [h.user_id for h in headers],
        "session_id": [h.session_id for h in headers],
        "request_id": [h.request_id for h in headers],
        "model_version": [h.model_version for h in headers],
        "close_reason": [s.close_reason for s in samples],
        "num_duplicates": [s.num_duplicates for s in samples],
        "given": [_given(s) for s in samples],
    }
    out = {name: FlatColumn(_array(values, PLAIN[name].dtype)) for name, values in plain.items()}
    used = [[len(p.rows) or p.num_rows for p in s.parts] for s in samples]
    several = np.array([len(parts) != 1 for parts in used], dtype=np.bool_)
    told = [parts if len(parts) != 1 else [] for parts in used]
    out["parts"] = FlatColumn(_flattened(told, "i4"), _lengths(told), several)
    events: dict[str, list[Any]] = {
        "event__id": [s.event_ids for s in samples],
        "event__candidate": [s.event_candidates for s in samples],
        "event__action": [[s.actions[i] for i in s.event_actions] for s in samples],
        "event__value": [s.event_values for s in samples],
        "event__time_ms": [s.event_times for s in samples],
    }
    everywhere = np.ones(len(samples), dtype=np.bool_)
    lengths = _lengths(events["event__id"])
    return out | {
        name: FlatColumn(_flattened(lists, EVENTS[name].dtype), lengths, everywhere)
        for name, lists in events.items()
    }


def raw_column(records: Sequence[bytes | None]) -> FlatColumn:
    """`raw`: what can't be made again."""
    return FlatColumn(_array(records, "O"))


def _given(s: pb.Sample) -> int:
    there = (s.HasField("ro"), len(s.scores), len(s.positions), len(s.propensities), s.weight)
    return sum(bit for bit, is_there in zip(GIVEN, there, strict=True) if is_there)


def _lengths(lists: Sequence[Sequence[Any]]) -> np.ndarray:
    return np.fromiter(map(len, lists), dtype=np.int32, count=len(lists))


def _flattened(lists: Sequence[Sequence[Any]], dtype: str) -> np.ndarray:
    return _array([value for values in lists for value in values], dtype)


def _array(values: Sequence[Any], dtype: str) -> np.ndarray:
    if dtype == "O":
        out = np.empty(len(values), dtype=object)
        out[:] = values
        return out
    return (
        np.array(values, dtype=np.uint64).view(np.int64)
        if dtype == "i8" and _is_unsigned(values)
        else np.array(values, _NUMPY[dtype])
    )


def _is_unsigned(values: Sequence[Any]) -> bool:
    return any(value > 0x7FFFFFFFFFFFFFFF for value in values)
