"""The columns of a record that a batch does not have, and rebuilding records from columns, byte for byte.

So a topic can be filled again from the warehouse, and labels can be derived again.

    user_id, session_id, request_id, model_version     from the header; the key follows from the first three
    close_reason, num_duplicates                        from the sample
    given                                               which optional parts the record has, a sum of GIVEN
    parts                                               candidates of each impression; null if there is one
    event__id, …                                        lists with an entry for each engagement of the sample
    raw                                                 the record if other columns cannot rebuild it, or null

Letters: N rows of a side, F floats, K list features, R requests, B candidates, T labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.schema.ids import key_bytes, unsigned
from roostream.schema.schema import Feature, Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import NO_COLUMNS, Columns, Side, pack
from roostream.wire.columnar import ColumnType, FlatColumn, column_of, label_column

HAS_RO, HAS_SCORES, HAS_POSITIONS, HAS_PROPENSITIES, HAS_WEIGHT = GIVEN = (1, 2, 4, 8, 16)

PLAIN: Mapping[str, ColumnType] = {
    "user_id": ColumnType("request", "id", "i8"),
    "session_id": ColumnType("request", "id", "i8"),
    "request_id": ColumnType("request", "text", "O"),
    "model_version": ColumnType("request", "text", "O"),
    "close_reason": ColumnType("request", "id", "i4"),
    "num_duplicates": ColumnType("request", "id", "i8"),
    "given": ColumnType("request", "id", "i4"),
}
EVENTS: Mapping[str, ColumnType] = {
    "event__id": ColumnType("request", "number", "i8", is_list=True),
    "event__candidate": ColumnType("request", "id", "i4", is_list=True),
    "event__action": ColumnType("request", "text", "O", is_list=True),
    "event__value": ColumnType("request", "float", "f4", is_list=True),
    "event__time_ms": ColumnType("request", "time", "i8", is_list=True),
}
ENVELOPE: Mapping[str, ColumnType] = {
    **PLAIN,
    "parts": ColumnType("request", "id", "i4", is_list=True),
    **EVENTS,
    "raw": ColumnType("request", "number", "bytes"),
}
_NUMPY = {"i8": np.int64, "i4": np.int32, "f4": np.float32, "O": object}


def envelope_of(samples: Sequence[pb.Sample]) -> dict[str, FlatColumn]:
    """The columns of ENVELOPE but `raw`, of samples that the decoder accepted."""
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
    listed = [parts if len(parts) != 1 else [] for parts in used]
    out["parts"] = FlatColumn(_flattened(listed, "i4"), _lengths(listed), several)
    events: dict[str, list[Any]] = {
        "event__id": [s.event_ids for s in samples],
        "event__candidate": [s.event_candidates for s in samples],
        "event__action": [[s.actions[i] for i in s.event_actions] for s in samples],
        "event__value": [s.event_values for s in samples],
        "event__time_ms": [s.event_times for s in samples],
    }
    all_present = np.ones(len(samples), dtype=np.bool_)
    lengths = _lengths(events["event__id"])
    return out | {
        name: FlatColumn(_flattened(lists, EVENTS[name].dtype), lengths, all_present)
        for name, lists in events.items()
    }


def raw_column(records: Sequence[bytes | None]) -> FlatColumn:
    """The column `raw`: records that cannot be rebuilt."""
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
    if dtype == "i8" and any(value > 0x7FFFFFFFFFFFFFFF for value in values):
        return np.array(values, dtype=np.uint64).view(np.int64)
    return np.array(values, _NUMPY[dtype])


class _Stream(NamedTuple):
    """The entries of all lists of a row, concatenated row by row."""

    values: np.ndarray
    starts: np.ndarray  # int64 [N + 1]


class _SideRows(NamedTuple):
    """A side's rows in the order of the wire format."""

    float_NF: np.ndarray
    length_NK: np.ndarray  # uint32
    missing_NK: np.ndarray  # bool
    ids: _Stream
    weights: _Stream
    times: _Stream

    def block(self, start: int, end: int) -> bytes:
        """The encoded block of rows [start, end); empty rows give an empty block."""
        float_NF, missing_NK = self.float_NF[start:end], self.missing_NK[start:end]
        if missing_NK.all() and np.isnan(float_NF).all():
            return pack(NO_COLUMNS)
        ids, weights, times = (
            s.values[s.starts[start] : s.starts[end]] for s in (self.ids, self.weights, self.times)
        )
        bits = np.packbits(missing_NK.ravel(), bitorder="little")
        last = np.flatnonzero(bits)
        missing = bits[: last[-1] + 1] if len(last) else bits[:0]
        return pack(
            Columns(float_NF.ravel(), self.length_NK[start:end].ravel(), ids, weights, times, missing)
        )


