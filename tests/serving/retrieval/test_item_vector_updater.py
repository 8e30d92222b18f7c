"""Version, catalogue and rows move on; what requests are retrieved with is always of one version, and
follows."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

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


class Rows(FakeRows):
    """Of one item others, if told so; `on_gather` is called with each."""

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
def rows() -> Rows:
    return Rows()


@pytest.fixture
def kept(tmp_path: Path, rows: Rows) -> Iterator[RetrievalServing]:
    made = make_retrieval(tmp_path / "home", rows)
    yield made
    made.serving.close()


def space_of(kept: RetrievalServing) -> RetrievalIndex:
    space = kept.updater.retriever.index
    assert space is not None
    return space


def test_the_first_build_uses_the_served_version(kept: RetrievalServing, rows: Rows) -> None:
    assert kept.updater.retriever.index is None and kept.updater.waiting_for == "vectors of items"
    kept.turn()
    space = space_of(kept)
    assert (
        space.version.name == "1-2" and len(space.catalogue) == NUM_ITEMS and kept.updater.waiting_for == ""
    )
    np.testing.assert_allclose(
        space.nearest.vectors(), encode_items(space.model, rows, space.catalogue.items), atol=1e-6
    )


def test_version_and_vectors_change_together(kept: RetrievalServing, rows: Rows) -> None:
    kept.turn()
    before = space_of(kept)
    kept.serve(make_version("1-3", seed=7))
    seen = set[tuple[str, bool]]()
    first = before.nearest.vectors()

    def look() -> None:
        space = space_of(kept)
        seen.add((space.version.name, bool(np.array_equal(space.nearest.vectors(), first))))

    gather = rows.gather
    rows.gather = lambda lookup: (look(), gather(lookup))[1]  # type: ignore[method-assign,assignment]
    kept.turn()
    look()
    assert seen == {("1-2", True), ("1-3", False)}


def test_items_with_changed_rows_get_new_vectors(kept: RetrievalServing, rows: Rows) -> None:
    kept.turn()
    space, before = space_of(kept), space_of(kept).nearest.vectors()
    rows.changed = {7: 0.9, 11: -0.9}  # 7 is a topic too
    kept.turn(after_s=1.0)
    after = space.nearest.vectors()
    np.testing.assert_allclose(after, encode_items(space.model, rows, space.catalogue.items), atol=1e-6)
    moved = {
        space.catalogue.client_id_I[slot] for slot in np.flatnonzero((before != after).any(axis=1)).tolist()
    }
    assert {7, 11} <= moved and space_of(kept) is space and 2 not in moved
    assert kept.updater.metrics()["roostream_serving_items_due"] == 0 and kept.updater.num_built == 1


def test_refreshes_are_limited_and_the_lag_is_reported(tmp_path: Path, rows: Rows) -> None:
    kept = make_retrieval(tmp_path / "home", rows, max_items_refreshed_per_s=50)  # ten a turn
    kept.turn()
    rows.changed = {7: 0.9}
    due, lag = [], []
    for _ in range(4):
        kept.turn(after_s=0.5)
        numbers = kept.updater.metrics()
        due.append(numbers["roostream_serving_items_due"])
        lag.append(numbers["roostream_serving_items_lag_seconds"])
    kept.serving.close()
    assert due == [0, 20, 10, 0]  # seen a second after the last look: the 30 items that have topic 7
    assert lag == [0.0, 0.0, 0.5, 0.0]


def test_a_new_catalogue_is_loaded_and_a_bad_one_keeps_the_old(
    kept: RetrievalServing, caplog: pytest.LogCaptureFixture
) -> None:
    kept.turn()
    write_items(kept.items, [make_item(i) for i in range(NUM_ITEMS, NUM_ITEMS + 3)])
    kept.turn(after_s=5.0)
    assert space_of(kept).catalogue.client_id_I.count(61) == 1 and len(space_of(kept).catalogue) == 3
    write_items(kept.items, [{"item_id": 1, "no_such": 2}])
    for _ in range(3):
        kept.turn(after_s=5.0)
    assert len(space_of(kept).catalogue) == 3 and kept.updater.num_refused == 1
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "items.jsonl:1: unknown field 'no_such'" in told and "stay in use" in told


def test_a_catalogue_that_appears_later_is_loaded(kept: RetrievalServing) -> None:
    kept.items.rename(kept.items.with_suffix(".away"))
    kept.turn()
    assert kept.updater.retriever.index is None and kept.updater.waiting_for == "", (
        "a process isn't held back for ever"
    )
    assert "expected a file of items" in kept.updater.retriever.unavailable_reason
    kept.items.with_suffix(".away").rename(kept.items)
    kept.turn(after_s=5.0)
    assert len(space_of(kept).catalogue) == NUM_ITEMS


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
    kept: RetrievalServing, caplog: pytest.LogCaptureFixture, config: object, message: str
) -> None:
    kept.turn()
    kept.serve(make_version("1-3", config))  # type: ignore[arg-type]
    for _ in range(3):
        kept.turn(after_s=5.0)
    assert space_of(kept).version.name == "1-2" and kept.updater.num_refused == 1
    assert [message in r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [True]
    kept.serve(make_version("1-4"))
    kept.turn(after_s=5.0)
    assert space_of(kept).version.name == "1-4"


def test_versions_that_arrive_during_a_build_are_skipped(kept: RetrievalServing, rows: Rows) -> None:
    gather = rows.gather
    rows.gather = lambda lookup: (kept.clock.advance(1.0), gather(lookup))[1]  # type: ignore[method-assign,assignment]
    kept.turn()
    took_s = kept.updater.build_s
    assert took_s is not None and took_s >= 2
    begin_s, before = kept.clock.monotonic_s(), kept.updater.num_built
    for number in range(3, 30):
        kept.serve(make_version(f"1-{number}"))
        kept.turn(after_s=took_s / 2)
    serving = kept.updater.num_built - before
    assert 2 <= serving <= 1 + (kept.clock.monotonic_s() - begin_s) / (4 * took_s)
    assert int(space_of(kept).version.name.partition("-")[2]) > 29 - 10


def test_a_stop_cancels_a_build(kept: RetrievalServing) -> None:
    kept.turn()
    kept.serve(make_version("1-3"))
    stop = threading.Event()
    stop.set()
    kept.clock.advance(5.0)
    kept.updater.turn(stop)
    assert space_of(kept).version.name == "1-2" and kept.updater.num_built == 1


def test_a_rollback_is_followed(kept: RetrievalServing) -> None:
    old, new = make_version("1-2"), make_version("1-3", seed=7)
    served: list[Version] = []
    for version in (old, new, old):
        kept.serving.service.versions.install(version)
        kept.turn(after_s=60.0)
        served.append(space_of(kept).version)
    assert served == [old, new, old]


def test_vectors_are_rebuilt_once_rows_are_loaded(kept: RetrievalServing) -> None:
    kept.updater.retriever.rows_ready = lambda: False
    for _ in range(3):
        kept.turn(after_s=5.0)
    before = space_of(kept)
    assert kept.updater.num_built == 1
    kept.updater.retriever.rows_ready = lambda: True
    for _ in range(3):
        kept.turn(after_s=5.0)
    assert kept.updater.num_built == 2 and space_of(kept) is not before
