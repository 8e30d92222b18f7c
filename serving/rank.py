"""Ranks parsed requests: from a RankRequest to its answer and the impression that is logged.

1 complete    fill in missing features from Redis or compute them (serving/feature_completion.py)
2 encode      the block bytes are logged; the same arrays are scored
3 score       one version per request; requests that arrived together share one forward pass
4 order       by the configured task, with exploration, or interleaved (serving/ordering.py)
5 impression  features as scored, scores and positions as served, propensities

With `append` a page adds candidates to an earlier request. Its RO features are hydrated again for scoring,
but its impression has none: training uses the RO features of the first page.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from roostream.errors import RoostreamError
from roostream.online.entity_fields import EntityFields
from roostream.runtime.kafka.topics import IMPRESSIONS
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import IMPRESSION, encode_fields
from serving.answer import Scores
from serving.errors import RequestError
from serving.feature_completion import FeatureCompletion
from serving.feature_log.format import LogRecord
from serving.metrics import ScoreHistogram, StageHistograms
from serving.online_features.hydration import Hydrated, HydrationRequest
from serving.ordering import Draft, best_order, explore, request_rng, team_draft
from serving.request import RankRequest, RequestBlocks
from serving.request_batch import RequestColumns
from serving.scorer import RowReader, probabilities
from serving.types import RankAnswer
from serving.versions.interleaving_stats import InterleavingStats, Pair
from serving.versions.loaded_versions import LoadedVersions, VersionChoice
from serving.versions.recent_requests import ScoredRequest

log = logging.getLogger("roostream.serving")


class Hydration(Protocol):
    """Reads the online features of a request's user and candidates; `Hydrator` reads them from Redis
    (serving/online_features/hydration.py)."""

    def read(
        self, user_id: int, item_ids: np.ndarray, time_ms: int, fields: EntityFields
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return (RO, NRO) online features by name. Raises RoostreamError while Redis is unavailable."""

    def read_all(self, requests: Sequence[HydrationRequest]) -> Sequence[Hydrated]:
        """For each request what `read` returns or raises, in one round trip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderPolicy:
    """How answers are ordered."""

    task: int = 0  # index of the task whose score decides the order
    exploration: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RankResult:
    """An answer and its log record, which is not appended yet."""

    answer: RankAnswer[Any]
    record: LogRecord

    @property
    def scores_nT(self) -> np.ndarray:
        """float32 probabilities, by candidate in the request's order and by task."""
        assert isinstance(self.answer.scores, Scores)
        return self.answer.scores.values_nT


class _OpenedRequest(NamedTuple):
    """A request whose version is chosen and whose blocks are checked."""

    choice: VersionChoice
    request: RankRequest
    time_ms: int
    took_s: float


class _OnlineFeatures(NamedTuple):
    """The online features of a request; empty and degraded while Redis is unavailable."""

    ro: Mapping[str, Any]
    nro: Mapping[str, Any]
    degraded: bool
    took_s: float


class CompletedRequest(NamedTuple):
    """A request with all features, and the version that scores it."""

    choice: VersionChoice
    request: RankRequest
    time_ms: int
    blocks: RequestBlocks
    degraded: bool
    took_s: tuple[float, float, float]  # seconds to check, hydrate and encode

    def columns(self) -> RequestColumns:
        return RequestColumns(
            self.blocks.ro_columns, self.blocks.nro_columns, self.request.item_ids, self.time_ms
        )


