"""Encoding of deltas and barriers as records of the topic `rows`.

Letters: M keys of a delta, the first L of them live; D width.
"""

from __future__ import annotations

import numpy as np

from param_server.embedding_table import Keys
from param_server.kernels import publishable
from param_server.outbox import Delta
from roostream.errors import SchemaError, WireError
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import encode_fields


def encode_delta(delta: Delta, schema: int, incarnation: int) -> bytes:
    """Encode a delta to the bytes that protobuf would write; ids and rows are copied from their arrays."""
    before = pb.RowDelta(
        schema=schema,
        bucket=delta.bucket,
        incarnation=incarnation,
        sequence=delta.sequence,
        table_id=delta.table,
        dim=delta.rows_LD.shape[1],
    )
    behind = pb.RowDelta(
        num_tombstones=len(delta.id_M) - len(delta.rows_LD),
        oldest_engagement_ms=delta.oldest_engagement_ms,
        oldest_close_ms=delta.oldest_close_ms,
        oldest_trained_ms=delta.oldest_trained_ms,
        stack=delta.stack,
        more=delta.more,
    )
    columns = ((pb.RowDelta.IDS_FIELD_NUMBER, delta.id_M), (pb.RowDelta.ROWS_FIELD_NUMBER, delta.rows_LD))
    packed = encode_fields((number, column.tobytes() if column.size else None) for number, column in columns)
    body = (
        before.SerializeToString(deterministic=True) + packed + behind.SerializeToString(deterministic=True)
    )
    return wire.frame(wire.ROW_DELTA, body)


def encode_barrier(stack: str, bucket: int, incarnation: int, rebootstrap: bool) -> bytes:
    """Encode a barrier."""
    message = pb.Barrier(incarnation=incarnation, bucket=bucket, rebootstrap=rebootstrap, stack=stack)
    return wire.encode(wire.BARRIER, message)


def keys_of(delta: pb.RowDelta) -> Keys:
    """All keys of a delta, live ones first."""
    id_M = np.fromiter(delta.ids, np.uint64, len(delta.ids)).view(np.int64)
    return Keys(np.full(len(id_M), delta.table_id, np.uint32), id_M)


def columns_of(delta: pb.RowDelta, width: int, max_norm: float) -> tuple[Keys, np.ndarray]:
    """(keys [M], rows float32 [L, D]) of a delta, live keys first.

    Raises:
        SchemaError: rows of another width.
        WireError: `bad_shape`: columns disagree; `bad_number`: rows are not finite or longer than `max_norm`.
    """
    num_live = len(delta.ids) - delta.num_tombstones
    if delta.dim != width:
        raise SchemaError(
            f"rows of stack {delta.stack!r}: expected width {width}, got {delta.dim}; give serving and "
            "the shards one schema"
        )
    if num_live < 0 or len(delta.rows) != num_live * delta.dim:
        raise WireError(
            "bad_shape",
            f"rows of {delta.stack!r}: expected {num_live} rows of {delta.dim}, got {len(delta.rows)} "
            "numbers",
        )
    rows_LD = np.fromiter(delta.rows, np.float32, len(delta.rows)).reshape(num_live, delta.dim)
    if not publishable(rows_LD, max_norm).all():
        raise WireError(
            "bad_number",
            f"rows of {delta.stack!r}: expected finite rows of a norm of at most {max_norm:g}, got others",
        )
    return keys_of(delta), rows_LD
