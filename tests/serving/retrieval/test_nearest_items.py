"""Search for the nearest items gives the results of comparing all items, whatever candidates an index
proposes and however vectors change."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from roostream.errors import ConfigError
from serving.config import RetrievalSettings
from serving.retrieval import nearest_items
from serving.retrieval.item_vectors import index_builder
from serving.retrieval.nearest_items import InvertedLists, NearestItems, SearchResult, recall

D = 4


def unit_vectors(n: int, seed: int) -> np.ndarray:
    x_ID = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    return np.ascontiguousarray(x_ID / np.linalg.norm(x_ID, axis=1, keepdims=True))


def brute_force(
    vector_ID: np.ndarray, query_D: np.ndarray, k: int, allowed_I: np.ndarray | None = None
) -> list[int]:
    """Return the nearest items by definition: sorted by product, then by slot."""
    slots = range(len(vector_ID)) if allowed_I is None else np.flatnonzero(allowed_I).tolist()
    return sorted(slots, key=lambda slot: (-float(vector_ID[slot] @ query_D), slot))[:k]


class FakeIndex:
    """An index that proposes given slots, and records how many were requested."""

    def __init__(self, slots: list[int]) -> None:
        self.slots, self.requested = slots, list[int]()

    def propose(self, query_D: np.ndarray, k: int, allowed_I: np.ndarray | None) -> np.ndarray:
        self.requested.append(k)
        return np.array([s for s in self.slots if allowed_I is None or allowed_I[s]][:k], np.int64)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an index from ten items on, and compare sixteen items per step."""
    monkeypatch.setattr(nearest_items, "FEW", 10)
    monkeypatch.setattr(nearest_items, "_CHUNK", 16)


@pytest.mark.parametrize("k", [1, 7, 50, 99])
@pytest.mark.parametrize("allowed", [False, True])
def test_without_an_index_search_is_exact(k: int, allowed: bool) -> None:
    vector_ID, query_D = unit_vectors(50, 0), unit_vectors(1, 1)[0]
    allowed_I = np.arange(50) % 3 == 0 if allowed else None
    found = NearestItems(vector_ID).best(query_D, k, allowed_I)
    assert found.slot_K.tolist() == brute_force(vector_ID, query_D, k, allowed_I)
    np.testing.assert_allclose(found.product_K, vector_ID[found.slot_K] @ query_D, rtol=1e-6)


def test_ties_are_broken_by_slot() -> None:
    vector_ID = np.repeat(unit_vectors(2, 3), 20, axis=0)
    query_D = vector_ID[25]
    assert NearestItems(vector_ID).best(query_D, 3).slot_K.tolist() == [20, 21, 22]


def test_index_candidates_are_rescored_with_current_vectors() -> None:
    vector_ID, query_D = unit_vectors(50, 0), unit_vectors(1, 1)[0]
    best = brute_force(vector_ID, query_D, 4)
    index = FakeIndex([best[3], best[1], best[0], 49, 48])
    found = NearestItems(vector_ID.copy(), lambda _: index).best(query_D, 2)
    assert found.slot_K.tolist() == [best[0], best[1]] and index.requested == [4]


def test_a_moved_item_is_compared_exactly() -> None:
    vector_ID, query_D = unit_vectors(50, 0), unit_vectors(1, 1)[0]
    far = brute_force(vector_ID, query_D, 50)[-1]
    items = NearestItems(vector_ID, lambda _: FakeIndex(list(range(5))))
    items.replace(np.array([far]), query_D[None])
    assert items.best(query_D, 1).slot_K.tolist() == [far]
    assert items.best(query_D, 1, np.arange(50) != far).slot_K.tolist() != [far]


def test_a_vector_that_hardly_moved_stays_in_the_index() -> None:
    vector_ID, query_D = unit_vectors(50, 0), unit_vectors(1, 1)[0]
    items = NearestItems(vector_ID, lambda _: FakeIndex(list(range(6))))
    items.replace(np.array([49]), vector_ID[49:50] * np.float32(0.999))
    assert 49 not in items.best(query_D, 6).slot_K