class RankService:
    """`rank` and `rank_all` run in one thread at a time."""

    def __init__(
        self,
        schema: Schema,
        versions: LoadedVersions,
        rows: RowReader,
        hydrator: Hydration | None = None,
        policy: OrderPolicy | None = None,
    ) -> None:
        self.schema, self.versions, self.rows, self.hydrator = schema, versions, rows, hydrator
        self.policy = policy or OrderPolicy()
        self.completion = FeatureCompletion(schema)
        # Replaced by the exported ones.
        self.stages, self.scores = (StageHistograms(), ScoreHistogram(schema.tasks))
        # Answers are marked degraded until the rows are loaded.
        self.rows_ready: Callable[[], bool] = lambda: True
        self.rows_complete: Callable[[], bool] = lambda: True  # whether the last gather of rows was complete
        self.row_reads_wait = False  # whether a gather may wait for a shard
        self.interleaving_stats = InterleavingStats(
            schema.labels[self.policy.task].action if schema.labels else ""
        )
        # Called with each scored request, in the scoring thread.
        self.on_scored: Callable[[ScoredRequest], None] = lambda scored: None

    def rank(self, request: RankRequest, time_ms: int) -> RankResult:
        """Rank one request. Raises RequestError; nothing is logged then."""
        (outcome,) = self.rank_all([(request, time_ms)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def rank_all(self, requests: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        """Return, for each (request, time), what `rank` would return or raise. Requests of one version share
        a forward pass.

        If a shared pass fails, each of its requests is scored alone, so that an error affects only the
        request that causes it.
        """
        outcomes: dict[int, RankResult | Exception] = {}
        by_version: dict[int, list[tuple[int, CompletedRequest]]] = {}
        for i, complete in enumerate(self.complete_all(requests)):
            if isinstance(complete, Exception):
                outcomes[i] = complete
            else:
                by_version.setdefault(id(complete.choice.version), []).append((i, complete))
        for group in by_version.values():
            outcomes.update(self._score_group(group))
        return [outcomes[i] for i in range(len(requests))]

    def complete_request(self, request: RankRequest, time_ms: int) -> CompletedRequest:
        """Steps 1 and 2."""
        (complete,) = self.complete_all([(request, time_ms)])
        if isinstance(complete, Exception):
            raise complete
        return complete

    def complete_all(self, requests: Sequence[tuple[RankRequest, int]]) -> list[CompletedRequest | Exception]:
        """Steps 1 and 2 for each (request, time), with one read of online features for all; an error in place
        of a request that has one."""
        opened = [self._open(request, time_ms) for request, time_ms in requests]
        online = iter(self._hydrate_all([each for each in opened if isinstance(each, _OpenedRequest)]))
        return [
            self._encode(each, next(online)) if isinstance(each, _OpenedRequest) else each for each in opened
        ]

    def _open(self, request: RankRequest, time_ms: int) -> _OpenedRequest | Exception:
        """Choose the version and check which features the blocks lack."""
        begin_s = time.perf_counter()
        try:
            choice = self.versions.choose(request)
            self.completion.open(request)
        except Exception as error:
            return error
        return _OpenedRequest(choice, request, time_ms, time.perf_counter() - begin_s)

    def _encode(self, opened: _OpenedRequest, online: _OnlineFeatures) -> CompletedRequest | Exception:
        begin_s = time.perf_counter()
        choice, request, time_ms, opened_s = opened
        try:
            blocks = self.completion.encode(request, time_ms, online.ro, online.nro)
        except Exception as error:
            return error
        took_s = opened_s, online.took_s, time.perf_counter() - begin_s
        return CompletedRequest(choice, request, time_ms, blocks, online.degraded, took_s)

    def _score_group(
        self, group: list[tuple[int, CompletedRequest]]
    ) -> Iterator[tuple[int, RankResult | Exception]]:
        """Steps 3 to 5 for requests of one version."""
        begin_s = time.perf_counter()
        try:
            logits = group[0][1].choice.version.score_all(
                self.rows, [complete.columns() for _, complete in group]
            )
        except Exception as error:
            if len(group) == 1:
                yield group[0][0], error
            else:
                for alone in group:
                    yield from self._score_group([alone])
            return
        has_rows = self.rows_complete()  # a rival that is interleaved with a request gathers rows again
        share_s = (time.perf_counter() - begin_s) / len(group)
        for (i, complete), logits_nT in zip(group, logits, strict=True):
            try:
                yield i, self._build_result(complete, logits_nT, share_s, has_rows)
            except Exception as error:
                yield i, error

    def _build_result(
        self, complete: CompletedRequest, logits_nT: np.ndarray, share_s: float, has_rows: bool
    ) -> RankResult:
        """Steps 4 and 5; `share_s` is the request's share of the pass, `has_rows` whether the pass got all of
        its rows. Raises RequestError 413, 500."""
        begin_s = time.perf_counter()
        request, version = complete.request, complete.choice.version
        scores_nT = probabilities(version.finite(logits_nT))
        for stage, seconds in zip(
            (self.stages.hydrate, self.stages.encode, self.stages.score),
            (*complete.took_s[1:], share_s),
            strict=True,
        ):
            stage.observe(seconds)
        self.scores.add(scores_nT)
        draft = self._draft(complete, scores_nT)
        has_rows = has_rows and (draft is None or self.rows_complete())
        order, propensities = self._order(request, scores_nT, draft)
        answer = RankAnswer(
            request_id=request.request_id,
            model_version=version.name,
            scores=Scores(self.schema.tasks, scores_nT),
            order=order,
            degraded=complete.degraded or not has_rows,
            ranked=[request.client_item_ids[i] for i in order] if request.return_ranked else [],
        )
        value = self._impression(complete, answer, scores_nT, propensities)
        took_s = sum(complete.took_s) + share_s + time.perf_counter() - begin_s
        self._notify_scored(complete, scores_nT, took_s)
        return RankResult(answer, LogRecord(IMPRESSIONS, -1, complete.time_ms, request.key, value))

    def _notify_scored(self, complete: CompletedRequest, scores_nT: np.ndarray, took_s: float) -> None:
        request = complete.request
        self.on_scored(
            ScoredRequest(
                request_id=request.request_id,
                key=request.key,
                model_version=complete.choice.version.name,
                ro=complete.blocks.ro,
                nro=complete.blocks.nro,
                item_ids=request.item_ids,
                time_ms=complete.time_ms,
                scores_nT=scores_nT,
                took_s=took_s,
            )
        )

    def _hydrate_all(self, opened: Sequence[_OpenedRequest]) -> list[_OnlineFeatures]:
        """Read the online features of the requests that lack some, in one round trip. Each request counts an
        equal share of its time. Without Redis the features stay missing."""
        out = [_OnlineFeatures({}, {}, not self.rows_ready(), 0.0)] * len(opened)
        if self.hydrator is None:
            return out
        begin_s, positions, wanted = time.perf_counter(), list[int](), list[HydrationRequest]()
        for i, (_, request, time_ms, _) in enumerate(opened):
            if self.completion.needs_hydration(request):
                fields = self.completion.fields(request)
                wanted.append(HydrationRequest(request.user_id, request.item_ids, time_ms, fields))
                positions.append(i)
        if not wanted:
            return out
        hydrated = self.hydrator.read_all(wanted)
        took_s = time.perf_counter() - begin_s
        failed = all(isinstance(values, RoostreamError) for values in hydrated)
        (self.stages.redis_failed if failed else self.stages.redis_ok).observe(took_s)
        share_s = took_s / len(wanted)
        for i, values in zip(positions, hydrated, strict=True):
            if isinstance(values, RoostreamError):
                log.debug("hydration failed: %s", values)
                out[i] = _OnlineFeatures({}, {}, True, share_s)
            else:
                out[i] = _OnlineFeatures(*values, not self.rows_ready(), share_s)
        return out

    def _order(
        self, request: RankRequest, scores_nT: np.ndarray, draft: Draft | None
    ) -> tuple[list[int], list[float]]:
        """An interleaved list is not explored: a slot's propensity would be a sum over all drafts."""
        if draft is not None:
            return draft.order, draft.propensities
        best = best_order(scores_nT[:, self.policy.task])
        return (
            explore(best, self.policy.exploration, self._draw(request))
            if self.policy.exploration
            else (best, [])
        )

    def _draft(self, complete: CompletedRequest, scores_nT: np.ndarray) -> Draft | None:
        """Interleave with the rival's order; None without a rival, or if the rival cannot score the
        request."""
        choice, request = complete.choice, complete.request
        if choice.rival is None:
            return None
        try:
            rival_nT = probabilities(choice.rival.score(self.rows, complete.columns()))
        except Exception:  # also a lack of memory: the request has its scores
            log.debug("version %s cannot score a request as a rival", choice.rival.name, exc_info=True)
            self.interleaving_stats.record_failure()
            return None
        task = self.policy.task
        draft = team_draft(best_order(scores_nT[:, task]), best_order(rival_nT[:, task]), self._draw(request))
        pair = Pair(choice.version.name, choice.rival.name)
        self.interleaving_stats.record_list(
            request.key, request.request_id, pair, request.item_ids.tolist(), draft.team_n
        )
        return draft

    def _draw(self, request: RankRequest) -> random.Random:
        """The request's random generator: a repeated request gets the same draws."""
        return request_rng(self.policy.seed, request.key, request.request_id, request.first_position)

    def _impression(
        self,
        complete: CompletedRequest,
        answer: RankAnswer[Any],
        scores_nT: np.ndarray,
        propensities: list[float],
    ) -> bytes:
        """Encode the impression. Raises RequestError 413."""
        request, blocks = complete.request, complete.blocks
        header = pb.Header(
            request_id=request.request_id,
            user_id=request.user_id,
            session_id=request.session_id,
            surface=request.surface,
            time_ms=complete.time_ms,
            schema=self.schema.fingerprint,
            model_version=answer.model_version,
            traceparent=request.traceparent,
        )
        n = len(answer.order)
        position_n = np.empty(n, dtype="<u4")
        position_n[answer.order] = np.arange(request.first_position, request.first_position + n)
        fields = (
            (IMPRESSION.header, header.SerializeToString(deterministic=True)),
            (IMPRESSION.ro, None if request.append else blocks.ro),
            (IMPRESSION.item_ids, request.item_ids.astype("<i8").tobytes() or None),
            (IMPRESSION.nro, blocks.nro or None),
            (IMPRESSION.scores, scores_nT.astype("<f4").tobytes() or None),
            (IMPRESSION.positions, position_n.tobytes() or None),
            (IMPRESSION.propensities, np.array(propensities, dtype="<f4").tobytes() or None),
        )
        value = bytes((wire.IMPRESSION, wire.VERSION)) + encode_fields(fields)
        max_bytes = self.schema.limits.max_record_bytes
        if len(value) > max_bytes:
            raise RequestError(413, f"expected an impression of at most {max_bytes} bytes, got {len(value)}")
        return value
