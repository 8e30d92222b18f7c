"""One message of every record type, as format version 1 wrote it. Never change an entry: for new fields, add
a new golden file."""

from __future__ import annotations

from google.protobuf.message import Message

from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb

HEADER = pb.Header(
    request_id="req-1",
    user_id=(1 << 64) - 2,
    session_id=7,
    surface="home",
    time_ms=1_700_000_000_123,
    schema=11,
    model_version="2-5",
)
BLOCK = pb.Block(
    floats=[1.5], lengths=[2, 0], ids=[3, 1 << 63], weights=[0.5], times=[-1, 5], missing=b"\2"
).SerializeToString()

MESSAGES: dict[str, tuple[int, Message]] = {
    "impression": (
        wire.IMPRESSION,
        pb.Impression(
            header=HEADER,
            ro=BLOCK,
            item_ids=[8, 9],
            nro=BLOCK,
            scores=[0.25, 0.5],
            positions=[0, 1],
            propensities=[1.0, 0.5],
            weight=2.0,
        ),
    ),
    "engagement": (
        wire.ENGAGEMENT,
        pb.Engagement(
            header=HEADER, event_id=21, item_id=8, action="click", value=1.0, client_time_ms=1_700_000_000_000
        ),
    ),
    "sample": (
        wire.SAMPLE,
        pb.Sample(
            header=HEADER,
            sample_id=31,
            close_reason=pb.CLOSE_NEXT_REQUEST,
            close_ms=1_700_000_600_123,
            ro=BLOCK,
            item_ids=[8, 9],
            parts=[pb.Part(nro=BLOCK, num_rows=3, rows=[0, 2])],
            labels=[1.0, 0.0],
            scores=[0.25, 0.5],
            positions=[0, 1],
            propensities=[1.0, 0.5],
            weight=2.0,
            event_ids=[21],
            event_candidates=[0],
            event_actions=[0],
            event_values=[1.0],
            event_times=[1_700_000_001_000],
            actions=["click"],
            num_duplicates=300,
        ),
    ),
    "correction": (
        wire.CORRECTION,
        pb.Sample(
            header=HEADER, sample_id=32, item_ids=[9], labels=[1.0], labels_before=[0.0], untrainable=True
        ),
    ),
    "dead_letter": (
        wire.DEAD_LETTER,
        pb.DeadLetter(
            reason="bad_shape",
            topic="impressions",
            partition=3,
            offset=99,
            error="expected …",
            raw=b"\1",
            raw_bytes=1,
            event_id=21,
        ),
    ),
    "heartbeat": (wire.HEARTBEAT, pb.Heartbeat(time_ms=1_700_000_000_000, producer="serving-0")),
    "end_marker": (wire.END_MARKER, pb.EndMarker(time_ms=1_700_000_000_000)),
    "row_delta": (
        wire.ROW_DELTA,
        pb.RowDelta(
            schema=11,
            bucket=5,
            incarnation=2,
            sequence=9,
            table_id=77,
            dim=2,
            ids=[1, 2],
            rows=[0.5, -0.5],
            num_tombstones=1,
            oldest_engagement_ms=1,
            oldest_close_ms=2,
            oldest_trained_ms=3,
            stack="d2-adagrad",
        ),
    ),
    "barrier": (wire.BARRIER, pb.Barrier(incarnation=2, bucket=5, rebootstrap=True, stack="d2-adagrad")),
    "prediction": (
        wire.PREDICTION,
        pb.Prediction(
            sample_id=31,
            time_ms=1,
            item_ids=[8, 9],
            scores=[0.5, 0.25],
            labels=[1, 0],
            served_scores=[0.25, 0.5],
            step=4,
            offset=6,
        ),
    ),
}

RANK_ANSWER = pb.RankAnswer(
    request_id="req-1",
    model_version="2-5",
    tasks=["click", "dwell"],
    scores=[0.25, 0.5, 0.125, 1.0],
    order=[1, 0],
    degraded=True,
)
"""An answer is not a record, so its golden bytes have no type byte."""
