"""Proposals by faiss, where it is installed; what is said where it isn't."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from roostream.errors import ConfigError
from serving.config import RetrievalSettings
from serving.retrieval.item_vectors import index_builder
from serving.retrieval.nearest_items import InvertedLists, NearestItems, recall


def clustered(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x_ID = rng.normal(size=(40, 8))[rng.integers(0, 40, n)] + 0.3 * rng.normal(size=(n, 8))
    return np.ascontiguousarray(x_ID / np.linalg.norm(x_ID, axis=1, keepdims=True), np.float32)


@pytest.fixture
def faiss() -> object:
    return pytest.importorskip("faiss", reason="package extra retrieval isn't installed")


@pytest.mark.usefixtures("faiss")
def test_most_of_the_nearest_are_found_and_with_all_lists_every_one() -> None:
    vector_ID, query_ND = clustered(6000, 0), clustered(20, 1)
    some, every = (NearestItems(vector_ID.copy(), lambda v, p=p: InvertedLists(v, p)) for p in (0.2, 1.0))
    recalls = [[recall(items.best(q, 20), items.exact(q, 20)) for q in query_ND] for items in (some, every)]
    assert np.mean(recalls[0]) > 0.9 and min(recalls[1]) == 1.0


@pytest.mark.usefixtures("faiss")
def test_what_is_not_allowed_is_not_proposed() -> None:
    vector_ID, allowed_I = clustered(6000, 0), np.arange(6000) % 5 == 1
    slots = InvertedLists(vector_ID, 1.0).propose(vector_ID[3], 200, allowed_I)
    assert len(slots) == 200 == len(set(slots.tolist())) and allowed_I[slots].all()


@pytest.mark.usefixtures("faiss")
def test_fewer_than_asked_for_are_proposed_where_there_are_no_more() -> None:
    slots = InvertedLists(clustered(50, 0), 1.0).propose(clustered(1, 1)[0], 80, None)
    assert sorted(slots.tolist()) == list(range(50))


def test_without_the_package_the_setting_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ConfigError, match=r"items_index: expected the package extra retrieval .*roostream\[retrieval\]"
    ):
        index_builder(RetrievalSettings(items="x", items_index="ivf"))
    assert index_builder(RetrievalSettings(items="x")) is None
