"""Finds the items whose vectors are nearest to a request's vector, and chooses those that are ranked and
shown.

1 hydrate missing features of the request, as for a rank
2 compute the request's vector of one task, with the version that the items' vectors are from
3 exclude items: not in `among`, in `exclude`, not matching the filter, or in the request's histories
4 return the k best of the others

Letters: T tasks, D width, I items.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roostream.errors import RoostreamError, WireError
from roostream.models.inputs import build_inputs
from roostream.models.two_tower.models import Retrieval
from roostream.online.counters import STATELESS_FEATURES, sources_of, stateless_features
from roostream.online.entity_fields import EntityFields, FieldReader
from roostream.runtime.clock import Clock
from roostream.schema.schema import Schema
from roostream.wire.block import NO_COLUMNS, main_key, ro_columns
from roostream.wire.lookup import build_lookup
from serving.errors import RequestError
from serving.ordering import best_order
from serving.rank import Hydration, RankService
from serving.request import RankRequest, parse_ids
from serving.request_batch import RequestColumns, build_batch
from serving.retrieval.catalogue import AttributeValue, Catalogue
from serving.retrieval.nearest_items import NearestItems, SearchResult, recall
from serving.scorer import RowReader, Version


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RetrievalIndex:
    """A version's request tower and the items' vectors of the same version, replaced as one (guarantee G4).
    Its vectors follow the rows."""

    version: Version
    model: Retrieval  # the version's model, or its retrieval part
    catalogue: Catalogue
    nearest: NearestItems


EVERY_S = 1.0
_SMOOTH = 0.05  # weight of the newest sample


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Searched:
    index: RetrievalIndex
    query_D: np.ndarray
    k: int
    allowed_I: np.ndarray | None
    found: SearchResult


class RecallSampler:
    """Measures the recall of the index on live requests: now and then a search is repeated exactly.

    Call `offer` in the scoring thread and `measure` in another, since it compares all items.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_measured = 0
        self.recall: float | None = None  # of recent samples; None = no sample yet
        self._lock = threading.Lock()
        self._asked: _Searched | None = None
        self._next_s = 0.0

    def offer(
        self,
        index: RetrievalIndex,
        query_D: np.ndarray,
        k: int,
        allowed_I: np.ndarray | None,
        found: SearchResult,
    ) -> None:
        """Keep this search if a sample is due. Never blocks."""
        now_s = self.clock.monotonic_s()
        if now_s >= self._next_s:
            with self._lock:
                self._asked = _Searched(index, query_D, k, allowed_I, found)
            self._next_s = now_s + EVERY_S

    def measure(self) -> bool:
        """Measure the kept search, if there is one. Vectors may have changed since."""
        with self._lock:
            request, self._asked = self._asked, None
        if request is None:
            return False
        value = recall(
            request.found, request.index.nearest.exact(request.query_D, request.k, request.allowed_I)
        )
        self.recall = value if self.recall is None else self.recall + (value - self.recall) * _SMOOTH
        self.num_measured += 1
        return True


log = logging.getLogger("roostream.serving")

