"""`DriftDetector` compares recent feature values with earlier ones, on sampled batches and in bounded
memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.lookup import build_lookup
from tests.models.model_cases import make_batch, make_schema
from trainer.monitoring.drift import MAX_FEATURES, DriftDetector, SeenIds


def observe(drift: DriftDetector, batch: Batch, times: int = 1) -> None:
    for _ in range(times):
        drift.observe(batch, build_lookup(batch))


def batch_of(seed: int) -> Batch:
    return make_batch(make_schema("everything"), [20] * 20, seed)


def trained_detector() -> DriftDetector:
    drift = DriftDetector(make_schema("everything"), sampled=1, window_candidates=2000)
    for seed in range(10):
        observe(drift, batch_of(seed))
    return drift


def test_the_same_distribution_is_no_drift() -> None:
    drift = trained_detector()
    report = drift.report()
    assert set(report["psi"]) == {
        "user",
        "history",
        "topics",
        "gap_s",
        "hour",
        "item",
        "tags",
        "ctr",
        "age_s",
    }
    assert max(report["psi"].values()) < 0.25 and max(report["lengths"].values()) < 0.25
    assert report["coverage"]["ctr"] == pytest.approx(0.9, abs=0.05) == report["coverage_before"]["ctr"]
    assert report["base_rate"]["click"] == pytest.approx(0.3, abs=0.05)
    observe(drift, batch_of(1), times=10)
    assert set(drift.report()["new_ids"].values()) == {0}


def test_other_values_raise_the_psi_of_that_feature_only() -> None:
    drift = trained_detector()
    for seed in range(10, 15):
        batch = batch_of(seed)
        changed_BF = batch.nro_float_BF.copy()
        changed_BF[:, 0] *= 50
        observe(drift, dataclasses.replace(batch, nro_float_BF=changed_BF))
    report = drift.report()["psi"]
    assert report["ctr"] > 1 and report["age_s"] < 0.25


def test_a_feature_that_is_no_longer_sent_loses_its_coverage() -> None:
    drift = trained_detector()
    for seed in range(10, 15):
        batch = batch_of(seed)
        present = batch.nro_present_BF.copy()
        present[:, 0] = False
        observe(drift, dataclasses.replace(batch, nro_present_BF=present))
    report = drift.report()
    assert (
        report["coverage"]["ctr"] == 0
        and report["coverage_before"]["ctr"] > 0.8
        and report["psi"]["ctr"] > 0.25
    )


def test_another_base_rate_and_longer_lists_are_reported() -> None:
    drift = trained_detector()
    for seed in range(10, 15):
        batch = make_batch(make_schema("everything"), [20] * 20, seed, longest=60)
        observe(drift, dataclasses.replace(batch, label_BT=np.ones_like(batch.label_BT)))
    report = drift.report()
    assert report["base_rate"]["click"] == 1.0 and report["base_rate_before"]["click"] < 0.5
    assert report["lengths"]["history"] > 0.25


def test_an_id_is_new_once_and_again_after_a_long_time() -> None:
    seen, ids = SeenIds(), np.arange(1000, dtype=np.int64)
    assert seen.add(ids) > 990 and seen.add(ids) == 0
    assert seen.add(ids + 1_000_000) > 980, "few ids share all their bits in the sketch"
    for start in range(0, 200_000, 1000):
        seen.add(ids + start + 5_000_000)
    assert seen.add(ids) > 500, "ids from long ago are forgotten"


def test_only_sampled_batches_are_examined() -> None:
    drift = DriftDetector(make_schema("everything"), sampled=8)
    observe(drift, batch_of(1), times=17)
    assert drift.num_looked == 3


def test_at_most_max_features_are_watched() -> None:
    wide = schema_from_dict(
        {
            "nro": [{"name": f"x{n}", "kind": "float"} for n in range(300)],
            "label": [{"name": "click", "action": "click", "fold": "any"}],
        }
    )
    drift = DriftDetector(wide, sampled=1, window_candidates=10)
    observe(drift, make_batch(wide, [20]), times=3)
    assert len(drift.report()["psi"]) == len(drift.report()["coverage"]) == MAX_FEATURES
