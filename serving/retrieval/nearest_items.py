"""Finds the items with the largest products with a vector, while vectors are being replaced.

An index proposes candidates and may be some seconds old; the product with the current vector decides. An
index is never modified: an item whose vector moved far from its indexed position is always compared, and a
new index is built when there are many of them. Without an index, or if a filter leaves few items, all items
are compared.

Letters: I items, D width, N some items, K best.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from roostream.errors import ConfigError

MOVED_BELOW = 0.97  # product of an item's current and indexed vector, both of length 1
FEW = 4096  # up to this many items are compared exhaustively
MAX_MOVED_SHARE = 0.05
_WIDER = 2  # proposals per requested item, since some have moved since
_CHUNK = 8192


class Proposer(Protocol):
    """An index over earlier vectors. Used by several threads."""

    def propose(self, query_D: np.ndarray, k: int, allowed_I: np.ndarray | None) -> np.ndarray:
        """int64 [N], N <= k: allowed slots with large products, each once; not necessarily the best ones."""


Propose = Callable[[np.ndarray], Proposer]
"""Vectors float32 [I, D] → an index of them."""


class SearchResult(NamedTuple):
    """Best first; equal products by slot."""

    slot_K: np.ndarray  # int64
    product_K: np.ndarray  # float32


class _Indexed(NamedTuple):
    proposer: Proposer
    vector_ID: np.ndarray  # as indexed
    moved_N: np.ndarray  # slots that have moved


class NearestItems:
    """Call `replace` and `rebuild_index` from one thread, the other methods from any. A search sees each
    vector complete, some before and some
    after a concurrent `replace`.
    """

    def __init__(self, vector_ID: np.ndarray, propose: Propose | None = None) -> None:
        """`vector_ID`: float32, C-contiguous, owned by this object. `propose`: None = compare all items."""
        self._vector_ID, self._propose = vector_ID, propose
        self._lock = threading.Lock()
        self._indexed: _Indexed | None = None
        self.num_whole = 0  # searches that compared all items although there is an index
        self.rebuild_index()

    def __len__(self) -> int:
        return len(self._vector_ID)

    @property
    def needs_rebuild(self) -> bool:
        """Whether enough vectors have moved for a new index to pay off."""
        return self._indexed is not None and len(self._indexed.moved_N) > max(
            FEW // 4, MAX_MOVED_SHARE * len(self)
        )

    def vectors(self) -> np.ndarray:
        """A copy."""
        with self._lock:
            return self._vector_ID.copy()

    def replace(self, slot_N: np.ndarray, vector_ND: np.ndarray) -> None:
        """Replace the vectors of these slots, each given once."""
        with self._lock:
            self._vector_ID[slot_N] = vector_ND
            if self._indexed is not None:
                self._indexed = self._indexed._replace(moved_N=self._moved(self._indexed.vector_ID))

    def rebuild_index(self) -> None:
        """Build a new index of the current vectors; searches use the old one meanwhile."""
        if self._propose is None or len(self) <= FEW:
            return
        vector_ID = self.vectors()
        proposer = self._propose(vector_ID)
        with self._lock:
            self._indexed = _Indexed(proposer, vector_ID, self._moved(vector_ID))

    def best(self, query_D: np.ndarray, k: int, allowed_I: np.ndarray | None = None) -> SearchResult:
        """The K <= k best allowed items, `allowed_I` bool [I] (None = all), as far as the index finds
        them."""
        indexed = self._indexed
        num_allowed = len(self) if allowed_I is None else int(np.count_nonzero(allowed_I))
        if indexed is None or num_allowed <= FEW:
            return self.exact(query_D, k, allowed_I)
        moved_N = indexed.moved_N if allowed_I is None else indexed.moved_N[allowed_I[indexed.moved_N]]
        slot_N = np.union1d(indexed.proposer.propose(query_D, _WIDER * k, allowed_I), moved_N)
        if len(slot_N) < min(k, num_allowed):
            self.num_whole += 1
            return self.exact(query_D, k, allowed_I)
        with self._lock:
            product_N = self._vector_ID[slot_N] @ query_D
        return _best(slot_N, product_N, k)

    def exact(self, query_D: np.ndarray, k: int, allowed_I: np.ndarray | None = None) -> SearchResult:
        """The K <= k best allowed items by exhaustive comparison, in chunks so that `replace` never waits
        long."""
        allowed_N = None if allowed_I is None else np.flatnonzero(allowed_I)
        # So far: the k best and ties.
        slot_N, product_N, threshold = (np.zeros(0, np.int64), np.zeros(0, np.float32), -np.inf)
        for begin in range(0, len(self) if allowed_N is None else len(allowed_N), _CHUNK):
            chosen = slice(begin, begin + _CHUNK) if allowed_N is None else allowed_N[begin : begin + _CHUNK]
            with self._lock:
                product_C = self._vector_ID[chosen] @ query_D
            at = np.flatnonzero(product_C >= threshold)
            slot_N = np.concatenate([slot_N, begin + at if allowed_N is None else allowed_N[begin + at]])
            product_N = np.concatenate([product_N, product_C[at]])
            if len(slot_N) > k:
                threshold = np.partition(product_N, len(slot_N) - k)[len(slot_N) - k]
                slot_N, product_N = slot_N[product_N >= threshold], product_N[product_N >= threshold]
        return _best(slot_N, product_N, k)

    def _moved(self, indexed_ID: np.ndarray) -> np.ndarray:
        """Call with the lock."""
        return np.flatnonzero(np.einsum("id,id->i", indexed_ID, self._vector_ID) < MOVED_BELOW)


def _best(slot_N: np.ndarray, product_N: np.ndarray, k: int) -> SearchResult:
    """`slot_N` is ascending."""
    at = np.arange(len(slot_N))
    if k < len(slot_N):
        at = np.flatnonzero(product_N >= np.partition(product_N, len(slot_N) - k)[len(slot_N) - k])
    at = at[np.argsort(-product_N[at], kind="stable")[:k]]
    return SearchResult(slot_N[at], product_N[at])


def recall(found: SearchResult, truth: SearchResult) -> float:
    """The share of the truly best items that were found."""
    return float(np.isin(truth.slot_K, found.slot_K).mean()) if len(truth.slot_K) else 1.0


_TRAINED_ON = 40  # items per centroid
_ROUNDS = 10


def load_faiss() -> types.ModuleType:
    """The module faiss. Raises ConfigError: faiss is not installed."""
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            'items_index: expected the package extra retrieval for "ivf", got none; '
            "pip install 'roostream[retrieval]', or say \"exact\""
        ) from None
    return faiss


class InvertedLists:
    """A `Proposer`: faiss's IVF index. Items are in lists by their nearest centroid; a search looks through
    the nearest lists. Immutable.

    Lists, not a graph (docs/decisions): every model version moves all vectors, and lists of a hundred
    thousand items are built in 0.3 CPU seconds, a graph in nine.
    """

    def __init__(self, vector_ID: np.ndarray, probed: float) -> None:
        """`probed`: the share of the lists that a search looks through."""
        faiss = self._faiss = load_faiss()
        faiss.omp_set_num_threads(1)
        num_items, width = vector_ID.shape
        num_lists = max(1, min(int(2 * math.sqrt(num_items)), num_items // _TRAINED_ON))
        self.num_probed = max(1, round(probed * num_lists))
        self._index = faiss.IndexIVFFlat(
            faiss.IndexFlatIP(width), width, num_lists, faiss.METRIC_INNER_PRODUCT
        )
        self._index.cp.niter, self._index.cp.min_points_per_centroid = _ROUNDS, 1
        step = max(1, num_items // (_TRAINED_ON * num_lists))
        self._index.train(vector_ID[::step])
        self._index.add(vector_ID)

    def propose(self, query_D: np.ndarray, k: int, allowed_I: np.ndarray | None) -> np.ndarray:
        """See Proposer."""
        faiss = self._faiss
        chosen = {"nprobe": self.num_probed}
        if allowed_I is not None:
            chosen["sel"] = faiss.IDSelectorBitmap(np.packbits(allowed_I, bitorder="little"))
        _, slot_1N = self._index.search(query_D[None], k, params=faiss.SearchParametersIVF(**chosen))
        found: np.ndarray = slot_1N[0][slot_1N[0] >= 0].astype(np.int64)
        return found
