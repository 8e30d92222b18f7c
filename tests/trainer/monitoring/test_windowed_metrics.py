"""Metrics by windows of event time and by slices: each candidate is counted once, in the right cells."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from roostream.errors import ConfigError
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import TEXT, Batch
from tests.models.model_cases import make_batch, make_schema
from trainer.monitoring.progressive_metrics import Metrics, ScoredBatch
from trainer.monitoring.slices import build_slicers
from trainer.monitoring.windowed_metrics import (
    MAX_VALUES,
    STEPS,
    CandidateLosses,
    MetricCells,
    WindowedMetrics,
    merge_cell_reports,
    without_scores,
)

HOUR_MS = 3_600_000
T0 = 1_700_000_000_000 // HOUR_MS * HOUR_MS


def batch_of(seed: int = 0, *, close_ms: int = T0, requests: int = 8, partition: int = 0) -> Batch:
    batch = make_batch(make_schema("everything"), [5] * requests, seed)
    return dataclasses.replace(
        batch,
        close_ms_R=np.full(requests, close_ms),
        partition_R=np.full(requests, partition, dtype=np.int32),
        weight_BT=np.ones_like(batch.weight_BT),
    )


def count(
    windowed: WindowedMetrics, batch: Batch, watermark_ms: int | None = None, shadow: float | None = None
) -> None:
    score_BT = np.full(batch.label_BT.shape, 0.3, dtype=np.float32)
    at_B = batch.partition_R[batch.request_index_B].astype(np.int64)
    shadow_BT = None if shadow is None else np.full_like(score_BT, shadow)
    windowed.count(
        batch,
        at_B,
        score_BT,
        int(batch.close_ms_R.max()) if watermark_ms is None else watermark_ms,
        shadow_BT,
    )


def make_metrics(*names: str) -> WindowedMetrics:
    schema = make_schema("everything")
    return WindowedMetrics(schema.tasks, build_slicers(schema, names))


def candidates_by_window(windowed: WindowedMetrics, watermark_ms: int) -> dict[str, int]:
    windows = windowed.report(watermark_ms)["windows"]
    return {window: next(iter(tasks.values()))["candidates"] for window, tasks in windows.items()}


def test_a_window_forgets_old_candidates_and_all_keeps_them() -> None:
    windowed = make_metrics()
    for hour in range(30):
        count(windowed, batch_of(hour, close_ms=T0 + hour * HOUR_MS))
    found = candidates_by_window(windowed, T0 + 29 * HOUR_MS)
    assert (found["1h"], found["all"]) == (2 * 40, 30 * 40) and 24 * 40 < found["1d"] <= 30 * 40
    assert candidates_by_window(windowed, T0 + 60 * HOUR_MS) == {"all": 1200}, (
        "no candidate arrived in the last day"
    )
    assert len(windowed.cells.keys) <= 3 * 6, "old buckets must be deleted"


def test_candidates_far_from_the_watermark_are_in_no_window() -> None:
    windowed = make_metrics()
    count(windowed, batch_of(close_ms=T0 + 2 * HOUR_MS), watermark_ms=T0)
    count(windowed, batch_of(close_ms=T0 - 50 * HOUR_MS), watermark_ms=T0)
    assert candidates_by_window(windowed, T0) == {"all": 80, "1d": 40}, (
        "two hours ahead is within the current part of the day window"
    )


def test_a_rollback_restores_counts_and_a_partition_can_move() -> None:
    windowed, other = make_metrics("surface"), make_metrics("surface")
    count(windowed, batch_of(1, partition=0))
    count(windowed, batch_of(2, partition=1))
    cut = {place: windowed.state(place) for place in (0, 1)}
    before = windowed.report(T0)
    count(windowed, batch_of(3, partition=1))
    assert windowed.report(T0) != before
    windowed.load(1, cut[1])
    assert windowed.report(T0) == before, "records after the rollback point must not stay counted"
    other.load(1, cut[1])
    other.load(0, cut[0])
    assert other.report(T0) == before


def test_slices_count_each_value() -> None:
    windowed, batch = make_metrics("surface"), batch_of(requests=9)
    count(windowed, batch)
    found = windowed.report(T0)["slices"]["surface"]
    assert set(found) == {"front", "mail", "missing"}
    task = batch.schema.tasks[0]
    front_B = (batch.surface_R == b"front")[batch.request_index_B]
    for window in ("1h", "all"):
        assert found["front"][window][task]["candidates"] == front_B.sum()
        assert found["front"][window][task]["base_rate"] == pytest.approx(
            (batch.label_BT[front_B, 0] > 0).mean()
        )


def test_values_beyond_the_limit_are_other() -> None:
    windowed = make_metrics("surface")
    for n in range(5):
        texts = np.array([f"s{n}-{r}".encode() for r in range(8)], dtype=TEXT)
        count(windowed, dataclasses.replace(batch_of(n), surface_R=texts))
    found = windowed.report(T0)["slices"]["surface"]
    assert (
        len(found) == MAX_VALUES + 1 and found["other"]["all"]["click"]["candidates"] == (40 - MAX_VALUES) * 5
    )


def test_the_shadow_and_the_model_are_counted_on_the_same_candidates() -> None:
    windowed = make_metrics()
    count(windowed, batch_of(1), shadow=0.9)
    count(windowed, batch_of(2))
    found = windowed.report(T0)["shadow"]
    task = windowed.tasks[0]
    assert found["shadow"]["all"][task]["candidates"] == found["live"]["all"][task]["candidates"] == 40
    assert found["shadow"]["1h"][task]["ne"] > found["live"]["1h"][task]["ne"]
    assert found["live"]["all"][task]["calibration"] == pytest.approx(
        found["shadow"]["all"][task]["calibration"] / 3
    )


FEATURES = {
    "tables": {"t": {"dim": 2}},
    "ro": [{"name": "hour", "kind": "float"}, {"name": "country", "kind": "ids", "table": "t"}],
    "nro": [
        {"name": "age", "kind": "float", "online": "age_s"},
        {"name": "topic", "kind": "ids", "table": "t"},
    ],
    "label": [{"name": "click", "action": "click", "fold": "any"}],
}


@pytest.mark.parametrize("transforms", [[], [{"output": "age", "input": "age", "op": "log1p"}]])
def test_values_of_ages_floats_and_ids_are_named(transforms: list[dict[str, str]]) -> None:
    schema = schema_from_dict({**FEATURES, "transform": transforms})
    batch = make_batch(schema, [6])
    ages = np.array([[30.0], [700.0], [4000.0], [80_000.0], [1e6], [1.0]], dtype=np.float32)
    present = np.array([[True]] * 5 + [[False]])
    changed = dataclasses.replace(
        batch,
        nro_float_BF=np.log1p(ages) if transforms else ages,
        nro_present_BF=present,
        ro_float_RF=np.array([[-3.0]], dtype=np.float32),
        ro_present_RF=np.ones((1, 1), dtype=np.bool_),
    )
    number_B, names = build_slicers(schema, ["candidate_age"])[0].values(changed)
    assert [names[n] for n in number_B] == ["<10m", "<1h", "<6h", "<1d", ">=7d", "missing"]
    number_B, names = build_slicers(schema, ["hour"])[0].values(changed)
    assert [names[n] for n in number_B] == ["-2.."] * 6
    for name, lists, rows in (
        ("topic", batch.nro_lists, np.arange(6)),
        ("country", batch.ro_lists, np.zeros(6, dtype=int)),
    ):
        number_B, names = build_slicers(schema, [name])[0].values(changed)
        value, length = lists.values_of(name), lists.lengths_KN[0]
        starts = np.cumsum(length) - length
        first = [str(value[starts[r]]) if length[r] else "missing" for r in rows]
        assert [names[n] for n in number_B] == first


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["surfac"], "surface"),
        (["surface", "surface"], "at most 8 different"),
        ([f"f{n}" for n in range(9)], "at most 8"),
    ],
)
def test_an_unknown_or_repeated_slice_is_rejected(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_slicers(make_schema("everything"), names)


def test_candidate_age_needs_a_feature_that_has_it() -> None:
    with pytest.raises(ConfigError, match="the schema has none"):
        build_slicers(schema_from_dict({**FEATURES, "nro": FEATURES["nro"][1:]}), ["candidate_age"])  # type: ignore[index]
    clipped = [{"output": "age", "input": "age", "op": "clip"}]
    with pytest.raises(ConfigError, match="give the transform an output"):
        build_slicers(schema_from_dict({**FEATURES, "transform": clipped}), ["candidate_age"])


# Cells equal the exact metrics and are restored from the state in a commit


def random_outcomes(n: int, tasks: int = 2, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw (scores, labels, weights). A label is 1 with the probability of its score."""
    random = np.random.default_rng(seed)
    score_BT = random.beta(1, 6, (n, tasks)).astype(np.float32)
    label_BT = (random.random((n, tasks)) < score_BT).astype(np.float32)
    return score_BT, label_BT, random.choice([0.0, 1.0, 2.0], (n, tasks)).astype(np.float32)


