"""Selection decides by a hash of the request's id whether a request is trained. Weights of the kept requests
make up for the skipped ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import ConfigError
from roostream.schema.ids import splitmix64
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from tests.trainer import samples
from trainer.selection.config import SelectionConfig
from trainer.selection.decision import (
    NEGATIVE,
    RANDOM,
    STALE,
    TRAINED,
    Decision,
    decide,
    uniform_draws,
    without_positive,
)


def batch_of(numbers: list[int]) -> Batch:
    return Decoder(samples.schema(), {}.get).decode(samples.records(numbers))[0]


def with_labels(batch: Batch, positive_R: np.ndarray) -> Batch:
    label_BT = positive_R[batch.request_index_B][:, None].astype(np.float32)
    return dataclasses.replace(batch, label_BT=label_BT)


def make_decision(batch: Batch, policy: str, keep: float = 0.5, **more: object) -> Decision:
    return decide(batch, SelectionConfig(policy=policy, keep=keep, **more), seed=7)  # type: ignore[arg-type]


def test_draws_are_the_documented_function_of_id_and_seed() -> None:
    ids = np.array([1, -5, 1 << 40], np.int64)
    for id_, u in zip(ids.tolist(), uniform_draws(ids, 9).tolist(), strict=True):
        assert u == (splitmix64((id_ & ((1 << 64) - 1)) ^ 9) >> 11) * 2.0**-53
    assert 0.49 < uniform_draws(np.arange(20_000), 3).mean() < 0.51


def test_a_request_with_a_positive_is_always_trained_with_weight_one() -> None:
    batch = batch_of(list(range(1, 101)))
    positive_R = np.arange(100) % 4 == 0
    decision = make_decision(with_labels(batch, positive_R), "negatives", keep=0.25)
    assert decision.kept_R[positive_R].all() and (decision.weight_R[positive_R] == 1).all()
    assert set(decision.weight_R[~positive_R].tolist()) == {0.0, 4.0}
    assert 10 < decision.kept_R[~positive_R].sum() < 30


def test_positives_need_a_weight_and_include_labels_that_a_correction_removes() -> None:
    batch = batch_of([1, 2])
    before = np.zeros_like(batch.label_BT)
    batch = dataclasses.replace(batch, label_BT=np.ones_like(before), weight_BT=np.zeros_like(before))
    assert without_positive(batch).all()
    before[0] = 1
    batch = dataclasses.replace(
        batch, label_BT=np.zeros_like(before), label_before_BT=before, weight_BT=np.ones_like(before)
    )
    assert without_positive(batch).tolist() == [False, True]


@pytest.mark.parametrize("policy", ["negatives", "random"])
@settings(max_examples=15)
@given(cut=st.integers(1, 39), seed=st.integers(0, 5))
def test_decisions_do_not_depend_on_order_or_batch(policy: str, cut: int, seed: int) -> None:
    batch = with_labels(batch_of(list(range(1, 41))), np.arange(40) % 3 == 0)
    whole = make_decision(batch, policy)
    order = np.random.default_rng(seed).permutation(40)
    parts = [make_decision(batch.take_requests(rows), policy) for rows in (order[:cut], order[cut:])]
    for name in Decision._fields:
        assert (np.concatenate([getattr(part, name) for part in parts]) == getattr(whole, name)[order]).all()


@pytest.mark.parametrize("policy", ["negatives", "random"])
def test_kept_requests_represent_all_requests_in_metrics_and_loss(policy: str) -> None:
    n, stood = 100, []
    positive_R = np.arange(n) % 4 == 0
    batch = with_labels(batch_of(list(range(1, n + 1))), positive_R)
    for seed in range(60):
        ids = np.random.default_rng(seed).integers(-(1 << 63), 1 << 63, n)
        decision = decide(
            dataclasses.replace(batch, sample_id_R=ids), SelectionConfig(policy=policy, keep=0.25), seed
        )  # type: ignore[arg-type]
        each = {"negatives": np.where(positive_R, 1.0, 4.0), "random": np.full(n, 4.0)}[policy]
        assert (decision.stands_for_R == np.where(decision.kept_R, each, 0)).all()
        weight_R = decision.stands_for_R if policy == "negatives" else decision.kept_R
        assert (decision.weight_R == weight_R).all()
        skipped = {"negatives": NEGATIVE, "random": RANDOM}[policy]
        assert (decision.reason_R == np.where(decision.kept_R, TRAINED, skipped)).all()
        stood.append(float(decision.stands_for_R.sum()))
    assert abs(np.mean(stood) - n) < 4 * np.sqrt(n * 0.75 / 0.25 / len(stood))
    assert (make_decision(batch, "slipstream").stands_for_R == 1).all()


def test_scoring_only_kept_requests_is_rejected_for_slipstream() -> None:
    with pytest.raises(
        ConfigError, match=r"'score': expected all or probe with policy = slipstream, got 'kept'"
    ):
        SelectionConfig(policy="slipstream", score="kept")


def test_slipstream_skips_the_stale_requests_only() -> None:
    batch, stale_R = batch_of([1, 2, 3]), np.array([False, True, False])
    config = SelectionConfig(policy="slipstream")
    assert decide(batch, config, 0, stale_R).reason_R.tolist() == [TRAINED, STALE, TRAINED]
    assert decide(batch, config, 0).kept_R.all()


def test_probes_are_a_share_of_the_skipped_requests() -> None:
    decision = make_decision(
        with_labels(batch_of(list(range(1, 401))), np.zeros(400, np.bool_)), "random", probe=0.25
    )
    assert not decision.probe_R[decision.kept_R].any()
    assert 0.12 < decision.probe_R.sum() / (~decision.kept_R).sum() < 0.38
