"""Parses the `application/x-protobuf` body of `POST /v1/rank`, a `roo.Impression` without scores, into a
RankRequest.

Its blocks are scored and logged as they are, unless a feature that is kept in Redis is missing.
"""

from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError

from roostream.errors import WireError
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import Columns, Side
from serving.errors import RequestError
from serving.rank_json import check_num_candidates, check_unique
from serving.request import RankRequest, RequestBlocks, check_text, parse_request_id
from serving.request_batch import checked, fast_checked_columns


def parse_impression(schema: Schema, body: bytes) -> RankRequest:
    """Parse a rank request in protobuf. Raises RequestError 400 with the path of the field; 413 for more
    candidates or list entries than the schema allows."""
    message = pb.Impression()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise RequestError(
            400, f"expected a roo.Impression, got {len(body)} bytes that are not one", "$"
        ) from None
    header, n = message.header, len(message.item_ids)
    if header.schema not in (0, schema.fingerprint):
        expected = f"expected schema {schema.fingerprint:016x} or 0, got {header.schema:016x}"
        raise RequestError(400, f"{expected}; load the schema file of this serving", "$.header.schema")
    for name in ("scores", "positions", "propensities"):
        if len(getattr(message, name)):
            raise RequestError(400, "expected none: serving sets it", f"$.{name}")
    check_num_candidates(schema, n, "$.item_ids")
    item_ids = np.fromiter(message.item_ids, np.uint64, n).view(np.int64)
    check_unique(item_ids, "$.item_ids[{}]")
    ro, nro = message.ro, message.nro
    both = fast_checked_columns(schema, ro, nro, n) or (
        _checked(schema, "ro", ro, 1),
        _checked(schema, "nro", nro, n),
    )
    return RankRequest(
        request_id=parse_request_id(header.request_id, "$.header.request_id"),
        user_id=header.user_id,
        session_id=header.session_id,
        surface=check_text(header.surface, "$.header.surface"),
        item_ids=item_ids,
        client_item_ids=message.item_ids,
        ro={},
        nro={},
        append=False,
        first_position=0,
        model_version=header.model_version,
        blocks=RequestBlocks(ro, nro, *both),
    )


def _checked(schema: Schema, side: Side, block: bytes, num_rows: int) -> Columns:
    try:
        return checked(schema, side, block, num_rows)
    except WireError as error:
        raise RequestError(413 if error.reason == "oversized" else 400, str(error), f"$.{side}") from None