def test_too_few_index_candidates_cause_an_exact_search_that_is_counted() -> None:
    vector_ID, query_D = unit_vectors(50, 0), unit_vectors(1, 1)[0]
    items = NearestItems(vector_ID, lambda _: FakeIndex([3]))
    assert (
        items.best(query_D, 5).slot_K.tolist() == brute_force(vector_ID, query_D, 5) and items.num_whole == 1
    )


def test_a_selective_filter_bypasses_the_index() -> None:
    vector_ID, query_D, index = unit_vectors(50, 0), unit_vectors(1, 1)[0], FakeIndex([])
    allowed_I = np.arange(50) < 8
    found = NearestItems(vector_ID, lambda _: index).best(query_D, 3, allowed_I)
    assert found.slot_K.tolist() == brute_force(vector_ID, query_D, 3, allowed_I) and index.requested == []


def test_a_rebuild_is_due_after_many_moves() -> None:
    indexed = list[np.ndarray]()

    def propose(vector_ID: np.ndarray) -> FakeIndex:
        indexed.append(vector_ID)
        return FakeIndex(list(range(5)))

    items = NearestItems(unit_vectors(50, 0), propose)
    items.replace(np.arange(20, 22), unit_vectors(2, 5))
    assert not items.needs_rebuild
    items.replace(np.arange(20, 26), unit_vectors(6, 6))
    assert items.needs_rebuild
    items.rebuild_index()
    assert not items.needs_rebuild
    np.testing.assert_array_equal(indexed[1][20:26], unit_vectors(6, 6))


def test_an_empty_filter_result_finds_nothing() -> None:
    found = NearestItems(unit_vectors(50, 0)).best(unit_vectors(1, 1)[0], 5, np.zeros(50, np.bool_))
    assert found.slot_K.tolist() == [] == found.product_K.tolist()


@pytest.mark.parametrize(
    ("found", "exact", "expected"),
    [([1, 2], [2, 1], 1.0), ([1, 9], [1, 2], 0.5), ([], [1], 0.0), ([], [], 1.0)],
)
def test_recall_is_the_share_of_exact_results_found(
    found: list[int], exact: list[int], expected: float
) -> None:
    def result_of(slots: list[int]) -> SearchResult:
        return SearchResult(np.array(slots, np.int64), np.zeros(len(slots), np.float32))

    assert recall(result_of(found), result_of(exact)) == expected


# Tests of the index of faiss, where it is installed, and of the error where it is not.


def clustered(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x_ID = rng.normal(size=(40, 8))[rng.integers(0, 40, n)] + 0.3 * rng.normal(size=(n, 8))
    return np.ascontiguousarray(x_ID / np.linalg.norm(x_ID, axis=1, keepdims=True), np.float32)


@pytest.fixture
def faiss() -> object:
    return pytest.importorskip("faiss", reason="the package extra `retrieval` is not installed")


@pytest.mark.usefixtures("faiss")
def test_recall_is_high_and_complete_with_all_lists() -> None:
    vector_ID, query_ND = clustered(6000, 0), clustered(20, 1)
    partial, complete = (
        NearestItems(vector_ID.copy(), lambda v, p=p: InvertedLists(v, p)) for p in (0.2, 1.0)
    )
    recalls = [
        [recall(items.best(q, 20), items.exact(q, 20)) for q in query_ND] for items in (partial, complete)
    ]
    assert np.mean(recalls[0]) > 0.9 and min(recalls[1]) == 1.0


@pytest.mark.usefixtures("faiss")
def test_filtered_items_are_not_proposed() -> None:
    vector_ID, allowed_I = clustered(6000, 0), np.arange(6000) % 5 == 1
    slots = InvertedLists(vector_ID, 1.0).propose(vector_ID[3], 200, allowed_I)
    assert len(slots) == 200 == len(set(slots.tolist())) and allowed_I[slots].all()


@pytest.mark.usefixtures("faiss")
def test_fewer_than_k_are_returned_if_there_are_no_more() -> None:
    slots = InvertedLists(clustered(50, 0), 1.0).propose(clustered(1, 1)[0], 80, None)
    assert sorted(slots.tolist()) == list(range(50))


def test_a_missing_index_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ConfigError, match=r"items_index: expected the package extra retrieval .*roostream\[retrieval\]"
    ):
        index_builder(RetrievalSettings(items="x", items_index="ivf"))
    assert index_builder(RetrievalSettings(items="x")) is None
