"""The updater of item vectors follows new model versions, catalogues and rows. Retrieval always uses vectors
and weights of the same version."""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from roostream.models.two_tower.models import retrieval_model
from roostream.wire.lookup import Lookup
from serving.retrieval.item_vectors import encode_items
from serving.retrieval.retriever import RetrievalIndex
from serving.scorer import Version
from tests.serving.retrieval_cases import (
    CASCADE,
    NUM_ITEMS,
    TOWERS,
    RetrievalServing,
    make_item,
    make_retrieval,
    make_version,
    write_items,
)
from tests.serving.serving_cases import MODEL, SCHEMA
from tests.serving.serving_fakes import FakeRows


class ChangeableRows(FakeRows):
    """Fake rows in which tests can change the rows of single items."""

    def __init__(self) -> None:
        super().__init__(SCHEMA)
        self.changed: dict[int, float] = {}
        self.num_gathers = 0

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        self.num_gathers += 1
        out = super().gather(lookup)
        for name, stack in lookup.stacks.items():
            for item, value in self.changed.items():
                out[name][stack.id_U == item] = value
        return out


@pytest.fixture
def rows() -> ChangeableRows:
    return ChangeableRows()


@pytest.fixture
def retrieval(tmp_path: Path, rows: ChangeableRows) -> Iterator[RetrievalServing]:
    retrieval = make_retrieval(tmp_path / "home", rows)
    yield retrieval
    retrieval.serving.close()


def index_of(retrieval: RetrievalServing) -> RetrievalIndex:
    index = retrieval.updater.retriever.index
    assert index is not None
    return index


def test_the_first_build_uses_the_served_version(retrieval: RetrievalServing, rows: ChangeableRows) -> None:
    assert retrieval.updater.retriever.index is None and retrieval.updater.waiting_for == "vectors of items"
    retrieval.turn()
    index = index_of(retrieval)
    assert (
        index.version.name == "1-2"
        and len(index.catalogue) == NUM_ITEMS
        and retrieval.updater.waiting_for == ""
    )
    np.testing.assert_allclose(
        index.nearest.vectors(), encode_items(index.model, rows, index.catalogue.items), atol=1e-6
    )


def test_version_and_vectors_change_together(retrieval: RetrievalServing, rows: ChangeableRows) -> None:
    retrieval.turn()
    before = index_of(retrieval)
    retrieval.serve(make_version("1-3", seed=7))
    seen = set[tuple[str, bool]]()
    first = before.nearest.vectors()

    def observe() -> None:
        index = index_of(retrieval)
        seen.add((index.version.name, bool(np.array_equal(index.nearest.vectors(), first))))

    gather = rows.gather
    rows.gather = lambda lookup: (observe(), gather(lookup))[1]  # type: ignore[method-assign,assignment]
    retrieval.turn()
    observe()
    assert seen == {("1-2", True), ("1-3", False)}


def test_an_item_without_a_finite_vector_costs_no_other_item_its_own(
    retrieval: RetrievalServing, rows: ChangeableRows
) -> None:
    rows.changed = {7: float("nan")}  # also a topic of other items
    retrieval.turn()
    index = index_of(retrieval)
    expected_ID = encode_items(index.model, rows, index.catalogue.items)
    is_finite_I = np.isfinite(expected_ID).all(axis=1)
    assert not is_finite_I[index.catalogue.client_id_I.index(7)] and is_finite_I.any()
    expected_ID[~is_finite_I] = 0
    np.testing.assert_allclose(index.nearest.vectors(), expected_ID, atol=1e-6)


def test_an_item_whose_new_vector_is_not_finite_keeps_its_own(
    retrieval: RetrievalServing, rows: ChangeableRows
) -> None:
    retrieval.turn()
    index = index_of(retrieval)
    before_ID = index.nearest.vectors()
    rows.changed = {7: float("nan"), 8: -0.9}
    retrieval.turn(after_s=1.0)
    expected_ID = encode_items(index.model, rows, index.catalogue.items)
    is_finite_I = np.isfinite(expected_ID).all(axis=1)
    assert (expected_ID != before_ID)[is_finite_I].any()
    expected_ID[~is_finite_I] = before_ID[~is_finite_I]
    np.testing.assert_allclose(index.nearest.vectors(), expected_ID, atol=1e-6)


def test_a_version_without_any_finite_vector_is_refused(retrieval: RetrievalServing) -> None:
    retrieval.turn()
    before = index_of(retrieval)
    damaged = make_version("1-3", seed=7)
    model = retrieval_model(damaged.model)
    assert model is not None
    with torch.no_grad():
        model.item.out.bias.fill_(float("nan"))
    retrieval.serve(damaged)
    retrieval.turn()
    assert index_of(retrieval) is before and retrieval.updater.num_refused == 1


def test_items_with_changed_rows_get_new_vectors(retrieval: RetrievalServing, rows: ChangeableRows) -> None:
    retrieval.turn()
    index, before = index_of(retrieval), index_of(retrieval).nearest.vectors()
    rows.changed = {7: 0.9, 11: -0.9}  # 7 is also a topic
    retrieval.turn(after_s=1.0)
    after = index.nearest.vectors()
    np.testing.assert_allclose(after, encode_items(index.model, rows, index.catalogue.items), atol=1e-6)
    moved = {
        index.catalogue.client_id_I[slot] for slot in np.flatnonzero((before != after).any(axis=1)).tolist()
    }
    assert {7, 11} <= moved and index_of(retrieval) is index and 2 not in moved
    assert (
        retrieval.updater.metrics()["roostream_serving_items_due"] == 0 and retrieval.updater.num_built == 1
    )


