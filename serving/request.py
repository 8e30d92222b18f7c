"""A parsed rank request, whatever form it came in."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.schema.ids import LOWEST_ID, MASK64, item_id, key_bytes
from roostream.wire.block import Columns
from serving.errors import RequestError

MAX_TEXT_BYTES = 64


class RequestBlocks(NamedTuple):
    """A request's features as they are logged, and the same as arrays, which are scored; checked."""

    ro: bytes
    nro: bytes
    ro_columns: Columns
    nro_columns: Columns


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RankRequest:
    """Values are as `roostream.wire.block.encode_*` takes them; absent = the client didn't give it."""

    request_id: str
    user_id: int  # uint64; 0 = unknown
    session_id: int  # uint64
    surface: str
    item_ids: np.ndarray  # int64 [n], each once, at least one
    client_item_ids: Sequence[int | str]  # the same as the client wrote them
    ro: dict[str, Any]
    nro: dict[str, Any]  # columns of n: float64 with NaN = missing, or lists with None = missing
    append: bool  # adds candidates to an open request
    first_position: int  # place of the first slot of this answer
    model_version: str  # "" = the newest
    return_ranked: bool = False  # the answer names the items in their order
    top: int = (
        0  # the answer has so many first slots with their items and scores; 0 = all scores, and the order
    )
    blocks: RequestBlocks | None = None  # as the client encoded them; then `ro` and `nro` are empty
    has_missing: bool | None = (
        None  # whether the blocks lack something that can be filled in; None = nobody has looked
    )
    has_missing_stateful: bool = False  # something of it is kept online
    traceparent: str = ""  # of the call's span, where it is traced

    @property
    def key(self) -> bytes:
        return key_bytes(self.user_id, self.session_id, self.request_id)


def parse_request_id(text: str, path: str) -> str:
    """The client's, or a new one where it gave none."""
    return check_text(text, path) if text else uuid.uuid4().hex


def check_text(text: str, path: str) -> str:
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise RequestError(
            400, f"expected at most {MAX_TEXT_BYTES} bytes of UTF-8, got {len(text.encode())}", path
        )
    return text


def parse_id(value: int | str, path: str) -> int:
    """uint64: integers pass through, strings are hashed; the check is `roostream.schema.ids.item_id`'s."""
    try:
        return item_id(value)
    except ValueError as error:
        raise RequestError(400, str(error), path) from None


def parse_ids(values: list[int | str], path_of: Callable[[int], str]) -> np.ndarray:
    """int64 [n] of ids from outside; `path_of` names the place of the i-th. Raises as `check_ids`."""
    check_ids(values, path_of)
    unsigned = [v & MASK64 if type(v) is int else item_id(v) for v in values]
    return np.array(unsigned, dtype=np.uint64).view(np.int64)


def check_ids(values: list[int | str], path_of: Callable[[int], str]) -> None:
    """Raises RequestError 400 with the path of the first that is no id."""
    integers: list[int] = [v for v in values if type(v) is int]
    if (len(integers) < len(values) and "" in values) or (
        integers and not (min(integers) >= LOWEST_ID and max(integers) <= MASK64)
    ):
        for i, value in enumerate(values):
            parse_id(value, path_of(i))
