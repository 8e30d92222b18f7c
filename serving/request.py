"""`RankRequest`: a parsed rank request, independent of the format it was sent in."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.schema.ids import LOWEST_ID, MASK64, item_id, key_bytes
from roostream.wire.block import Columns
from serving.errors import RequestError
from serving.types import MAX_TEXT_BYTES


class RequestBlocks(NamedTuple):
    """The feature blocks of a request: the bytes that are logged, and the same values as arrays, which are
    scored. Both are validated."""

    ro: bytes
    nro: bytes
    ro_columns: Columns
    nro_columns: Columns


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RankRequest:
    """Values have the form that `roostream.wire.block.encode_*` takes. A feature that the client did not send
    is absent."""

    request_id: str
    user_id: int  # uint64; 0 = unknown
    session_id: int  # uint64
    surface: str
    item_ids: np.ndarray  # int64 [n], at least one, each once
    client_item_ids: Sequence[int | str]  # the item ids as the client wrote them
    ro: dict[str, Any]
    nro: dict[str, Any]  # columns of n values: float64 with NaN = missing, or lists with None = missing
    append: bool  # adds candidates to a request that was ranked before (a further page)
    first_position: int  # position of the first slot of this answer
    model_version: str  # "" = the newest
    return_ranked: bool = False  # include item ids in ranked order in the answer
    blocks: RequestBlocks | None = None  # as the client encoded them; `ro` and `nro` are empty then
    # Whether the blocks lack a feature that can be filled in; None = not checked yet
    has_missing: bool | None = None
    has_missing_stateful: bool = False  # whether a missing feature is kept in Redis
    traceparent: str = ""  # of the request's span, if tracing is on

    @property
    def key(self) -> bytes:
        return key_bytes(self.user_id, self.session_id, self.request_id)


def parse_request_id(text: str, path: str) -> str:
    """Return the client's request id, or a new one if it is empty."""
    return check_text(text, path) if text else uuid.uuid4().hex


def check_text(text: str, path: str) -> str:
    """The text. Raises RequestError 400: it is too long."""
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise RequestError(
            400, f"expected at most {MAX_TEXT_BYTES} bytes of UTF-8, got {len(text.encode())}", path
        )
    return text


def parse_id(value: int | str, path: str) -> int:
    """Return a uint64: integers pass through, strings are hashed, as `roostream.schema.ids.item_id` does."""
    try:
        return item_id(value)
    except ValueError as error:
        raise RequestError(400, str(error), path) from None


def parse_ids(values: list[int | str], path_of: Callable[[int], str]) -> np.ndarray:
    """Return int64 [n] of the ids. `path_of(i)` is the JSON path of the i-th id. Raises as `check_ids`."""
    check_ids(values, path_of)
    unsigned = [v & MASK64 if type(v) is int else item_id(v) for v in values]
    return np.array(unsigned, dtype=np.uint64).view(np.int64)


def check_ids(values: list[int | str], path_of: Callable[[int], str]) -> None:
    """Raises RequestError 400 with the path of the first invalid id."""
    integers: list[int] = [v for v in values if type(v) is int]
    if (len(integers) < len(values) and "" in values) or (
        integers and not (min(integers) >= LOWEST_ID and max(integers) <= MASK64)
    ):
        for i, value in enumerate(values):
            parse_id(value, path_of(i))