def test_a_cell_agrees_with_the_exact_metrics() -> None:
    score_BT, label_BT, weight_BT = random_outcomes(5000)
    exact = Metrics(("click", "buy"))
    zeros_B, zeros_R = np.zeros(5000, dtype=np.int64), np.zeros(1, dtype=np.int64)
    exact.update(ScoredBatch(score_BT, label_BT, weight_BT, zeros_B, zeros_R))
    cells = MetricCells(("click", "buy"))
    cell = cells.number_of(("a",))
    losses = CandidateLosses(score_BT, label_BT, weight_BT, np.full_like(score_BT, 0.5))
    cells.add(np.full(5000, cell), losses, np.arange(5000))
    report = cells.report([("a",), ("unknown",)])
    for task, expected in exact.report()["tasks"].items():  # type: ignore[attr-defined]
        for name in ("candidates", "base_rate", "ne", "calibration"):
            assert report[task][name] == pytest.approx(expected[name], rel=1e-6), (task, name)
        assert report[task]["auc"] == pytest.approx(expected["auc"], abs=4e-3)


def test_ne_online_compares_with_the_base_rate_known_before() -> None:
    cells, n = MetricCells(("click",)), 4000
    label_BT = (np.arange(n) % 4 == 0).astype(np.float32)[:, None]
    weight_BT = np.ones((n, 1), dtype=np.float32)
    for start in range(0, n, 50):
        rows = slice(start, start + 50)
        base_BT = np.broadcast_to(cells.rates_T(("a",)), (50, 1))
        losses = CandidateLosses(base_BT, label_BT[rows], weight_BT[rows], base_BT)
        cells.add(np.full(50, cells.number_of(("a",))), losses, np.arange(50))
    report = cells.report([("a",)])["click"]
    assert report["ne_online"] == pytest.approx(1.0), (
        "the score is the base rate known before, so both are equal"
    )
    assert 1.0 < report["ne"] < 1.01, "the final base rate predicts slightly better"
    assert cells.rates_T(("a",))[0] == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize("labels", [0.0, 1.0])
