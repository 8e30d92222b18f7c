"""Builds the items' vectors and keeps them up to date, in one thread, preferably while no request is in
progress.

1 measure recall: repeat a sampled request's search exactly
2 reload the catalogue if its file has changed; an invalid file leaves the current one in use
3 if the served version or the catalogue changed, build all vectors again and switch to them at once
4 update the vectors of items whose rows changed, at a bounded rate, the longest waiting first
5 build a new index when many vectors have moved away from their indexed position

Step 3 takes at most a quarter of the thread's time: versions that come sooner are skipped.

Letters: I items, U unique rows of a stack, L entries of all items, N items, D width.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from roostream.errors import ConfigError
from roostream.models.inputs import build_inputs
from roostream.models.two_tower.models import Retrieval, retrieval_model
from roostream.online.counters import sources_of
from roostream.runtime.clock import Clock
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, StackLookup, build_lookup
from serving.config import RetrievalSettings
from serving.retrieval.catalogue import Catalogue, load_catalogue
from serving.retrieval.nearest_items import InvertedLists, NearestItems, Propose, load_faiss
from serving.retrieval.retriever import RetrievalIndex, Retriever
from serving.scorer import RowReader, Version
from serving.versions.idle_gate import IdleGate

_OF_A_LIST = ("rank", "share")


def encode_items(model: Retrieval, rows: RowReader, items: Batch) -> np.ndarray:
    """Return float32 [N, D] of the batch's candidates. Rows that are not finite give vectors that are not."""
    lookup = build_lookup(items)
    inputs = build_inputs(items, lookup, rows.gather(lookup))
    with torch.inference_mode():
        vector_ND = model.item_vectors(inputs).numpy()
    return np.ascontiguousarray(vector_ND, np.float32)


def check_item_features(schema: Schema, model: Retrieval) -> None:
    """Check that the item tower uses only the item's own features, not the user, the list or the time. Raises
    ConfigError otherwise."""
    online = sources_of(schema, "nro")
    for name in model.item_floats:
        inputs, ops = _made_of(schema, name)
        listed = [op for op in ops if op in _OF_A_LIST]
        if listed:
            raise ConfigError(
                f"item_floats: expected floats of an item's own, got {name!r}, a {listed[0]} within a "
                "list; leave it out"
            )
        stateful = next((i for i in inputs if i in online), "")
        if stateful:
            raise ConfigError(
                f"item_floats: expected floats that a catalogue can have, got {stateful!r}, kept online; "
                "leave it out"
            )
    for f in schema.lists("nro"):
        if online.get(f.name, "item_id") != "item_id":
            raise ConfigError(f"expected id lists that a catalogue can have, got {f.name!r}, kept online")


def _made_of(schema: Schema, name: str) -> tuple[list[str], list[str]]:
    """Return (floats, operations) that an output of the transforms depends on."""
    names, ops = [name], list[str]()
    for t in reversed(schema.transforms):
        if t.output in names:
            ops.append(t.op)
            names.append(t.input)
    return names, ops


CHUNK = 20_000


class RowChunk(NamedTuple):
    """Rows that are read at once."""

    stack: str
    begin: int
    end: int