_NO_ITEMS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RetrieveRequest:
    """A parsed retrieval request."""

    rank_request: RankRequest  # the user's features, without candidates
    k: int
    task: int  # index of the label whose request vector is used
    exclude_N: np.ndarray  # int64
    among_N: np.ndarray | None  # int64; only these items may be found; None = all
    exclude_seen: bool
    wanted: Mapping[str, AttributeValue | Sequence[AttributeValue]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Retrieved:
    """Items of one index, best first."""

    index: RetrievalIndex
    found: SearchResult
    degraded: bool  # online features or rows were unavailable

    @property
    def given(self) -> list[int | str]:
        """Item ids as the catalogue has them."""
        return [self.index.catalogue.client_id_I[slot] for slot in self.found.slot_K.tolist()]


class Retriever:
    """Call `retrieve` in one thread at a time, the Redis client's. Another thread sets `index`."""

    def __init__(
        self, schema: Schema, rows: RowReader, hydrator: Hydration | None, samples: RecallSampler
    ) -> None:
        self.schema, self.rows, self.hydrator, self.samples = schema, rows, hydrator, samples
        self.index: RetrievalIndex | None = None
        self.unavailable_reason = "the items' vectors are not built yet"  # while there is no index
        self.rows_ready: Callable[[], bool] = lambda: True
        self._sources, self._reader = sources_of(schema, "ro"), FieldReader(schema)
        self._seen = _features_of_seen(schema)

    def retrieve(self, request: RetrieveRequest, time_ms: int) -> Retrieved:
        """Return the nearest items; hydrated features are added to the request's `ro`.

        Raises:
            RequestError: 400 for a filter or feature; 413; 503: there are no vectors; 500: the request's
            vector is not finite.
        """
        index = self.index
        if index is None:
            raise RequestError(503, f"nothing can be retrieved: {self.unavailable_reason}", retry_after_s=1)
        degraded = self._hydrate(request.rank_request, time_ms) or not self.rows_ready()
        query_D = self._vector(index, request, time_ms)
        allowed_I = self._allowed(index, request)
        found = index.nearest.best(query_D, request.k, allowed_I)
        self.samples.offer(index, query_D, request.k, allowed_I, found)
        return Retrieved(index, found, degraded)

    def _hydrate(self, request: RankRequest, time_ms: int) -> bool:
        """Fill missing features of the request; return True if Redis was unavailable."""
        missing = {name: source for name, source in self._sources.items() if request.ro.get(name) is None}
        online, away = dict[str, Any](), False
        own, _ = stateless_features(request.user_id, _NO_ITEMS, time_ms)
        own.pop("num_candidates")  # there is no list yet
        if self.hydrator is not None and any(source not in STATELESS_FEATURES for source in missing.values()):
            try:
                read, _ = self.hydrator.read(request.user_id, _NO_ITEMS, time_ms, self._fields(request))
                online.update(read)
            except RoostreamError as error:
                log.debug("hydration failed: %s", error)
                away = True
        online.update(own)
        request.ro.update(
            {name: online[source] for name, source in missing.items() if online.get(source) is not None}
        )
        return away

    def _fields(self, request: RankRequest) -> EntityFields:
        header = request.user_id, request.session_id, request.surface, request.request_id
        return self._reader.from_values(header, request.ro, {}, 0)

    def _vector(self, index: RetrievalIndex, request: RetrieveRequest, time_ms: int) -> np.ndarray:
        """float32 [D]."""
        try:
            ro = ro_columns(self.schema, request.rank_request.ro)
        except WireError as error:
            raise RequestError(413 if error.reason == "oversized" else 400, str(error), "$.ro") from None
        batch = build_batch(self.schema, [RequestColumns(ro, NO_COLUMNS, _NO_ITEMS, time_ms)])
        lookup = build_lookup(batch)
        with torch.inference_mode():
            vector_TD = index.model.request_vectors(build_inputs(batch, lookup, self.rows.gather(lookup)))[
                0
            ].numpy()
        query_D: np.ndarray = vector_TD[request.task]
        if not np.isfinite(query_D).all():
            raise RequestError(
                500, f"model version {index.version.name} gave a vector that is not finite for this request"
            )
        return query_D

    def _allowed(self, index: RetrievalIndex, request: RetrieveRequest) -> np.ndarray | None:
        """bool [I]; None = all."""
        excluded_N = request.exclude_N
        if request.exclude_seen:
            excluded_N = np.concatenate(
                [
                    excluded_N,
                    *(_ids(request.rank_request.ro.get(name), name, key) for name, key in self._seen),
                ]
            )
        if not len(excluded_N) and not request.wanted and request.among_N is None:
            return None
        allowed_I = index.catalogue.attributes.allowed(request.wanted)
        if request.among_N is not None:
            named_I = np.zeros(len(allowed_I), np.bool_)
            named_I[index.catalogue.find_slots(request.among_N)] = True
            allowed_I &= named_I
        allowed_I[index.catalogue.find_slots(excluded_N)] = False
        return allowed_I


def _features_of_seen(schema: Schema) -> list[tuple[str, str]]:
    """Return (feature, key of its ids) of the item sequences: those that use the table of the candidate's own
    id."""
    own = {name for name, source in sources_of(schema, "nro").items() if source == "item_id"}
    tables = {f.table for f in schema.nro if f.name in own}
    return [(f.name, main_key(f)) for f in schema.lists("ro") if f.kind == "sequence" and f.table in tables]


def _ids(value: Any, name: str, key: str) -> np.ndarray:
    """int64; empty if the sequence is missing."""
    given = [] if value is None else list(value.get(key, value.get("ids", ())))
    return parse_ids(given, lambda i: f"$.ro.{name}.{key}[{i}]")


class Shortlist:
    """Chooses the items to rank and show. Call `choose` in the scoring thread.

    Many items are retrieved and few are shown. Only the shown list is logged, since an item that no user saw
    is no negative. So all retrieved items are scored once to choose the few, and the few are then ranked like
    any list.
    """

    def __init__(self, service: RankService, retriever: Retriever) -> None:
        self.service, self.retriever = service, retriever
        sources = sources_of(service.schema, "nro")
        self._online = {name: source for name, source in sources.items() if source not in STATELESS_FEATURES}

    def choose(
        self, request: RetrieveRequest, shown: int, time_ms: int
    ) -> tuple[RankRequest | None, Retrieved]:
        """Return a list of at most `shown` items to rank, and what was retrieved; None if nothing is left to
        show. Raises RequestError."""
        retrieved = self.retriever.retrieve(request, time_ms)
        slot_N = retrieved.found.slot_K
        if not len(slot_N):
            return None, retrieved
        nro = retrieved.index.catalogue.features(slot_N)
        many = dataclasses.replace(
            request.rank_request,
            item_ids=retrieved.index.catalogue.id_I[slot_N],
            client_item_ids=retrieved.given,
            nro=nro,
            return_ranked=True,
        )
        if len(slot_N) <= shown:
            return many, retrieved
        self._hydrate(many, time_ms)
        return _some(many, self._best(many, shown, time_ms)), retrieved

    def _hydrate(self, many: RankRequest, time_ms: int) -> None:
        """Hydrate once for all retrieved items."""
        missing = {name: source for name, source in self._online.items() if name not in many.nro}
        if self.service.hydrator is None or not missing:
            return
        try:
            fields = self.service.completion.fields(many)
            _, online = self.service.hydrator.read(many.user_id, many.item_ids, time_ms, fields)
        except RoostreamError as error:
            log.debug("hydration failed: %s", error)
            return
        many.nro.update(
            {name: online[source] for name, source in missing.items() if online.get(source) is not None}
        )

    def _best(self, many: RankRequest, shown: int, time_ms: int) -> np.ndarray:
        """Indices of the `shown` best by the ranker, best first."""
        complete = self.service.complete_request(many, time_ms)
        logits_nT = complete.choice.version.score(self.service.rows, complete.columns())
        return np.array(best_order(logits_nT[:, self.service.policy.task])[:shown], np.int64)


def _some(many: RankRequest, at_N: np.ndarray) -> RankRequest:
    """The request with these candidates, in this order."""

    def column(values: Any) -> Any:
        return values[at_N] if isinstance(values, np.ndarray) else [values[i] for i in at_N.tolist()]

    return dataclasses.replace(
        many,
        item_ids=many.item_ids[at_N],
        client_item_ids=[many.client_item_ids[i] for i in at_N.tolist()],
        nro={name: column(values) for name, values in many.nro.items()},
    )
