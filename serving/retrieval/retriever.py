"""A request → the items whose vectors are nearest to its own.

1 complete: what the client left out of the request's features is hydrated, as for a rank
2 the request's vector of one task, by the version whose vectors the items have
3 leave out: what isn't among those that the client names, what it excludes or filters, and what the request's histories have,
  if it says so
4 the k best of the others

Letters: T tasks, D width, I items.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from roostream.errors import RoostreamError, WireError
from roostream.models.inputs import build_inputs
from roostream.online.counters import sources_of, stateless_features
from roostream.online.entity_fields import EntityFields, FieldReader
from roostream.schema.schema import Schema
from roostream.wire.block import NO_COLUMNS, main_key, ro_columns
from roostream.wire.lookup import build_lookup
from serving.errors import RequestError
from serving.rank import Hydration
from serving.request import RankRequest, ids_of
from serving.request_batch import RequestColumns, batch_of
from serving.retrieval.attributes import AttributeValue
from serving.retrieval.item_space import ItemSpace
from serving.retrieval.nearest_items import NearestFound
from serving.retrieval.recall_samples import RecallSamples
from serving.scorer import RowReader

log = logging.getLogger("roostream.serving")

_NO_ITEMS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RetrieveRequest:
    """What is asked for, however it was spelt."""

    request: RankRequest  # who asks; without candidates
    k: int
    task: int  # index of the label whose request vector is used
    exclude_N: np.ndarray  # int64
    among_N: np.ndarray | None  # int64; no others than these are found; None = all
    exclude_seen: bool
    wanted: Mapping[str, AttributeValue | Sequence[AttributeValue]]


class Retrieved(NamedTuple):
    """Items of one space, the best first."""

    space: ItemSpace
    found: NearestFound
    degraded: bool  # Redis or the rows were away

    @property
    def given(self) -> list[int | str]:
        """The items' ids as the catalogue has them."""
        return [self.space.catalogue.given_I[slot] for slot in self.found.slot_K.tolist()]


class Retriever:
    """`retrieve` in one thread at a time: Redis' client's. `space` is set by another."""

    def __init__(
        self, schema: Schema, rows: RowReader, hydrator: Hydration | None, samples: RecallSamples
    ) -> None:
        self.schema, self.rows, self.hydrator, self.samples = schema, rows, hydrator, samples
        self.space: ItemSpace | None = None
        self.why_not = "the items' vectors aren't there yet"  # while there is no space
        self.rows_ready: Callable[[], bool] = lambda: True
        self._sources, self._reader = sources_of(schema, "ro"), FieldReader(schema)
        self._seen = _features_of_seen(schema)

    def retrieve(self, asked: RetrieveRequest, time_ms: int) -> Retrieved:
        """The request's `ro` has what was hydrated afterwards.

        Raises:
            RequestError: 400 of a filter or a feature, 413, 503: there are no vectors; 500: the request's isn't finite.
        """
        space = self.space
        if space is None:
            raise RequestError(503, f"nothing can be retrieved: {self.why_not}", retry_after_s=1)
        degraded = self._hydrate(asked.request, time_ms) or not self.rows_ready()
        query_D = self._vector(space, asked, time_ms)
        allowed_I = self._allowed(space, asked)
        found = space.nearest.best(query_D, asked.k, allowed_I)
        self.samples.offer(space, query_D, asked.k, allowed_I, found)
        return Retrieved(space, found, degraded)

    def _hydrate(self, request: RankRequest, time_ms: int) -> bool:
        """Fill what is missing of the request's features; True if Redis was away."""
        missing = {name: source for name, source in self._sources.items() if request.ro.get(name) is None}
        online, away = dict[str, Any](), False
        own, _ = stateless_features(_NO_ITEMS, time_ms)
        own.pop("num_candidates")  # a list has that many, and there is none yet
        if self.hydrator is not None and any(source not in own for source in missing.values()):
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

    def _vector(self, space: ItemSpace, asked: RetrieveRequest, time_ms: int) -> np.ndarray:
        """float32 [D]."""
        try:
            ro = ro_columns(self.schema, asked.request.ro)
        except WireError as error:
            raise RequestError(413 if error.reason == "oversized" else 400, str(error), "$.ro") from None
        batch = batch_of(self.schema, [RequestColumns(ro, NO_COLUMNS, _NO_ITEMS, time_ms)])
        lookup = build_lookup(batch)
        with torch.inference_mode():
            vector_TD = space.model.request_vectors(build_inputs(batch, lookup, self.rows.gather(lookup)))[
                0
            ].numpy()
        query_D: np.ndarray = vector_TD[asked.task]
        if not np.isfinite(query_D).all():
            raise RequestError(
                500, f"model version {space.version.name} gave a vector that is not finite for this request"
            )
        return query_D

    def _allowed(self, space: ItemSpace, asked: RetrieveRequest) -> np.ndarray | None:
        """bool [I]; None = all."""
        excluded_N = asked.exclude_N
        if asked.exclude_seen:
            excluded_N = np.concatenate(
                [excluded_N, *(_ids(asked.request.ro.get(name), name, key) for name, key in self._seen)]
            )
        if not len(excluded_N) and not asked.wanted and asked.among_N is None:
            return None
        allowed_I = space.catalogue.attributes.allowed(asked.wanted)
        if asked.among_N is not None:
            named_I = np.zeros(len(allowed_I), np.bool_)
            named_I[space.catalogue.slots_of(asked.among_N)] = True
            allowed_I &= named_I
        allowed_I[space.catalogue.slots_of(excluded_N)] = False
        return allowed_I


def _features_of_seen(schema: Schema) -> list[tuple[str, str]]:
    """(feature, where its ids are) of the sequences of items: those of the table of the candidate's own id."""
    own = {name for name, source in sources_of(schema, "nro").items() if source == "item_id"}
    tables = {f.table for f in schema.nro if f.name in own}
    return [(f.name, main_key(f)) for f in schema.lists("ro") if f.kind == "sequence" and f.table in tables]


def _ids(value: Any, name: str, key: str) -> np.ndarray:
    """int64; of a sequence that isn't there none."""
    given = [] if value is None else list(value.get(key, value.get("ids", ())))
    return ids_of(given, lambda i: f"$.ro.{name}.{key}[{i}]")
