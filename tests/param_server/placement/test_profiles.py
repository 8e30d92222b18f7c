"""Profiles of tables: what is counted, how it is stored, and how a plan uses it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_server.placement.profiles import (
    FOLDER,
    WINDOW_BATCHES,
    Profiler,
    ProfileRecorder,
    TableProfile,
    planned_tables,
    read_profiles,
    save_profiles,
)
from roostream.errors import UnavailableError
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import FakeClock
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from tests.trainer import samples
from tests.trainer.memory_store import MemoryStore

NOW = 1_700_000_000_000


def no_other_schema(fingerprint: int) -> Schema | None:
    """The decoder's lookup of other schemas: all samples here use the current one."""
    return None


def make_profiler(batches: int = 5, size: int = 8) -> Profiler:
    profiler = Profiler(1.0)
    for n in range(batches):
        numbers = list(range(1 + n * size, 1 + (n + 1) * size))
        batch = Decoder(samples.schema(), no_other_schema).decode(samples.records(numbers))[0]
        profiler.count(batch, build_lookup(batch))
    return profiler


def test_requests_features_are_counted_by_request_and_items_by_candidate() -> None:
    user, item = (make_profiler().profiles[name] for name in ("user", "item"))
    assert (user.batches, user.examples, user.ids, user.uniques) == (5, 40, 40, 40)
    assert (item.examples, item.ids) == (120, 120) and item.uniques <= 5 * samples.NUM_ITEMS
    assert (user.impression_ids, item.impression_ids) == (120, 120), "each request has three candidates"
    assert (user.examples_of(10), item.examples_of(10), user.expansion) == (10, 30, 3.0)
    assert item.valency == 1.0 and item.max_len == 1 and item.table == "item" and item.dim == 4


def test_unique_ids_of_another_batch_size_follow_a_power_law() -> None:
    item, user = (make_profiler().profiles[name] for name in ("item", "user"))
    assert item.uniques_of(24) == pytest.approx(item.uniques / 5), (
        "the estimate must be exact at the counted batch size"
    )
    assert user.uniques_of(1000) == pytest.approx(1000), "ids that were all different must stay all different"
    assert item.uniques_of(6) < item.uniques_of(24) < item.uniques_of(600) < 600


def test_the_predicted_number_of_unique_ids_is_close_for_a_zipf_distribution() -> None:
    random = np.random.default_rng(0)

    def uniques(size: int) -> float:
        return float(
            np.mean([len(np.unique(np.minimum(random.zipf(1.3, size), 100_000))) for _ in range(40)])
        )

    make_profiler = {"batches": 1, "examples": 256, "ids": 256, "uniques": round(uniques(256)), "max_len": 1}
    half = {"half_ids": 128, "half_uniques": round(uniques(128))}
    profile = TableProfile(feature="f", table="t", dim=8, **make_profiler, **half)
    assert profile.uniques_of(128) == pytest.approx(uniques(128), rel=0.1)
    assert profile.uniques_of(512) == pytest.approx(uniques(512), rel=0.1)


def test_the_same_steps_are_counted_in_every_run_and_their_share_is_about_right() -> None:
    first, second = ([Profiler(0.03, seed).is_counted(step) for step in range(20_000)] for seed in (1, 1))
    assert first == second and 450 < sum(first) < 750
    assert first != [Profiler(0.03, 2).is_counted(step) for step in range(20_000)]
    assert not any(Profiler(0.0).is_counted(step) for step in range(100))


def test_new_counts_are_added_fully_and_old_ones_decayed() -> None:
    before = {"batches": 4, "examples": 80, "ids": 100, "uniques": 48, "max_len": 3, "squares": 600.0}
    added = {"batches": 2, "examples": 40, "ids": 60, "uniques": 50, "max_len": 2, "squares": 1300.0}
    merged = TableProfile(feature="f", table="t", dim=8, half_ids=50, half_uniques=30, **before)  # type: ignore[arg-type]
    merged = merged.merged(
        TableProfile(feature="f", table="t", dim=8, half_ids=30, half_uniques=28, **added), 0.5
    )  # type: ignore[arg-type]
    expected = {"batches": 4, "examples": 80, "ids": 110, "uniques": 74, "max_len": 3, "squares": 1600.0}
    assert merged.plain() == {
        "feature": "f",
        "table": "t",
        "dim": 8,
        "half_ids": 55,
        "half_uniques": 43,
        "requests": 0,
        "impression_ids": 0,
        **expected,
    }
    assert merged.valency == 110 / 80


SPARSE = {"feature": "f", "table": "t", "dim": 8, "max_len": 1, "batches": 4, "examples": 40, "requests": 40}


def test_a_feature_that_few_requests_have_can_be_planned() -> None:
    """Decayed counts are rounded, so a few may become none."""
    before = TableProfile(**SPARSE, ids=10, uniques=4, half_ids=5, half_uniques=2)  # type: ignore[arg-type]
    added = TableProfile(**SPARSE, ids=1, uniques=1)  # type: ignore[arg-type]
    merged = before.merged(added, keep=0.2)
    assert (merged.half_ids, merged.half_uniques, merged.ids, merged.uniques) == (1, 0, 3, 2)
    assert merged.uniques_of(24) == pytest.approx(1.0), "two rows in 48 requests"


def test_batches_without_a_feature_do_not_hide_how_often_its_ids_are_repeated() -> None:
    with_ids = TableProfile(**SPARSE, ids=10, uniques=4, impression_ids=50)  # type: ignore[arg-type]
    without = TableProfile(**SPARSE, ids=0, uniques=0)  # type: ignore[arg-type]
    assert with_ids.merged(without).expansion == without.merged(with_ids).expansion == 5.0
    uncounted = dataclasses.replace(with_ids, impression_ids=0)
    assert with_ids.merged(uncounted).expansion == 1.0


