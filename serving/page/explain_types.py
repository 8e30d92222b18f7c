"""The answer of `POST /v1/explain`, as the document has it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class RowCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Embedding rows that a value needs, and those of them that aren't at their initial value."""

    needed: int
    learned: int


class FeatureEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One feature: of the request (one value), or of each candidate."""

    name: str
    side: Annotated[str, Meta(description="ro: of the request; nro: of a candidate")]
    kind: str
    values: Annotated[
        list[float | str | None], Meta(description="as scored; lists of ids as text; null = missing")
    ]
    rows: Annotated[list[RowCount] | None, Meta(description="null: it has no rows")]
    changes: Annotated[
        list[dict[str, float]] | None,
        Meta(
            description="of each candidate, by task: its score without this feature less the one with it; null: not tried"
        ),
    ]


class ExplainedCandidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In the request's order."""

    item_id: int | str
    scores: dict[str, float]


class ExplainAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scores and their reasons; nothing was logged."""

    request_id: str
    model_version: str
    degraded: bool
    tasks: list[str]
    order: list[int]
    candidates: list[ExplainedCandidate]
    features: list[FeatureEffect]
    left_out: Annotated[
        int, Meta(description="features that are given and were not taken out, being too many")
    ]