def test_undefined_numbers_are_none(labels: float) -> None:
    cells = MetricCells(("click",))
    nothing = dict.fromkeys(("base_rate", "ne", "ne_online", "auc", "calibration"))
    sums = {"candidates": 0, "sums": [0.0] * 6, "scores": [0.0] * 2 * STEPS}
    assert cells.report([])["click"] == {**nothing, **sums}
    score_BT = np.array([[0.2], [0.0], [1.0]], dtype=np.float32)
    cells.add(
        np.full(3, cells.number_of(("a",))),
        CandidateLosses(score_BT, np.full((3, 1), labels), np.ones((3, 1)), score_BT * 0 + 0.5),
        np.arange(3),
    )
    report = cells.report([("a",)])["click"]
    assert report["ne"] is None and report["auc"] is None and report["base_rate"] == labels
    assert (report["calibration"] is None) == (labels == 0)


def test_scores_that_are_no_probabilities_have_no_entropy_or_calibration() -> None:
    score_BT, label_BT, weight_BT = random_outcomes(200)
    cells = MetricCells(("click", "seconds"))
    cell_B = np.full(200, cells.number_of(("a",)))
    is_event_T = np.array([True, False])
    losses = CandidateLosses(score_BT, label_BT, weight_BT, np.full_like(score_BT, 0.5), is_event_T)
    cells.add(cell_B, losses, np.arange(200))
    report = cells.report([("a",)])
    names = ("ne", "ne_online", "calibration")
    assert [report["seconds"][name] for name in names] == [None] * 3 and report["seconds"]["auc"]
    assert all(report["click"][name] for name in names)
    merged = merge_cell_reports([report["seconds"], report["seconds"]])
    assert [merged[name] for name in names] == [None] * 3 and merged["base_rate"]


