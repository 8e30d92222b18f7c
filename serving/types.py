"""The types of serving's requests and answers. The decoder, the encoder, the Python client and the OpenAPI
document all use them.

What depends on the schema, such as the features, is added by `serving.rank_json.build_types` and by the type
parameter `S`, the scores of one candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from roostream.schema.ids import MASK64

MAX_TEXT_BYTES = 64
MAX_ENGAGEMENTS = 1000  # per body
MAX_ITEMS = 1000  # of an answer of retrieval
MAX_NAMED = 10_000  # ids in one list of a body of retrieval
MAX_FILTERED = 32  # attributes in a filter of retrieval
FORBID: dict[str, Any] = {"forbid_unknown_fields": True}
S = TypeVar("S")


def limits(description: str = "", **of_schema: Any) -> Meta:
    """Limits that appear in the OpenAPI document but are checked by our own code, for its messages and status
    codes."""
    return Meta(description=description or None, extra_json_schema=of_schema or None)


def described(description: str) -> Meta:
    """Metadata of a type: its description in the OpenAPI document."""
    return Meta(description=description)


TEXT = limits("at most 64 bytes of UTF-8", maxLength=MAX_TEXT_BYTES)
NAME = limits("1 to 64 bytes of UTF-8", minLength=1, maxLength=MAX_TEXT_BYTES)
PlainId = Annotated[int, limits(minimum=-(1 << 63), maximum=MASK64)] | Annotated[str, limits(minLength=1)]
ID_TEXT = "an integer of 64 bits, signed or not, passes through; a string is hashed; no empty one"
Id = Annotated[PlainId, described(ID_TEXT)]
VersionName = Annotated[
    str, limits("empty = the newest; 404 if it is not loaded", pattern=r"^(\d{1,20}-\d{1,20})?$")
]
Index = Annotated[int, limits(minimum=0, maximum=(1 << 31) - 1)]


class UserFields(msgspec.Struct, kw_only=True, **FORBID):
    """Fields of the bodies of rank, retrieve and recommend; each also has `ro`, whose type depends on the
    schema."""

    request_id: Annotated[
        str, limits("at most 64 bytes of UTF-8; made here when missing", maxLength=MAX_TEXT_BYTES)
    ] = ""
    user_id: Id = 0
    session_id: Id = 0
    surface: Annotated[str, TEXT] = ""


class RankFields(UserFields, kw_only=True, **FORBID):
    """Fields of the body of rank; it also has `candidates`."""

    append: Annotated[bool, described("a page that adds candidates to an earlier request")] = False
    first_position: Annotated[
        int, limits("position of this page's first slot", minimum=0, maximum=(1 << 31) - 2)
    ] = 0
    model_version: VersionName = ""


class RankOptions(msgspec.Struct, frozen=True):
    """The query parameters of rank."""

    append: Annotated[bool, described("a page that adds candidates to an earlier request")] = False
    ranked: Annotated[bool, described("the JSON answer has `ranked`: item ids, first slot first")] = False
    top: Annotated[
        int,
        limits(
            "the answer has `top` instead of scores and order: this many first slots with item id and scores",
            minimum=1,
        ),
    ] = 0  # 0 = all candidates, as scores and order


_Value = str | int | bool
FilterValue = Annotated[_Value | list[_Value], described("a list: one of them; or one value")]


class RetrieveFields(UserFields, kw_only=True, **FORBID):
    """Fields of the body of retrieve."""

    k: Annotated[int, limits("items to find", minimum=1, maximum=MAX_ITEMS)] = 100
    task: Annotated[str, limits("label whose towers are used; '' = the one that orders")] = ""
    exclude: Annotated[list[Id], limits("items to leave out", maxItems=MAX_NAMED)] = []
    among: Annotated[
        list[Id] | None,
        limits("no others than these are found; null = all of the catalogue", maxItems=MAX_NAMED),
    ] = None
    exclude_seen: Annotated[bool, described("leave out the items of the request's histories")] = False
    filter: Annotated[
        dict[str, FilterValue],
        limits("attributes of the catalogue that items must have", maxProperties=MAX_FILTERED),
    ] = {}


class RecommendFields(RetrieveFields, kw_only=True, **FORBID):
    """Fields of the body of recommend. `k` and `retrieved` are limited by the schema's `max_candidates`."""

    model_version: VersionName = ""


class ListAnswer(msgspec.Struct, kw_only=True):
    """Fields of every answer that has a list."""

    request_id: str
    degraded: Annotated[bool, described("online features or rows were unavailable")]


class RankedAnswer(ListAnswer, kw_only=True):
    """Fields of both answers of rank."""

    model_version: Annotated[str, described("the version that scored the candidates")]


class RankAnswer(RankedAnswer, Generic[S], kw_only=True, omit_defaults=True):
    """The scores of all candidates and their order. The list is logged, so that it becomes a sample."""

    scores: Annotated[Sequence[S], described("by candidate, in the request's order; not with ?top=…")]
    order: Annotated[list[Index], described("candidates' indices, first slot first; not with ?top=…")]
    ranked: Annotated[list[PlainId], described("with ?ranked=true: item ids, first slot first")] = []


class ScoredItem(msgspec.Struct, Generic[S]):
    """An item in a slot, with its scores by task."""

    item_id: PlainId
    scores: S


class TopAnswer(RankedAnswer, Generic[S], kw_only=True):
    """All candidates are scored and logged; the first slots are returned."""

    top: Annotated[list[ScoredItem[S]], described("with ?top=…: the first slots, first slot first")]


class FoundItem(msgspec.Struct):
    """An item of the catalogue."""

    item_id: PlainId
    product: Annotated[float, described("of its vector with the request's, both of length 1")]


class RetrieveAnswer(ListAnswer, kw_only=True):
    """Found items; nothing is logged."""

    retrieval_version: str
    items: Annotated[list[FoundItem], described("the nearest first")]


class RecommendAnswer(ListAnswer, Generic[S], kw_only=True):
    """Found and ranked items. The list is logged like that of a rank, unless it is empty."""

    retrieval_version: str
    model_version: str
    items: Annotated[list[ScoredItem[S]], described("first slot first")]


class EngagementsAnswer(msgspec.Struct):
    """All engagements of the body are logged."""

    accepted: Annotated[int, limits(minimum=0, maximum=MAX_ENGAGEMENTS)]
    event_ids: Annotated[
        list[Annotated[str, limits(pattern="^[0-9]{1,20}$")]],
        described(
            "64-bit numbers as text, in the body's order; sent as event_id, the same event is sent again"
        ),
    ]
    unused_actions: Annotated[
        list[Annotated[str, NAME]],
        described("actions of the body that no label and no online feature counts"),
    ]


class Fault(msgspec.Struct, omit_defaults=True):
    """An error: one word for programs, one sentence for people."""

    code: Annotated[str, described("one word")]
    message: Annotated[str, described("one sentence: expected, got, what to do")]
    path: Annotated[str, described("the field, where one is at fault")] = ""


class Error(msgspec.Struct):
    """Any answer other than 200; nothing was logged. Always JSON."""

    error: Fault


class Readiness(msgspec.Struct):
    """Whether answers are complete, and what is still missing."""

    ready: bool
    waiting_for: list[str]
    model_version: str
    rows_age_s: Annotated[
        float | None, described("since the rows were known to be current; null = they never were")
    ]


class Alive(msgspec.Struct):
    """The process is up."""

    status: str


class About(msgspec.Struct):
    """Which process this is."""

    name: str
    version: str
    schema: str
    model_version: str
    ready: bool
    rows_age_s: float | None
    links: dict[str, str]
