"""Decode the request features of a log in windows of bounded size, for statistics such as duplicates (not for
training).

Letters: R requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record

WINDOW_REQUESTS = 1 << 16
_WINDOW_BYTES = 64 << 20
By = Literal["user", "session"]


class RequestWindow(NamedTuple):
    """Consecutive requests of the log."""

    batch: Batch  # without candidate features and labels; each request has one placeholder candidate
    group_R: np.ndarray  # int64: the user's or the session's id
    candidates_R: np.ndarray  # int64: number of candidates shown


def request_windows(
    records: Iterable[Record], schema: Schema, by: By = "user", max_requests: int = WINDOW_REQUESTS
) -> Iterator[RequestWindow]:
    """Windows of the impressions among `records`. Further pages and other records are ignored. Memory: one
    window."""
    alone = dataclasses.replace(schema, nro=(), labels=(), transforms=())
    decoder = Decoder(alone, {alone.fingerprint: alone}.get)
    waiting: list[tuple[Record, int, int]] = []
    size = 0
    for record in records:
        kind, message = wire.decode(record.value)
        if kind != wire.IMPRESSION or not isinstance(message, pb.Impression) or not message.HasField("ro"):
            continue
        waiting.append(
            (_as_sample(record, message, alone), _group_id(message.header, by), len(message.item_ids))
        )
        size += len(message.ro)
        if len(waiting) == max_requests or size >= _WINDOW_BYTES:
            yield _window(decoder, waiting)
            waiting, size = [], 0
    if waiting:
        yield _window(decoder, waiting)


def _as_sample(record: Record, shown: pb.Impression, schema: Schema) -> Record:
    """A sample with one candidate without features."""
    shown.header.schema = schema.fingerprint
    sample = pb.Sample(
        header=shown.header,
        sample_id=1,
        close_ms=shown.header.time_ms,
        ro=shown.ro,
        item_ids=[0],
        parts=[pb.Part(nro=b"", num_rows=1)],
        weight=1.0,
    )
    return record._replace(value=wire.encode(wire.SAMPLE, sample))


def _group_id(header: pb.Header, by: By) -> int:
    """The id to cluster by; a request without user and session is its own group."""
    ids = (header.session_id, header.user_id) if by == "session" else (header.user_id, header.session_id)
    return next((each for each in ids if each), hash64(header.request_id))


def _window(decoder: Decoder, waiting: Sequence[tuple[Record, int, int]]) -> RequestWindow:
    records, groups, candidates = zip(*waiting, strict=True)
    batch, rejects = decoder.decode(records)
    kept = np.delete(np.arange(len(records)), [reject.index for reject in rejects])
    group_N = np.array(groups, dtype=np.uint64).view(np.int64)
    return RequestWindow(batch, group_N[kept], np.array(candidates, dtype=np.int64)[kept])