def test_cells_add_up_and_can_be_saved_loaded_and_dropped() -> None:
    cells = MetricCells(("click",))
    score_BT, label_BT, weight_BT = random_outcomes(300, tasks=1)
    losses = CandidateLosses(score_BT, label_BT, weight_BT, np.full_like(score_BT, 0.5))
    keys = [(0, "a"), (0, "b"), (1, "a")]
    numbers = np.array([cells.number_of(key) for key in keys])
    cells.add(numbers[np.arange(300) % 3], losses, np.arange(300))
    whole = cells.report(keys)
    other = MetricCells(("click",))
    other.load(cells.state(lambda key: key[0] == 0))
    assert other.keys == keys[:2] and other.report(keys[:2]) == cells.report(keys[:2])
    other.load(cells.state(lambda key: key[0] == 1))
    other.load(cells.state(lambda key: key[0] == 1))
    assert other.report(keys) == whole, "loading the same cells again replaces them"
    other.drop(lambda key: key[1] == "a")
    assert other.keys == [(0, "b")] and other.report([(0, "b")]) == cells.report([(0, "b")])
    renamed = MetricCells(("buy",))
    renamed.load(cells.state(lambda key: True))
    assert renamed.keys == [], "the cells of another task are ignored"


def test_merged_reports_of_two_workers_equal_those_of_one() -> None:
    cells, whole = [MetricCells(("click",)) for _ in range(2)], MetricCells(("click",))
    for n, worker_cells in enumerate(cells):
        score_BT, label_BT, weight_BT = random_outcomes(500, tasks=1, seed=n)
        losses = CandidateLosses(score_BT, label_BT, weight_BT, np.full_like(score_BT, 0.5))
        for each in (worker_cells, whole):
            each.add(np.full(500, each.number_of(("a",))), losses, np.arange(500))
    merged = merge_cell_reports([worker_cells.report([("a",)])["click"] for worker_cells in cells])
    expected = whole.report([("a",)])["click"]
    assert merged.keys() == expected.keys() - {"scores"}
    for name in merged:
        assert merged[name] == pytest.approx(expected[name]), name
    without_histograms = [without_scores(worker_cells.report([("a",)])["click"]) for worker_cells in cells]
    assert merge_cell_reports(without_histograms)["auc"] is None, "AUC needs the histograms of scores"
    empty = MetricCells(("click",)).report([])["click"]
    assert (
        merge_cell_reports([empty, expected]) == without_scores(expected)
        and merge_cell_reports([empty, empty])["candidates"] == 0
    )