class _StackSnapshot:
    """The last seen rows of a stack, and the items that use each row."""

    def __init__(self, items: Batch, found: StackLookup) -> None:
        self.table_U, self.id_U = found.table_U, found.id_U
        rows, slots = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for k, name in enumerate(items.nro_lists.keys):
            slot_L = np.repeat(np.arange(items.num_candidates), items.nro_lists.lengths_KN[k])
            for key, index_L in found.index.items():
                if key.partition(".")[0] == name:
                    rows.append(index_L)
                    slots.append(slot_L)
        row_L = np.concatenate(rows)
        self._slot_L = np.concatenate(slots)[np.argsort(row_L, kind="stable")]
        self._start_U1 = np.concatenate([[0], np.cumsum(np.bincount(row_L, minlength=len(self.id_U)))])
        self._last_UD: np.ndarray | None = None

    def part(self, begin: int, end: int) -> StackLookup:
        return StackLookup(self.table_U[begin:end], self.id_U[begin:end], {})

    def take(self, begin: int, row_UD: np.ndarray) -> np.ndarray:
        """Store the current rows from `begin` on; return the items whose rows changed, each once. Returns
        none at first."""
        if self._last_UD is None:
            self._last_UD = np.full((len(self.id_U), row_UD.shape[1]), np.nan, np.float32)
        seen_UD = self._last_UD[begin : begin + len(row_UD)]
        changed_N = begin + np.flatnonzero((seen_UD != row_UD).any(axis=1) & ~np.isnan(seen_UD).all(axis=1))
        seen_UD[:] = row_UD
        spans = [self._slot_L[self._start_U1[row] : self._start_U1[row + 1]] for row in changed_N]
        return np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int64)


class RowChangeDetector:
    """Finds the items whose rows have changed by reading all rows of the catalogue and comparing. Used by one
    thread.

    Comparing, instead of listening to deltas, sees what a reader would get, however the rows arrived (deltas,
    a bootstrap, a repaired bucket). Reading a hundred thousand rows takes tens of milliseconds.
    """

    def __init__(self, items: Batch) -> None:
        found = build_lookup(items)
        self._stacks = {name: _StackSnapshot(items, stack) for name, stack in found.stacks.items()}
        self._empty = {name: StackLookup(s.table_U[:0], s.id_U[:0], {}) for name, s in found.stacks.items()}

    def chunks(self) -> list[RowChunk]:
        """All rows, in chunks."""
        sizes = {name: len(stack.id_U) for name, stack in self._stacks.items()}
        return [RowChunk(name, b, min(b + CHUNK, n)) for name, n in sizes.items() for b in range(0, n, CHUNK)]

    def changed_items(self, rows: RowReader, chunk: RowChunk) -> np.ndarray:
        """int64 [N], ascending: items whose rows differ from the last call."""
        stack = self._stacks[chunk.stack]
        lookup = Lookup({**self._empty, chunk.stack: stack.part(chunk.begin, chunk.end)})
        return stack.take(chunk.begin, rows.gather(lookup)[chunk.stack])


_NEVER = np.inf


class RefreshQueue:
    """Items that wait for a new vector, with the time since when. Pure. An item that is marked twice waits
    since the first time."""

    def __init__(self, num_items: int) -> None:
        self._since_I = np.full(num_items, _NEVER)

    def __len__(self) -> int:
        return int(np.isfinite(self._since_I).sum())

    @property
    def oldest_s(self) -> float | None:
        """When the longest waiting item was marked; None = none waits."""
        oldest = float(self._since_I.min(initial=_NEVER))
        return oldest if oldest < _NEVER else None

    def mark(self, slot_N: np.ndarray, now_s: float) -> None:
        self._since_I[slot_N] = np.minimum(self._since_I[slot_N], now_s)

    def take(self, max_items: int) -> np.ndarray:
        """Remove and return int64 [N], at most `max_items` items, the longest waiting first."""
        waiting_N = np.flatnonzero(np.isfinite(self._since_I))
        taken_N = waiting_N[np.argsort(self._since_I[waiting_N], kind="stable")[:max_items]]
        self._since_I[taken_N] = _NEVER
        return taken_N


log = logging.getLogger("roostream.serving.retrieval")

TURN_S = 0.2
SCAN_INTERVAL_S = 1.0  # between two reads of all rows
AT_ONCE = 256  # items per step: some milliseconds of CPU time
PATIENCE_S = 0.02
REST = 3  # after a build that took t, no other one starts for REST × t


