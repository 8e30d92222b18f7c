"""Proposals by faiss: items in lists by the nearest of some hundred centroids, and a search looks through the nearest lists.

Lists, not a graph (docs/decisions/0055): every dense version moves all vectors, and lists of a hundred thousand items are made in
0.3 CPU seconds where a graph takes nine.
"""

from __future__ import annotations

import math
import types

import numpy as np

from roostream.errors import ConfigError

_TRAINED_ON = 40  # items a centroid
_ROUNDS = 10


def load_faiss() -> types.ModuleType:
    """Raises ConfigError: it isn't installed."""
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            'items_index: expected the package extra retrieval for "ivf", got none; '
            "pip install 'roostream[retrieval]', or say \"exact\""
        ) from None
    return faiss


class InvertedLists:
    """A `Proposer`. Immutable; each call runs in its caller's thread alone."""

    def __init__(self, vector_ID: np.ndarray, probed: float) -> None:
        """`probed`: share of the lists that a search looks through."""
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
