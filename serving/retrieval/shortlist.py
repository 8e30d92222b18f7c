"""What is ranked and shown of what was retrieved.

Of many retrieved items few are shown, and what is logged is what was shown: an item that nobody saw is no negative. So the many
are scored once to choose the few, then the few are ranked as any list: their scores, their list's features and their record are
those of the list that was shown.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np

from roostream.errors import RoostreamError
from roostream.online.counters import STATELESS_FEATURES, sources_of
from serving.explore import best_order
from serving.rank import RankService
from serving.request import RankRequest
from serving.retrieval.retriever import Retrieved, Retriever, RetrieveRequest

log = logging.getLogger("roostream.serving")


class Shortlist:
    """`choose` in the scoring thread."""

    def __init__(self, service: RankService, retriever: Retriever) -> None:
        self.service, self.retriever = service, retriever
        sources = sources_of(service.schema, "nro")
        self._online = {name: source for name, source in sources.items() if source not in STATELESS_FEATURES}

    def choose(
        self, asked: RetrieveRequest, shown: int, time_ms: int
    ) -> tuple[RankRequest | None, Retrieved]:
        """A list of at most `shown` to rank, and what it is from; None where nothing is left to show. Raises RequestError."""
        retrieved = self.retriever.retrieve(asked, time_ms)
        slot_N = retrieved.found.slot_K
        if not len(slot_N):
            return None, retrieved
        nro = retrieved.space.catalogue.features(slot_N)
        many = dataclasses.replace(
            asked.request,
            item_ids=retrieved.space.catalogue.id_I[slot_N],
            given_ids=retrieved.given,
            nro=nro,
            wants_ranked=True,
        )
        if len(slot_N) <= shown:
            return many, retrieved
        self._hydrate(many, time_ms)
        return _some(many, self._best(many, shown, time_ms)), retrieved

    def _hydrate(self, many: RankRequest, time_ms: int) -> None:
        """Once for the many: the few needn't be read again."""
        missing = {name: source for name, source in self._online.items() if name not in many.nro}
        if self.service.hydrator is None or not missing:
            return
        try:
            fields = self.service.filler.fields(many)
            _, online = self.service.hydrator.read(many.user_id, many.item_ids, time_ms, fields)
        except RoostreamError as error:
            log.debug("hydration failed: %s", error)
            return
        many.nro.update(
            {name: online[source] for name, source in missing.items() if online.get(source) is not None}
        )

    def _best(self, many: RankRequest, shown: int, time_ms: int) -> np.ndarray:
        """Places of the `shown` best by the ranker, the best first."""
        complete = self.service.completed(many, time_ms)
        logits_nT = complete.choice.version.score(self.service.rows, complete.columns())
        return np.array(best_order(logits_nT[:, self.service.policy.task])[:shown], np.int64)


def _some(many: RankRequest, at_N: np.ndarray) -> RankRequest:
    """The request with these of its candidates, in that order."""

    def column(values: Any) -> Any:
        return values[at_N] if isinstance(values, np.ndarray) else [values[i] for i in at_N.tolist()]

    return dataclasses.replace(
        many,
        item_ids=many.item_ids[at_N],
        given_ids=[many.given_ids[i] for i in at_N.tolist()],
        nro={name: column(values) for name, values in many.nro.items()},
    )
