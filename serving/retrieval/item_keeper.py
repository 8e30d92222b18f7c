"""Keeps the space that requests are retrieved with: one thread, in moments without requests where there are any.

1 a request's search again, comparing everything → recall
2 the catalogue's file is another than before → read it; one that can't be read leaves the one in use
3 the version that is served is another, or the catalogue → all vectors by that version, then both are put in use as one
4 rows that items are made of have changed → those items' vectors anew, so many a second, the longest waiting first
5 many vectors have moved from where the index has them → a new index

3 takes at most a quarter of the thread's time: a version that comes sooner is passed over for the one after it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from roostream.errors import ConfigError
from roostream.models.two_tower.cascade import retrieval_model
from roostream.models.two_tower.retrieval import Retrieval
from roostream.runtime.clock import Clock
from roostream.schema.schema import Schema
from serving.retrieval.catalogue import Catalogue, load_catalogue
from serving.retrieval.changed_rows import ChangedRows
from serving.retrieval.config import ServesItems
from serving.retrieval.due_items import DueItems
from serving.retrieval.inverted_lists import InvertedLists, load_faiss
from serving.retrieval.item_encoder import check_own, encode_items
from serving.retrieval.item_space import ItemSpace
from serving.retrieval.nearest_items import NearestItems, Propose
from serving.retrieval.retriever import Retriever
from serving.scorer import RowReader, Version
from serving.versions.quiet import Quiet

log = logging.getLogger("roostream.serving.retrieval")

TURN_S = 0.2
LOOK_S = 1.0  # between two looks at all rows
AT_ONCE = 256  # items; some milliseconds of the scoring thread's processor
PATIENCE_S = 0.02
REST = 3  # times as long as a build took, nothing is built whole


@dataclasses.dataclass(kw_only=True, eq=False)
class _Kept:
    """What belongs to a space and only the keeper needs."""

    space: ItemSpace
    changed: ChangedRows
    due: DueItems
    with_rows: bool  # else they were made of initial ones, and all are made again once rows are here


class ItemKeeper:
    """`run` is a thread; numbers may be read from others."""

    def __init__(
        self,
        schema: Schema,
        settings: ServesItems,
        retriever: Retriever,
        served: Callable[[], Version],
        rows: RowReader,
        quiet: Quiet,
        clock: Clock,
    ) -> None:
        """`served`: the version that most requests are scored with. Raises ConfigError: the index can't be had."""
        self.schema, self.settings, self.retriever = schema, settings, retriever
        self.served, self.rows, self.quiet, self.clock = served, rows, quiet, clock
        self.num_built = self.num_refreshed = self.num_refused = 0
        self.build_s: float | None = None  # the last one took
        self._propose = propose_of(settings)
        self._catalogue: Catalogue | None = None
        self._stamp: tuple[int, int, int] | None = None  # of the file that was read last
        self._refused: tuple[Version, Catalogue] | None = None
        self._kept: _Kept | None = None
        self._build_at_s = self._look_at_s = -math.inf

    @property
    def waiting_for(self) -> str:
        """What the first vectors wait for; "" = they are here, or can't be made."""
        return "" if self._kept or self.num_refused else "vectors of items"

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        while not stop.is_set():
            self.turn(stop)
            self.clock.sleep(TURN_S, stop)

    def turn(self, stop: threading.Event | None = None) -> None:
        """All steps, each as far as it is due."""
        self.retriever.samples.measure()
        self._read_catalogue()
        self._follow(stop)
        if self._kept is not None and not (stop and stop.is_set()):
            self._refresh(self._kept, stop)
            if self._kept.space.nearest.wants_index:
                self._kept.space.nearest.index()

    def numbers(self) -> dict[str, float | None]:
        """For metrics."""
        kept, now_s = self._kept, self.clock.monotonic_s()
        oldest_s = kept.due.oldest_s if kept else None
        return {
            "items": len(kept.space.catalogue) if kept else 0,
            "items_due": len(kept.due) if kept else 0,
            "items_lag_s": None if kept is None else 0.0 if oldest_s is None else now_s - oldest_s,
            "items_refreshed": self.num_refreshed,
            "items_built": self.num_built,
            "items_build_s": self.build_s,
            "items_refused": self.num_refused,
            "items_recall": self.retriever.samples.recall,
            "items_recall_samples": self.retriever.samples.num_measured,
            "items_compared_whole": kept.space.nearest.num_whole if kept else 0,
        }

    def _read_catalogue(self) -> None:
        """Step 2."""
        try:
            found = Path(self.settings.items).stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            stamp = (0, 0, 0)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._catalogue = load_catalogue(self.schema, self.settings.items)
        except ConfigError as error:
            self._refuse(str(error))
            return
        log.info("%d items read from %s", len(self._catalogue), self.settings.items)

    def _follow(self, stop: threading.Event | None) -> None:
        """Step 3."""
        catalogue, version, now_s = self._catalogue, self.served(), self.clock.monotonic_s()
        if catalogue is None or now_s < self._build_at_s or self._refused == (version, catalogue):
            return
        space = self._kept.space if self._kept else None
        has_rows = self.retriever.rows_ready()
        fits = space is not None and space.version is version and space.catalogue is catalogue
        if fits and self._kept is not None and (self._kept.with_rows or not has_rows):
            return
        try:
            kept = self._built(version, catalogue, has_rows, stop)
        except ConfigError as error:
            self._refused = (version, catalogue)
            self._refuse(f"model version {version.name}: {error}")
            return
        self.build_s = self.clock.monotonic_s() - now_s
        self._build_at_s = now_s + (1 + REST) * self.build_s
        if kept is not None:
            self._kept, self.retriever.space = kept, kept.space
            self.num_built += 1
            log.info("vectors of %d items by version %s are here", len(catalogue), version.name)

    def _built(
        self, version: Version, catalogue: Catalogue, with_rows: bool, stop: threading.Event | None
    ) -> _Kept | None:
        """None: stopped. Rows are looked at first, so that none that changes meanwhile is missed."""
        model = retrieval_model(version.model)
        if model is None:
            raise ConfigError(
                'expected a model that retrieves (kind = "cascade", or "two_tower" with its stage), got another'
            )
        check_own(self.schema, model)
        changed = ChangedRows(catalogue.items)
        for chunk in changed.chunks():
            changed.look(self.rows, chunk)
        parts = []
        for begin in range(0, len(catalogue), AT_ONCE):
            if stop is not None and stop.is_set():
                return None
            parts.append(
                self._vectors(model, catalogue, np.arange(begin, min(begin + AT_ONCE, len(catalogue))), stop)
            )
        nearest = NearestItems(np.concatenate(parts), self._propose)
        space = ItemSpace(version=version, model=model, catalogue=catalogue, nearest=nearest)
        return _Kept(space=space, changed=changed, due=DueItems(len(catalogue)), with_rows=with_rows)

    def _refresh(self, kept: _Kept, stop: threading.Event | None) -> None:
        """Step 4."""
        now_s = self.clock.monotonic_s()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            for chunk in kept.changed.chunks():
                self.quiet.wait(PATIENCE_S, stop)
                kept.due.mark(kept.changed.look(self.rows, chunk), now_s)
        left = math.ceil(self.settings.items_refreshed * TURN_S)
        while left > 0 and len(slot_N := kept.due.take(min(left, AT_ONCE))):
            try:
                vector_ND = self._vectors(kept.space.model, kept.space.catalogue, slot_N, stop)
            except ConfigError as error:
                self._refuse(str(error))  # those that are here stay
            else:
                kept.space.nearest.replace(slot_N, vector_ND)
                self.num_refreshed += len(slot_N)
            left -= len(slot_N)

    def _vectors(
        self, model: Retrieval, catalogue: Catalogue, slot_N: np.ndarray, stop: threading.Event | None
    ) -> np.ndarray:
        self.quiet.wait(PATIENCE_S, stop)
        return encode_items(model, self.rows, catalogue.take(slot_N))

    def _refuse(self, message: str) -> None:
        self.num_refused += 1
        log.warning("items: %s%s", message, "; what is in use stays" if self._kept else "")
        self.retriever.why_not = message


def propose_of(settings: ServesItems) -> Propose | None:
    """How an index is made; None = every item is compared. Raises ConfigError: what it takes isn't installed."""
    if settings.items_index == "exact":
        return None
    load_faiss()
    return lambda vector_ID: InvertedLists(vector_ID, settings.items_probed)