def test_new_counts_are_merged_into_decayed_saved_ones() -> None:
    store, schema = MemoryStore(), samples.schema()
    save_profiles(store, make_profiler().profiles, NOW)
    save_profiles(store, make_profiler().profiles, NOW + 1)
    found = read_profiles(store, schema)
    assert found["user"].profile.batches == 10 and found["user"].time_ms == NOW + 1
    for _ in range(60):  # commits in quick succession drop no counts before the window is full
        save_profiles(store, make_profiler().profiles, NOW + 2)
    assert read_profiles(store, schema)["user"].profile.batches == WINDOW_BATCHES
    assert read_profiles(store, schema)["user"].profile.examples == pytest.approx(
        8 * WINDOW_BATCHES, rel=0.01
    )
    assert {name.split("/")[0] for name in store.list(FOLDER)} == {FOLDER}


def test_counts_are_saved_once_and_lost_without_a_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, profiler = MemoryStore(), make_profiler()
    recorder = ProfileRecorder(profiler, store, FakeClock(NOW))
    recorder.save()
    recorder.save()
    assert read_profiles(store, samples.schema())["user"].profile.examples == 40, (
        "a second save without new counts must add nothing"
    )
    batch = Decoder(samples.schema(), no_other_schema).decode(samples.records([1, 2]))[0]
    recorder.observe(1, batch, build_lookup(batch))
    store.put = lambda name, data: (_ for _ in ()).throw(UnavailableError("away"))  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        recorder.save()
    assert "profiles of 2 features are lost: away" in caplog.text and profiler.profiles == {}


class InterruptedProfiles(dict[str, TableProfile]):
    """Profiles of a loop's thread that another thread saves while a batch is counted."""

    def __init__(self, known: dict[str, TableProfile], save: Callable[[], None]) -> None:
        super().__init__(known)
        self.saver = threading.Thread(target=save)

    def get(self, feature: str, default: Any = None) -> Any:
        found = super().get(feature, default)
        if not self.saver.ident:
            self.saver.start()
            self.saver.join(0.5)
        return found


def test_a_batch_that_is_counted_during_a_commit_is_counted_once() -> None:
    store, profiler = MemoryStore(), make_profiler()
    recorder = ProfileRecorder(profiler, store, FakeClock(NOW))
    profiler.profiles = interrupted = InterruptedProfiles(profiler.profiles, recorder.save)
    batch = Decoder(samples.schema(), no_other_schema).decode(samples.records([1, 2]))[0]
    recorder.observe(1, batch, build_lookup(batch))
    interrupted.saver.join(20)
    recorder.save()
    saved = read_profiles(store, samples.schema())
    assert [saved[name].profile.requests for name in ("user", "item")] == [42, 42]


def test_profiles_of_features_and_tables_with_the_longest_names_are_stored(tmp_path: Path) -> None:
    """A worker saves profiles while it writes its part of a commit: an error would abort each commit."""
    table, features = "t" * 64, ("f" * 64, "f" * 63 + "g")
    lists = [{"name": name, "kind": "ids", "table": table} for name in features]
    schema = schema_from_dict({**samples.TABLES, "tables": {table: {"dim": 4}}, "ro": lists, "nro": []})
    counts = {"dim": 4, "batches": 9, "ids": 9, "uniques": 9, "max_len": 1}
    profiles = {
        name: TableProfile(feature=name, table=table, examples=n, **counts) for n, name in enumerate(features)
    }
    store = FileStore(tmp_path)
    save_profiles(store, profiles, NOW)
    assert {name: found.profile for name, found in read_profiles(store, schema).items()} == profiles


def test_a_damaged_profile_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    save_profiles(store, make_profiler().profiles, NOW)
    (name,) = [name for name in store.list(FOLDER) if "item" in name]
    store.put(name, store.get(name).replace(b'"ids": 120', b'"ids": 121'))
    with caplog.at_level(logging.WARNING):
        assert set(read_profiles(store, samples.schema())) == {"user"}
    assert "it is damaged" in caplog.text


def test_missing_small_or_old_counts_are_ignored() -> None:
    store, schema = MemoryStore(), samples.schema()
    save_profiles(
        store, {"item": make_profiler().profiles["item"], "user": make_profiler(2).profiles["user"]}, NOW
    )
    known = read_profiles(store, schema)
    tables, reasons = planned_tables(schema, known, batch=8, now_ms=NOW, rows={"item": 7})
    by_name = {table.name: table for table in tables}
    assert by_name["user"].uniques is None and reasons == ["user (user: fewer than 4 batches)"]
    assert (
        by_name["item"].ids == 24
        and by_name["item"].uniques is not None
        and by_name["item"].rows == 7
        and by_name["item"].row_wise_rule
    )
    _, reasons = planned_tables(schema, known, batch=24, now_ms=NOW + 8 * 86_400_000, rows={})
    assert "item (item: too old)" in reasons
    _, reasons = planned_tables(schema, {}, batch=24, now_ms=NOW, rows={})
    assert "item (item: never counted)" in reasons


def test_the_profile_of_a_widened_table_starts_anew() -> None:
    store = MemoryStore()
    save_profiles(store, {"item": dataclasses.replace(make_profiler().profiles["item"], dim=2)}, NOW)
    assert "item" not in read_profiles(store, samples.schema())
