"""JSON bodies of `POST /v1/retrieve` and `POST /v1/recommend` → RetrieveRequest: who asks is spelt as for a rank."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from roostream.errors import nearest
from roostream.schema.schema import Schema
from serving.errors import RequestError, shown
from serving.http.json_types import FORBID, Id, limits
from serving.http.parse import JsonParser, decoded
from serving.request import RankRequest, id_of, ids_of, request_id_of, text_of
from serving.retrieval.attributes import AttributeValue
from serving.retrieval.retriever import RetrieveRequest

MAX_ITEMS = 1000  # of an answer
MAX_NAMED = 10_000  # that one list of ids names
MAX_FILTERED = 32  # names of a filter
_WHO = ("request_id", "user_id", "session_id", "surface", "ro")
_Value = Annotated[AttributeValue | list[AttributeValue], Meta(description="or a list: one of them")]
_COMMON: list[Any] = [
    ("task", Annotated[str, limits("label whose towers are asked; '' = the one that orders")], ""),
    (
        "exclude",
        Annotated[list[Id], limits("items to leave out", maxItems=MAX_NAMED)],
        msgspec.field(default_factory=list),
    ),
    (
        "among",
        Annotated[
            list[Id] | None,
            limits("no others than these are found; null = all of the catalogue", maxItems=MAX_NAMED),
        ],
        None,
    ),
    (
        "exclude_seen",
        Annotated[bool, Meta(description="leave out the items of the request's histories")],
        False,
    ),
    (
        "filter",
        Annotated[
            dict[str, _Value],
            limits("attributes of the catalogue that items must have", maxProperties=MAX_FILTERED),
        ],
        msgspec.field(default_factory=dict),
    ),
]


def retrieve_type(rank: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Of `/v1/retrieve`; `rank`: of `/v1/rank`."""
    k = Annotated[int, limits("items to find", minimum=1, maximum=MAX_ITEMS)]
    return msgspec.defstruct("RetrieveRequest", [*_who(rank), ("k", k, 100), *_COMMON], **FORBID)


def recommend_type(schema: Schema, rank: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Of `/v1/recommend`; `rank`: of `/v1/rank`."""
    most = max_found(schema)
    fields = [
        *_who(rank),
        ("k", Annotated[int, limits("items to show", minimum=1, maximum=most)], min(10, most)),
        (
            "retrieved",
            Annotated[int, limits("items that are found for the ranker", minimum=1, maximum=most)],
            min(100, most),
        ),
        (
            "model_version",
            Annotated[str, limits("of the ranking, as for a rank", pattern=r"^(\d{1,20}-\d{1,20})?$")],
            "",
        ),
        *_COMMON,
    ]
    return msgspec.defstruct("RecommendRequest", fields, **FORBID)


def max_found(schema: Schema) -> int:
    """What is found for a ranker is a list, and no longer than one may be."""
    return min(MAX_ITEMS, schema.limits.max_candidates)


class RetrieveParser(JsonParser):
    """For one schema. Thread-safe."""

    def __init__(self, schema: Schema, default_task: int) -> None:
        super().__init__(schema)
        self.default_task = default_task
        known, rank = self._types.known, self._types.rank
        retrieve, recommend = retrieve_type(rank), recommend_type(schema, rank)
        self._retrieve, self._recommend = msgspec.json.Decoder(retrieve), msgspec.json.Decoder(recommend)
        self._known_retrieve = {**known, "$": retrieve.__struct_fields__}
        self._known_recommend = {**known, "$": recommend.__struct_fields__}

    def retrieve(self, body: bytes) -> RetrieveRequest:
        """Raises RequestError 400 with the path of the field, 413."""
        given = decoded(self._retrieve, body, self._known_retrieve)
        return self._asked(given, _count(given.k, "$.k", MAX_ITEMS), "")

    def recommend(self, body: bytes) -> tuple[RetrieveRequest, int]:
        """And how many to show. Raises RequestError 400 with the path of the field, 413."""
        given, most = decoded(self._recommend, body, self._known_recommend), max_found(self.schema)
        shown_, found = _count(given.k, "$.k", most), _count(given.retrieved, "$.retrieved", most)
        return self._asked(given, max(found, shown_), given.model_version), shown_

    def _asked(self, given: Any, k: int, model_version: str) -> RetrieveRequest:
        return RetrieveRequest(
            request=RankRequest(
                request_id=request_id_of(given.request_id, "$.request_id"),
                user_id=id_of(given.user_id, "$.user_id"),
                session_id=id_of(given.session_id, "$.session_id"),
                surface=text_of(given.surface, "$.surface"),
                item_ids=np.zeros(0, np.int64),
                given_ids=(),
                ro=self._request_values(given.ro),
                nro={},
                append=False,
                first_position=0,
                model_version=model_version,
            ),
            k=k,
            task=self._task(given.task),
            exclude_N=_named_ids(given.exclude, "$.exclude"),
            among_N=None if given.among is None else _named_ids(given.among, "$.among"),
            exclude_seen=given.exclude_seen,
            wanted=_checked_filter(given.filter),
        )

    def _task(self, name: str) -> int:
        if not name:
            return self.default_task
        if name not in self.schema.tasks:
            message = f"expected one of {', '.join(self.schema.tasks)}, got {shown(name)!r}{nearest(shown(name), self.schema.tasks)}"
            raise RequestError(400, message, "$.task")
        return self.schema.tasks.index(name)


def _named_ids(ids: list[int | str], path: str) -> np.ndarray:
    if len(ids) > MAX_NAMED:
        raise RequestError(413, f"expected at most {MAX_NAMED} items, got {len(ids)}", path)
    return ids_of(ids, lambda i: f"{path}[{i}]")


def _count(value: int, path: str, most: int) -> int:
    if not 1 <= value <= most:
        raise RequestError(400, f"expected 1 to {most} items, got {shown(value)}", path)
    return value


def _checked_filter(wanted: dict[str, Any]) -> dict[str, Any]:
    if len(wanted) > MAX_FILTERED:
        raise RequestError(413, f"expected at most {MAX_FILTERED} attributes, got {len(wanted)}", "$.filter")
    return wanted


def _who(rank: type[msgspec.Struct]) -> list[Any]:
    """Fields of a rank's body."""
    given = {f.name: f for f in msgspec.structs.fields(rank)}
    fields: list[Any] = []
    for name in _WHO:
        f = given[name]
        made = (
            msgspec.field(default_factory=f.default_factory) if f.default is msgspec.NODEFAULT else f.default
        )
        fields.append((name, f.type, made))
    return fields
