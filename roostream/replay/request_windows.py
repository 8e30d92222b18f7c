"""A log's requests with what is known of the request alone, in windows of bounded size: for who counts, not for who trains.

Letters: R requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

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
    """Requests in the order of the log."""

    batch: Batch  # of a schema without candidates' features and labels; each request has one candidate, which means nothing
    who_R: np.ndarray  # int64: a number of the user, or of the session
    candidates_R: np.ndarray  # int64: how many the request showed


def request_windows(
    records: Iterable[Record], schema: Schema, by: By = "user", max_requests: int = WINDOW_REQUESTS
) -> Iterator[RequestWindow]:
    """Of the impressions among `records` (roostream/replay/replay_log.py); pages that only add candidates are left out, others are passed over.
    Memory: a window, as bytes and as arrays."""
    alone = dataclasses.replace(schema, nro=(), labels=(), transforms=())
    decoder = Decoder(alone, {alone.fingerprint: alone}.get)
    waiting: list[tuple[Record, int, int]] = []
    size = 0
    for record in records:
        kind, message = wire.decode(record.value)
        if kind != wire.IMPRESSION or not isinstance(message, pb.Impression) or not message.HasField("ro"):
            continue
        waiting.append((_alone(record, message, alone), _who(message.header, by), len(message.item_ids)))
        size += len(message.ro)
        if len(waiting) == max_requests or size >= _WINDOW_BYTES:
            yield _window(decoder, waiting)
            waiting, size = [], 0
    if waiting:
        yield _window(decoder, waiting)


def _alone(record: Record, shown: pb.Impression, schema: Schema) -> Record:
    """As a sample of one candidate of which nothing is known."""
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


def _who(header: pb.Header, by: By) -> int:
    """A stranger's request is somebody's of its own."""
    ids = (header.session_id, header.user_id) if by == "session" else (header.user_id, header.session_id)
    return next((each for each in ids if each), hash(header.request_id) & ((1 << 64) - 1))


def _window(decoder: Decoder, waiting: Sequence[tuple[Record, int, int]]) -> RequestWindow:
    records, who, candidates = zip(*waiting, strict=True)
    batch, rejects = decoder.decode(records)
    kept = np.delete(np.arange(len(records)), [reject.index for reject in rejects])
    who_N, candidates_N = np.array(who, dtype=np.uint64).view(np.int64), np.array(candidates, dtype=np.int64)
    return RequestWindow(batch, who_N[kept], candidates_N[kept])