@dataclasses.dataclass(kw_only=True, eq=False)
class _Current:
    """The index in use, and what only this updater needs of it."""

    index: RetrievalIndex
    changed: RowChangeDetector
    due: RefreshQueue
    with_rows: bool  # False: built from initial rows, to be rebuilt once rows are loaded


class ItemVectorUpdater:
    """`run` is a thread; numbers may be read from others."""

    def __init__(
        self,
        schema: Schema,
        settings: RetrievalSettings,
        retriever: Retriever,
        served: Callable[[], Version],
        rows: RowReader,
        idle_gate: IdleGate,
        clock: Clock,
    ) -> None:
        """`served` returns the version that scores most requests. Raises ConfigError: the package of the
        index is not installed."""
        self.schema, self.settings, self.retriever = schema, settings, retriever
        self.served, self.rows, self.idle_gate, self.clock = served, rows, idle_gate, clock
        self.num_built = self.num_refreshed = self.num_refused = 0
        self.build_s: float | None = None  # duration of the last build
        self._propose = index_builder(settings)
        self._catalogue: Catalogue | None = None
        self._stamp: tuple[int, int, int] | None = None  # of the file that was read last
        self._refused: tuple[Version, Catalogue] | None = None
        self._current: _Current | None = None
        self._build_at_s = self._scan_at_s = -math.inf

    @property
    def waiting_for(self) -> str:
        """What the first vectors wait for; "" = they are built, or cannot be."""
        return "" if self._current or self.num_refused else "vectors of items"

    def run(self, stop: threading.Event) -> None:
        """Call `turn` again and again, with a pause between, until `stop` is set."""
        while not stop.is_set():
            self.turn(stop)
            self.clock.sleep(TURN_S, stop)

    def turn(self, stop: threading.Event | None = None) -> None:
        """Perform all steps that are due."""
        self.retriever.samples.measure()
        self._read_catalogue()
        self._follow(stop)
        if self._current is not None and not (stop and stop.is_set()):
            self._refresh(self._current, stop)
            if self._current.index.nearest.needs_rebuild:
                self._current.index.nearest.rebuild_index()

    def metrics(self) -> dict[str, float | None]:
        """For metrics."""
        current, now_s = self._current, self.clock.monotonic_s()
        oldest_s = current.due.oldest_s if current else None
        return {
            "roostream_serving_items": len(current.index.catalogue) if current else 0,
            "roostream_serving_items_due": len(current.due) if current else 0,
            "roostream_serving_items_lag_seconds": None
            if current is None
            else 0.0
            if oldest_s is None
            else now_s - oldest_s,
            "roostream_serving_items_refreshed_total": self.num_refreshed,
            "roostream_serving_items_built_total": self.num_built,
            "roostream_serving_items_build_seconds": self.build_s,
            "roostream_serving_items_refused_total": self.num_refused,
            "roostream_serving_items_recall": self.retriever.samples.recall,
            "roostream_serving_items_recall_samples_total": self.retriever.samples.num_measured,
            "roostream_serving_items_exact_searches_total": current.index.nearest.num_whole if current else 0,
        }

    def _read_catalogue(self) -> None:
        """Step 2."""
        try:
            # A file that can't be opened has no stamp, although `stat` succeeds.
            with Path(self.settings.items).open("rb") as file:
                found = os.fstat(file.fileno())
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
        index = self._current.index if self._current else None
        has_rows = self.retriever.rows_ready()
        fits = index is not None and index.version is version and index.catalogue is catalogue
        if fits and self._current is not None and (self._current.with_rows or not has_rows):
            return
        try:
            current = self._built(version, catalogue, has_rows, stop)
        except ConfigError as error:
            self._refused = (version, catalogue)
            self._refuse(f"model version {version.name}: {error}")
            return
        self.build_s = self.clock.monotonic_s() - now_s
        self._build_at_s = now_s + (1 + REST) * self.build_s
        if current is not None:
            self._current, self.retriever.index = current, current.index
            self.num_built += 1
            log.info("vectors of %d items are built for version %s", len(catalogue), version.name)

    def _built(
        self, version: Version, catalogue: Catalogue, with_rows: bool, stop: threading.Event | None
    ) -> _Current | None:
        """Return None if stopped. Rows are read first, so that no change during the build is missed. An item
        without a finite vector gets 0. Raises ConfigError: the model gives no finite vectors."""
        model = retrieval_model(version.model)
        if model is None:
            raise ConfigError(
                'expected a model that retrieves (kind = "cascade", or "two_tower" with its '
                "stage), got another"
            )
        check_item_features(self.schema, model)
        changed = RowChangeDetector(catalogue.items)
        for chunk in changed.chunks():
            changed.changed_items(self.rows, chunk)
        parts = []
        for begin in range(0, len(catalogue), AT_ONCE):
            if stop is not None and stop.is_set():
                return None
            parts.append(
                self._vectors(model, catalogue, np.arange(begin, min(begin + AT_ONCE, len(catalogue))), stop)
            )
        vector_ID = np.concatenate(parts)
        wrong_M = np.flatnonzero(~np.isfinite(vector_ID).all(axis=1))
        if len(wrong_M):
            message = _not_finite(catalogue, wrong_M)
            if len(wrong_M) == len(catalogue):
                raise ConfigError(message)
            log.warning("items: %s; their vectors are 0", message)
            vector_ID[wrong_M] = 0
        nearest = NearestItems(vector_ID, self._propose)
        index = RetrievalIndex(version=version, model=model, catalogue=catalogue, nearest=nearest)
        return _Current(index=index, changed=changed, due=RefreshQueue(len(catalogue)), with_rows=with_rows)

    def _refresh(self, current: _Current, stop: threading.Event | None) -> None:
        """Step 4. An item whose new vector is not finite keeps its own."""
        now_s = self.clock.monotonic_s()
        if now_s >= self._scan_at_s:
            self._scan_at_s = now_s + SCAN_INTERVAL_S
            for chunk in current.changed.chunks():
                self.idle_gate.wait(PATIENCE_S, stop)
                current.due.mark(current.changed.changed_items(self.rows, chunk), now_s)
        left = math.ceil(self.settings.max_items_refreshed_per_s * TURN_S)
        while left > 0 and len(slot_N := current.due.take(min(left, AT_ONCE))):
            index = current.index
            vector_ND = self._vectors(index.model, index.catalogue, slot_N, stop)
            is_finite_N = np.isfinite(vector_ND).all(axis=1)
            if not is_finite_N.all():
                self._refuse(_not_finite(index.catalogue, slot_N[~is_finite_N]))
            index.nearest.replace(slot_N[is_finite_N], vector_ND[is_finite_N])
            self.num_refreshed += int(is_finite_N.sum())
            left -= len(slot_N)

    def _vectors(
        self, model: Retrieval, catalogue: Catalogue, slot_N: np.ndarray, stop: threading.Event | None
    ) -> np.ndarray:
        self.idle_gate.wait(PATIENCE_S, stop)
        return encode_items(model, self.rows, catalogue.take(slot_N))

    def _refuse(self, message: str) -> None:
        self.num_refused += 1
        log.warning("items: %s%s", message, "; the current vectors stay in use" if self._current else "")
        self.retriever.unavailable_reason = message


def _not_finite(catalogue: Catalogue, slot_M: np.ndarray) -> str:
    """Message that the vectors of these items are not finite."""
    first = catalogue.client_id_I[int(slot_M[0])]
    return f"expected finite vectors of items, got {len(slot_M)} others, the first of item {first}"


def index_builder(settings: RetrievalSettings) -> Propose | None:
    """Return the constructor of the index; None = exact search. Raises ConfigError: its package is not
    installed."""
    if settings.items_index == "exact":
        return None
    load_faiss()
    return lambda vector_ID: InvertedLists(vector_ID, settings.items_probed_share)