def rebuild_records(
    schema: Schema, columns: Mapping[str, FlatColumn], counts_R: np.ndarray
) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of each record, in the rows' order.

    `columns`: all columns of a file that `schema` wrote; `raw` may be absent.
    """
    sides: dict[Side, _SideRows] = {
        "ro": _side_rows(schema, "ro", columns, len(counts_R)),
        "nro": _side_rows(schema, "nro", columns, int(counts_R.sum())),
    }
    text = {name: columns[name].values for name in ("request_id", "model_version")}
    number = {name: columns[name].values.tolist() for name in _NUMBERS}
    starts_R1 = np.concatenate([[0], np.cumsum(counts_R)]).tolist()
    lists = {name: _ListColumn(columns[name]) for name in ("parts", *(f"event__{what}" for what in _EVENTS))}
    label_BT, score_BT = (_by_label(schema, columns, what) for what in ("label", "score"))
    item_B = columns["item"].values.view(np.uint64)
    raw: list[bytes | None] = columns["raw"].values.tolist() if "raw" in columns else [None] * len(counts_R)
    for r in range(len(counts_R)):
        user, session = unsigned(number["user_id"][r]), unsigned(number["session_id"][r])
        key = key_bytes(user, session, text["request_id"][r])
        if (record := raw[r]) is not None:
            yield key, record
            continue
        start, end, given = starts_R1[r], starts_R1[r + 1], number["given"][r]
        sample = pb.Sample(
            header=pb.Header(
                request_id=text["request_id"][r],
                user_id=user,
                session_id=session,
                surface=columns["surface"].values[r].decode("utf-8", "replace"),
                time_ms=number["time_ms"][r],
                schema=schema.fingerprint,
                model_version=text["model_version"][r],
            ),
            sample_id=unsigned(number["sample_id"][r]),
            close_reason=number["close_reason"][r],
            close_ms=number["close_ms"][r],
            item_ids=item_B[start:end].tolist(),
            parts=_parts(sides["nro"], lists["parts"].of(r), start, end),
            labels=label_BT[start:end].ravel().tolist(),
            scores=score_BT[start:end].ravel().tolist() if given & HAS_SCORES else (),
            positions=columns["position"].values[start:end].tolist() if given & HAS_POSITIONS else (),
            propensities=columns["propensity"].values[start:end].tolist() if given & HAS_PROPENSITIES else (),
            weight=number["weight"][r] if given & HAS_WEIGHT else 0.0,
            num_duplicates=number["num_duplicates"][r],
        )
        if given & HAS_RO:
            sample.ro = sides["ro"].block(r, r + 1)
        _add_events(sample, [lists[f"event__{what}"].of(r) for what in _EVENTS])
        yield key, wire.encode(wire.SAMPLE, sample)


_NUMBERS = (
    *("user_id", "session_id", "time_ms", "sample_id"),
    *("close_reason", "close_ms", "weight", "num_duplicates", "given"),
)
_EVENTS = ("id", "candidate", "action", "value", "time_ms")


class _ListColumn:
    """A list column of requests, row by row."""

    def __init__(self, column: FlatColumn) -> None:
        assert column.lengths is not None
        self._values, self._ends = column.values, np.cumsum(column.lengths, dtype=np.int64).tolist()

    def of(self, row: int) -> list:
        found = self._values[self._ends[row - 1] if row else 0 : self._ends[row]]
        return found.tolist()


def _parts(side: _SideRows, used: Sequence[int], start: int, end: int) -> list[pb.Part]:
    """One part if one impression showed all candidates, else the parts that are listed."""
    parts = []
    for count in used or (end - start,):
        parts.append(pb.Part(nro=side.block(start, start + count), num_rows=count))
        start += count
    return parts


def _add_events(sample: pb.Sample, events: Sequence[list]) -> None:
    ids, candidates, actions, values, times = events
    names = list(dict.fromkeys(actions))
    sample.event_ids.extend(unsigned(i) for i in ids)
    sample.event_candidates.extend(candidates)
    sample.event_actions.extend(names.index(action) for action in actions)
    sample.event_values.extend(values)
    sample.event_times.extend(times)
    sample.actions.extend(names)


def _by_label(schema: Schema, columns: Mapping[str, FlatColumn], what: str) -> np.ndarray:
    arrays = [columns[label_column(label.name, what)].values for label in schema.labels]
    return (
        np.stack(arrays, axis=1) if arrays else np.zeros((len(columns["item"].values), 0), dtype=np.float32)
    )


def _side_rows(schema: Schema, side: Side, columns: Mapping[str, FlatColumn], rows: int) -> _SideRows:
    floats = [columns[column_of(side, f.name)].values for f in schema.floats(side)]
    lists = schema.lists(side)
    own = [columns[column_of(side, f.name)] for f in lists]

    def table(arrays: Sequence[np.ndarray], dtype: str) -> np.ndarray:
        return np.stack(arrays, axis=1).astype(dtype) if arrays else np.zeros((rows, 0), dtype)

    def stream(names_of: Sequence[tuple[str, ...]], dtype: str) -> _Stream:
        chosen = [columns[name] for names in names_of for name in names]
        return _interleaved([(_column_lengths(c), c.values) for c in chosen], rows, dtype)

    return _SideRows(
        float_NF=table(floats, "<f4"),
        length_NK=table([_column_lengths(c) for c in own], "<u4"),
        missing_NK=~table([_present(c) for c in own], "bool"),
        ids=stream([_names(side, f, ("", *f.id_columns)) for f in lists], "<i8"),
        weights=stream([_names(side, f, ("weights",)) for f in lists if f.kind == "weighted_ids"], "<f4"),
        times=stream([_names(side, f, f.time_columns) for f in lists], "<i8"),
    )


def _names(side: Side, feature: Feature, columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(column_of(side, feature.name, column) for column in columns)


def _column_lengths(column: FlatColumn) -> np.ndarray:
    assert column.lengths is not None
    return column.lengths


def _present(column: FlatColumn) -> np.ndarray:
    assert column.present is not None
    return column.present


def _interleaved(lists: Sequence[tuple[np.ndarray, np.ndarray]], rows: int, dtype: str) -> _Stream:
    """Concatenate the lists (lengths [N], values) of each row: all of row 0, then all of row 1."""
    length_NS = (
        np.stack([lengths for lengths, _ in lists], axis=1).astype(np.int64)
        if lists
        else np.zeros((rows, 0), np.int64)
    )
    ends_NS = np.cumsum(length_NS.ravel()).reshape(length_NS.shape)
    out = np.empty(int(ends_NS[-1, -1]) if ends_NS.size else 0, dtype=dtype)
    for s, (lengths, values) in enumerate(lists):
        here = np.cumsum(length_NS[:, s])
        out[np.arange(len(values)) + np.repeat(ends_NS[:, s] - here, lengths)] = values
    starts = np.concatenate([[0], ends_NS[:, -1]]) if lists and rows else np.zeros(rows + 1, dtype=np.int64)
    return _Stream(out, starts)
