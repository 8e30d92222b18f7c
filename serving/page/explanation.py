"""Explains the scores of a request: feature values, learned rows, and the scores without each feature.

A feature is removed by making it missing for all candidates; nothing else is hydrated or computed again. The
reported change is the score without the feature minus the score with it. It describes the model, not what
users would do. Nothing is logged.

1 complete and score the request as a rank request, and read its rows
2 score again without each feature, several features per forward pass
3 build the answer

Letters: n candidates, T tasks, U rows of a stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from roostream.schema.ids import unsigned
from roostream.schema.schema import Feature
from roostream.wire.block import Side, decode_block, nro_columns, ro_columns
from roostream.wire.lookup import build_lookup, sources_of
from serving.answer import shortest
from serving.ordering import best_order
from serving.rank import RankService
from serving.request import RankRequest
from serving.request_batch import RequestColumns, build_batch
from serving.scorer import RowReader, Version, probabilities
from serving.types import Index, PlainId


class RowCount(msgspec.Struct, frozen=True):
    """Embedding rows that a value uses, and how many of them differ from their initial value."""

    needed: int
    learned: int


class FeatureEffect(msgspec.Struct, frozen=True):
    """One feature of the request (one value) or of each candidate."""

    name: str
    side: Annotated[str, Meta(description="ro: of the request; nro: of a candidate")]
    kind: str
    values: Annotated[
        list[Any],  # a union with null does not compile in Go and is not read in Java
        Meta(description="as scored: numbers, lists of ids as text, null = missing"),
    ]
    rows: Annotated[list[RowCount] | None, Meta(description="null: it has no rows")]
    changes: Annotated[
        list[dict[str, float]] | None,
        Meta(
            description="of each candidate, by task: its score without this feature less the one with it; "
            "null: not tried"
        ),
    ]


class ExplainedCandidate(msgspec.Struct, frozen=True):
    """A candidate of the explanation, which lists them in the order of the request."""

    item_id: PlainId
    scores: dict[str, float]


class ExplainAnswer(msgspec.Struct, frozen=True):
    """Scores and their explanation; nothing was logged."""

    request_id: str
    model_version: str
    degraded: bool
    tasks: list[str]
    order: list[Index]
    candidates: list[ExplainedCandidate]
    features: list[FeatureEffect]
    left_out: Annotated[int, Meta(description="features that were not removed because there are too many")]


MAX_CANDIDATES = 50
MAX_FEATURES = 64  # features to remove at most
_PASS_CANDIDATES = 100  # per forward pass: bounds how long a rank request may wait for it
_SHOWN_IDS = 8


@dataclasses.dataclass(eq=False)
class Explanation:
    """An explanation in progress. `ro`, `nro`: values by feature; `changes`: score changes by removed
    feature, float32 [n, T]."""

    request: RankRequest
    time_ms: int
    version: Version
    degraded: bool
    ro: dict[str, Any]
    nro: dict[str, Any]
    scores_nT: np.ndarray
    rows: dict[str, list[RowCount]]
    changes: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def given(self) -> list[str]:
        """Features that can be removed, those of candidates first, in declared order."""
        schema = self.version.schema
        return [f.name for f in (*schema.nro, *schema.ro) if f.name in self.nro or f.name in self.ro]


class Explainer:
    """Call `begin` and `score_without` in the scoring thread. `initial` reads rows at their initial
    values."""

    def __init__(self, service: RankService, initial: Callable[[], RowReader]) -> None:
        self.service, self.schema, self._initial = service, service.schema, initial

    def begin(self, request: RankRequest, time_ms: int) -> Explanation:
        """Step 1: complete the request, choose its version and score it. Raises RequestError as a ranking."""
        complete = self.service.complete_request(request, time_ms)
        columns, version = complete.columns(), complete.choice.version
        n = len(request.item_ids)
        ro = decode_block(self.schema, "ro", complete.blocks.ro, 1)
        nro = {k: v for k, v in decode_block(self.schema, "nro", complete.blocks.nro, n).items() if _some(v)}
        scores_nT = probabilities(version.score(self.service.rows, columns))
        degraded = complete.degraded or not self.service.rows_complete()
        return Explanation(request, time_ms, version, degraded, ro, nro, scores_nT, self._rows(columns))

    def passes(self, explanation: Explanation) -> Iterator[list[str]]:
        """Names of the features to remove, grouped by forward pass."""
        names = explanation.given[:MAX_FEATURES]
        size = max(_PASS_CANDIDATES // len(explanation.request.item_ids), 1)
        yield from (names[at : at + size] for at in range(0, len(names), size))

    def score_without(self, explanation: Explanation, names: Sequence[str]) -> None:
        """Step 2: score the request without each of these features. Raises as `begin`."""
        version = explanation.version
        logits = version.score_all(self.service.rows, [self._without(explanation, name) for name in names])
        for name, logits_nT in zip(names, logits, strict=True):
            explanation.changes[name] = probabilities(version.finite(logits_nT)) - explanation.scores_nT

    def build_answer(self, explanation: Explanation) -> ExplainAnswer:
        """Step 3: the answer of all passes."""
        request, tasks = explanation.request, self.schema.tasks
        scores = [dict(zip(tasks, row, strict=True)) for row in shortest(explanation.scores_nT).tolist()]
        return ExplainAnswer(
            request_id=request.request_id,
            model_version=explanation.version.name,
            degraded=explanation.degraded,
            tasks=list(tasks),
            order=best_order(explanation.scores_nT[:, self.service.policy.task]),
            candidates=[
                ExplainedCandidate(item, s) for item, s in zip(request.client_item_ids, scores, strict=True)
            ],
            features=[
                self._effect(explanation, side, f)
                for side in ("nro", "ro")
                for f in getattr(self.schema, side)
            ],
            left_out=max(len(explanation.given) - MAX_FEATURES, 0),
        )

    def _without(self, explanation: Explanation, name: str) -> RequestColumns:
        ro = {k: v for k, v in explanation.ro.items() if k != name}
        nro = {k: v for k, v in explanation.nro.items() if k != name}
        items = explanation.request.item_ids
        columns = ro_columns(self.schema, ro), nro_columns(self.schema, nro, len(items))
        return RequestColumns(*columns, items, explanation.time_ms)

    def _rows(self, columns: RequestColumns) -> dict[str, list[RowCount]]:
        """Row counts by feature, of the request or of each candidate. Columns of a sequence that have a table
        are included."""
        batch = build_batch(self.schema, [columns])
        lookup = build_lookup(batch)
        rows, initial = self.service.rows.gather(lookup), self._initial().gather(lookup)
        counts: dict[str, np.ndarray] = {}
        for stack, sources in self.schema.derived(sources_of).items():
            learned_U = (rows[stack] != initial[stack]).any(axis=1)
            for source in sources:
                name = source.key.partition(".")[0]
                lists = batch.ro_lists if source.side == "ro" else batch.nro_lists
                lengths_N = lists.lengths_KN[lists.index(name)]
                at = np.repeat(np.arange(len(lengths_N)), lengths_N)
                learned_N = np.bincount(at, learned_U[lookup.stacks[stack].index[source.key]], len(lengths_N))
                counts[name] = counts.get(name, 0) + np.stack((lengths_N, learned_N)).astype(np.int64)
        return {name: [RowCount(*pair) for pair in count_2N.T.tolist()] for name, count_2N in counts.items()}

    def _effect(self, explanation: Explanation, side: Side, f: Feature) -> FeatureEffect:
        given = explanation.ro if side == "ro" else explanation.nro
        n = 1 if side == "ro" else len(explanation.request.item_ids)
        values = [given.get(f.name)] if side == "ro" else given.get(f.name, [None] * n)
        changes_nT = explanation.changes.get(f.name)
        changes = (
            None
            if changes_nT is None
            else [dict(zip(self.schema.tasks, row, strict=True)) for row in changes_nT.tolist()]
        )
        return FeatureEffect(
            f.name, side, f.kind, [_shown(v) for v in values], explanation.rows.get(f.name), changes
        )


def _some(column: Any) -> bool:
    """Whether any candidate has a value."""
    return (
        not np.isnan(column).all() if isinstance(column, np.ndarray) else any(v is not None for v in column)
    )


def _shown(value: Any) -> float | str | None:
    """A number, or ids as text, since ids can exceed the integers of a browser."""
    if value is None or isinstance(value, float | np.floating):
        return None if value is None or np.isnan(value) else float(value)
    ids = next(iter(value.values())) if isinstance(value, dict) else value
    more = f", … ({len(ids)})" if len(ids) > _SHOWN_IDS else ""
    return ", ".join(str(unsigned(i)) for i in ids[:_SHOWN_IDS]) + more or "empty"
