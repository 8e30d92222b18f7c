"""Example bodies and answers of a schema, for its documents and pages; tests send them."""

from __future__ import annotations

from typing import Any

from roostream.online.counters import sources_of
from roostream.schema.schema import Feature, Schema
from roostream.wire.block import main_key
from serving.page.explanation import ExplainAnswer, ExplainedCandidate, FeatureEffect, RowCount
from serving.types import (
    About,
    EngagementsAnswer,
    FoundItem,
    RankAnswer,
    Readiness,
    RecommendAnswer,
    RetrieveAnswer,
    ScoredItem,
)

ENGAGED = EngagementsAnswer(1, ["12938856668555431774"], [])
READY = Readiness(ready=True, waiting_for=[], model_version="1-27", rows_age_s=0.4)
FOUND = RetrieveAnswer(
    request_id="r-1",
    degraded=False,
    retrieval_version="1-27",
    items=[FoundItem(8, 0.75), FoundItem("nine", 0.5)],
)


def rank_example(schema: Schema) -> dict[str, Any]:
    """A valid rank body without the features that serving fills in, as clients leave them out."""
    filled = sources_of(schema, "ro")
    own = {f.name: _value(f) for f in schema.nro if not f.online and f.name not in ("item", "item_id", "nro")}
    return {
        "request_id": "r-1",
        "user_id": 17,
        "session_id": 4,
        "ro": {f.name: _value(f) for f in schema.ro if f.name not in filled},
        "candidates": [{"item_id": 8, **own}, {"item_id": 9, **own}],
    }


def engagement_example(schema: Schema) -> dict[str, Any]:
    """A valid engagement that a label counts."""
    action = schema.labels[0].action
    return {"request_id": "r-1", "user_id": 17, "session_id": 4, "item_id": 8, "action": action, "value": 1.0}


def _value(f: Feature) -> Any:
    if f.kind == "float":
        return 2.5
    if f.kind == "ids":
        return [3]
    if f.kind == "weighted_ids":
        return {"ids": [3], "weights": [0.5]}
    return {
        main_key(f): [8, 3],
        **{c: [1, 1] if kind == "ids" else [1700000000000] * 2 for c, kind in f.columns.items()},
    }


def answer_example(schema: Schema) -> RankAnswer[dict[str, float]]:
    """A possible answer."""
    return RankAnswer(
        request_id="r-1",
        model_version="1-27",
        degraded=False,
        scores=[dict.fromkeys(schema.tasks, score) for score in (0.0625, 0.125)],
        order=[1, 0],
    )


def recommended_example(schema: Schema) -> RecommendAnswer[dict[str, float]]:
    """A possible answer of recommend."""
    items: list[ScoredItem[Any]] = [
        ScoredItem(item, dict.fromkeys(schema.tasks, score)) for item, score in (("nine", 0.125), (8, 0.0625))
    ]
    return RecommendAnswer(
        request_id="r-1", degraded=False, retrieval_version="1-27", model_version="1-27", items=items
    )


def explained_example(schema: Schema) -> ExplainAnswer:
    """A possible explanation of two candidates, with one feature."""
    feature = next((f for f in schema.nro if f.kind != "float"), (*schema.nro, *schema.ro)[0])
    return ExplainAnswer(
        request_id="r-1",
        model_version="1-27",
        degraded=False,
        tasks=list(schema.tasks),
        order=[1, 0],
        candidates=[
            ExplainedCandidate(item, dict.fromkeys(schema.tasks, score))
            for item, score in ((8, 0.0625), (9, 0.125))
        ],
        features=[
            FeatureEffect(
                name=feature.name,
                side="nro" if feature in schema.nro else "ro",
                kind=feature.kind,
                values=["3", "5"],
                rows=[RowCount(1, 1), RowCount(1, 0)],
                changes=[dict.fromkeys(schema.tasks, change) for change in (0.01, -0.02)],
            )
        ],
        left_out=0,
    )


def about_example(schema: Schema, links: dict[str, str]) -> About:
    """A possible answer of `/`."""
    return About(
        name="Roostream serving",
        version="0.1.0",
        schema=schema.name,
        model_version="1-27",
        ready=True,
        rows_age_s=0.4,
        links=links,
    )
