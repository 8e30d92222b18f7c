"""`/v1/retrieve` and `/v1/recommend` in the OpenAPI document: types of their answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roostream.schema.schema import Schema
from serving.http.json_types import FORBID, PlainId, limits
from serving.http.retrieve_body import recommend_type, retrieve_type


class FoundItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the catalogue."""

    item_id: PlainId
    product: Annotated[float, Meta(description="of its vector with the request's, both of length 1")]


class RetrieveAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing of it is logged."""

    request_id: str
    retrieval_version: str
    items: Annotated[list[FoundItem], Meta(description="the nearest first")]
    degraded: bool


def retrieve_types(schema: Schema, rank: type[msgspec.Struct]) -> tuple[type[msgspec.Struct], ...]:
    """Components of the document; `rank`: of `/v1/rank`."""
    return (retrieve_type(rank), recommend_type(schema, rank), RetrieveAnswer, _recommended_type(schema))


def _recommended_type(schema: Schema) -> type[msgspec.Struct]:
    names = {f"t{i}": task for i, task in enumerate(schema.tasks)}
    score = Annotated[float, limits(minimum=0, maximum=1)]
    scores = msgspec.defstruct("ItemScores", [(name, score) for name in names], rename=names, **FORBID)
    item = msgspec.defstruct("RankedItem", [("item_id", PlainId), ("scores", scores)], **FORBID)
    fields: list[Any] = [
        ("request_id", str),
        ("retrieval_version", str),
        ("model_version", str),
        ("items", Annotated[list[item], Meta(description="first slot first")]),  # type: ignore[valid-type]
        ("degraded", bool),
    ]
    return msgspec.defstruct("RecommendAnswer", fields, **FORBID)