def test_refreshes_are_limited_and_the_lag_is_reported(tmp_path: Path, rows: ChangeableRows) -> None:
    retrieval = make_retrieval(tmp_path / "home", rows, max_items_refreshed_per_s=50)  # ten items a turn
    retrieval.turn()
    rows.changed = {7: 0.9}
    due, lag = [], []
    for _ in range(4):
        retrieval.turn(after_s=0.5)
        numbers = retrieval.updater.metrics()
        due.append(numbers["roostream_serving_items_due"])
        lag.append(numbers["roostream_serving_items_lag_seconds"])
    retrieval.serving.close()
    assert due == [0, 20, 10, 0]  # the change is noticed a second later: 30 items have topic 7
    assert lag == [0.0, 0.0, 0.5, 0.0]


def test_a_new_catalogue_is_loaded_and_a_bad_one_keeps_the_old(
    retrieval: RetrievalServing, caplog: pytest.LogCaptureFixture
) -> None:
    retrieval.turn()
    write_items(retrieval.items, [make_item(i) for i in range(NUM_ITEMS, NUM_ITEMS + 3)])
    retrieval.turn(after_s=5.0)
    assert (
        index_of(retrieval).catalogue.client_id_I.count(61) == 1 and len(index_of(retrieval).catalogue) == 3
    )
    write_items(retrieval.items, [{"item_id": 1, "no_such": 2}])
    for _ in range(3):
        retrieval.turn(after_s=5.0)
    assert len(index_of(retrieval).catalogue) == 3 and retrieval.updater.num_refused == 1
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "items.jsonl:1: unknown field 'no_such'" in warning and "stay in use" in warning


def test_a_catalogue_that_appears_later_is_loaded(retrieval: RetrievalServing) -> None:
    retrieval.items.rename(retrieval.items.with_suffix(".away"))
    retrieval.turn()
    assert retrieval.updater.retriever.index is None and retrieval.updater.waiting_for == "", (
        "a missing catalogue does not keep the process from becoming ready"
    )
    assert "expected a file of items" in retrieval.updater.retriever.unavailable_reason
    retrieval.items.with_suffix(".away").rename(retrieval.items)
    retrieval.turn(after_s=5.0)
    assert len(index_of(retrieval).catalogue) == NUM_ITEMS


def test_a_catalogue_that_could_not_be_read_is_read_again_although_it_is_the_same_file(
    retrieval: RetrievalServing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> object:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        for _ in range(3):
            retrieval.turn(after_s=5.0)
    assert "Input/output error" in retrieval.updater.retriever.unavailable_reason
    assert caplog.text.count("Input/output error") == retrieval.updater.num_refused == 1
    retrieval.turn(after_s=5.0)
    assert len(index_of(retrieval).catalogue) == NUM_ITEMS


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MODEL, "model version 1-3: expected a model that retrieves"),
        (
            dataclasses.replace(CASCADE, retrieval=dataclasses.replace(TOWERS, item_floats=("clicks",))),
            "kept online",
        ),
    ],
)
def test_a_version_that_cannot_retrieve_is_skipped_and_logged_once(
    retrieval: RetrievalServing, caplog: pytest.LogCaptureFixture, config: object, message: str
) -> None:
    retrieval.turn()
    retrieval.serve(make_version("1-3", config))  # type: ignore[arg-type]
    for _ in range(3):
        retrieval.turn(after_s=5.0)
    assert index_of(retrieval).version.name == "1-2" and retrieval.updater.num_refused == 1
    assert [message in r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [True]
    retrieval.serve(make_version("1-4"))
    retrieval.turn(after_s=5.0)
    assert index_of(retrieval).version.name == "1-4"


def test_versions_that_arrive_during_a_build_are_skipped(
    retrieval: RetrievalServing, rows: ChangeableRows
) -> None:
    gather = rows.gather
    rows.gather = lambda lookup: (retrieval.clock.advance(1.0), gather(lookup))[1]  # type: ignore[method-assign,assignment]
    retrieval.turn()
    took_s = retrieval.updater.build_s
    assert took_s is not None and took_s >= 2
    begin_s, before = retrieval.clock.monotonic_s(), retrieval.updater.num_built
    for number in range(3, 30):
        retrieval.serve(make_version(f"1-{number}"))
        retrieval.turn(after_s=took_s / 2)
    num_builds = retrieval.updater.num_built - before
    assert 2 <= num_builds <= 1 + (retrieval.clock.monotonic_s() - begin_s) / (4 * took_s)
    assert int(index_of(retrieval).version.name.partition("-")[2]) > 29 - 10


def test_a_stop_cancels_a_build(retrieval: RetrievalServing) -> None:
    retrieval.turn()
    retrieval.serve(make_version("1-3"))
    stop = threading.Event()
    stop.set()
    retrieval.clock.advance(5.0)
    retrieval.updater.turn(stop)
    assert index_of(retrieval).version.name == "1-2" and retrieval.updater.num_built == 1


def test_a_rollback_is_followed(retrieval: RetrievalServing) -> None:
    old, new = make_version("1-2"), make_version("1-3", seed=7)
    served: list[Version] = []
    for version in (old, new, old):
        retrieval.serving.service.versions.install(version)
        retrieval.turn(after_s=60.0)
        served.append(index_of(retrieval).version)
    assert served == [old, new, old]


def test_vectors_are_rebuilt_once_rows_are_loaded(retrieval: RetrievalServing) -> None:
    retrieval.updater.retriever.rows_ready = lambda: False
    for _ in range(3):
        retrieval.turn(after_s=5.0)
    before = index_of(retrieval)
    assert retrieval.updater.num_built == 1
    retrieval.updater.retriever.rows_ready = lambda: True
    for _ in range(3):
        retrieval.turn(after_s=5.0)
    assert retrieval.updater.num_built == 2 and index_of(retrieval) is not before
