"""The training loop with selection: which requests it trains, scores and counts, and what a restore brings
back. Without selection nothing changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from roostream.errors import ConfigError
from roostream.models.loss import loss
from roostream.models.model import Targets
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.loops import Built, assert_a_restored_loop_continues_bit_equal, build
from trainer.chunks import build_part
from trainer.metrics import SELECTION, key_of
from trainer.selection.config import (
    MIN_SAMPLE,
    DeferralConfig,
    RehearsalConfig,
    SelectionConfig,
    SlipstreamConfig,
)
from trainer.selection.decision import NEGATIVE, SelectionWeights, decide
from trainer.selection.outcomes import unaccounted_requests
from trainer.selection.slipstream_policy import AHEAD, SlipstreamPolicy

NUMBERS = list(range(1, 61))
N60 = samples.records(NUMBERS)
NEGATIVES = SelectionConfig(policy="negatives", keep=0.3)


def one_candidate(numbers: list[int]) -> list[Record]:
    return [
        r._replace(value=samples.sample(n, num_candidates=1))
        for n, r in zip(numbers, samples.records(numbers), strict=True)
    ]


CLICKS = one_candidate(NUMBERS)


def skipped_numbers(config: SelectionConfig, seed: int = 0) -> set[int]:
    batch = Decoder(samples.schema(), {}.get).decode(CLICKS)[0]
    return set(batch.sample_id_R[~decide(batch, config, seed).kept_R].tolist())


def weights(built: Built) -> dict[str, bytes]:
    return {k: v.detach().numpy().tobytes() for k, v in built.loop.model.state_dict().items()}


def rows(built: Built) -> dict[tuple[int, int], bytes]:
    return {key: row.value_D.tobytes() + row.squares_D.tobytes() for key, row in built.shard.rows.items()}


def outcome_counts(built: Built) -> dict[str, int]:
    assert unaccounted_requests(built.loop.outcomes.total) == 0
    return {name: n for name, n in built.loop.outcomes.total.items() if n}


def test_policy_off_equals_keeping_everything_and_has_no_state() -> None:
    off = build(N60).train_all()
    kept = build(N60, selection=SelectionConfig(policy="random", keep=1.0)).train_all()
    assert weights(off) == weights(kept) and rows(off) == rows(kept)
    assert [p.SerializeToString() for p in off.predicted] == [p.SerializeToString() for p in kept.predicted]
    assert off.loop.selection.state() == {} and outcome_counts(off) == {"taken": 60, "trained": 60}


def test_skipped_requests_are_scored_and_counted_but_not_trained() -> None:
    built, skipped = build(CLICKS, selection=NEGATIVES).train_all(), skipped_numbers(NEGATIVES)
    assert 10 < len(skipped) < 40
    assert built.pushes() == {n: 1 for n in NUMBERS if n not in skipped}
    assert {p.sample_id for p in built.predicted if p.disposition == NEGATIVE} == skipped
    assert sorted(p.sample_id for p in built.predicted) == NUMBERS and all(p.scores for p in built.predicted)
    trained = [p for p in built.predicted if p.disposition == pb.DISPOSITION_TRAINED]
    assert {(round(p.train_weight, 4), any(p.labels)) for p in trained} == {(0.0, True), (3.3333, False)}
    assert outcome_counts(built) == {"taken": 60, "trained": 60 - len(skipped), "negative": len(skipped)}
    assert built.offsets() == [30, 30] and built.loop.watermark_ms == samples.T0 + 60_500, (
        "skipped requests advance offsets and watermark"
    )
    assert built.loop.report()["requests"] == 60 and built.loop.counts.requests == 60


def test_skipped_requests_are_scored_with_the_weights_from_before_their_chunk() -> None:
    off = build(CLICKS[:24])
    on = build(CLICKS[:24], selection=SelectionConfig(policy="random", keep=0.5))
    for _ in range(5):
        off.loop.step()
    on.shard.rows = {key: row.copy() for key, row in off.shard.rows.items()}
    on.loop.restore(off.loop.snapshot())
    assert off.loop.step() and on.loop.step() and 0 < outcome_counts(on)["random"] < 4
    expected = {p.sample_id: p.scores[0] for p in off.predicted[-4:]}
    assert {p.sample_id: p.scores[0] for p in on.predicted} == pytest.approx(expected, rel=1e-5)


def test_probes_represent_all_skipped_requests_and_the_others_have_no_scores() -> None:
    config = dataclasses.replace(NEGATIVES, score="probe", probe=0.5)
    built, skipped = build(CLICKS, selection=config).train_all(), skipped_numbers(NEGATIVES)
    scored = {p.sample_id: p.metric_weight for p in built.predicted if p.scores}
    assert {p.sample_id for p in built.predicted} == set(NUMBERS)
    probed = skipped & scored.keys()
    assert 0 < len(probed) < len(skipped)
    assert {scored[n] for n in probed} == {2.0} and {w for n, w in scored.items() if n not in skipped} == {
        0.0
    }
    task = built.loop.partitions.metrics().sums()["click"]
    assert task["weight"] == 60 - len(skipped) + 2 * len(probed) and built.loop.selection.report()[
        "probed"
    ] == len(probed)
    assert outcome_counts(built) == {"taken": 60, "trained": 60 - len(skipped), "negative": len(skipped)}


@pytest.mark.parametrize("policy", ["negatives", "random"])
def test_scoring_only_kept_requests_trains_the_same_and_represents_all(policy: Any) -> None:
    config = SelectionConfig(policy=policy, keep=0.3)
    every = build(CLICKS, selection=config).train_all()
    kept = build(CLICKS, selection=dataclasses.replace(config, score="kept")).train_all()
    assert weights(every) == weights(kept) and rows(every) == rows(kept), (
        "scoring fewer requests must not change training"
    )
    skipped = skipped_numbers(config)
    before = {p.sample_id: p for p in every.predicted}
    assert sorted(p.sample_id for p in kept.predicted) == NUMBERS and outcome_counts(kept) == outcome_counts(
        every
    )
    expected = {"weight": 0.0, "positive": 0.0}
    for prediction in kept.predicted:
        scored = pb.Prediction.FromString(prediction.SerializeToString())
        scored.ClearField("metric_weight")
        if prediction.sample_id in skipped:
            assert not prediction.scores and prediction.metric_weight == 0, (
                "a skipped request must not be in the metrics"
            )
            scored.scores.extend(before[prediction.sample_id].scores)
        else:
            represents = 1.0 if policy == "negatives" and any(prediction.labels) else 1 / 0.3
            metric_weight = 0.0 if represents == 1 else represents  # a weight of 1 is stored as 0
            assert prediction.metric_weight == pytest.approx(metric_weight)
            expected["weight"] += represents
            expected["positive"] += represents * sum(prediction.labels)
        assert scored == before[prediction.sample_id], "all other fields must be equal"
    found = kept.loop.partitions.metrics().sums()["click"]
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert kept.loop.counts.requests == 60 and kept.loop.selection.report()["probed"] == 0


def test_request_metrics_count_a_probe_as_often_as_it_represents_others() -> None:
    from trainer.monitoring.progressive_metrics import Metrics, ScoredBatch

    score, label = np.array([[0.9], [0.1], [0.2], [0.8]]), np.array([[1.0], [0.0], [1.0], [0.0]])
    index_B, time_ms_R = np.array([0, 0, 1, 1]), np.zeros(2, np.int64)
    metrics, represents_R = Metrics(["click"]), np.array([1.0, 3.0])
    weight_BT = represents_R[index_B][:, None]
    metrics.update(ScoredBatch(score, label, weight_BT, index_B, time_ms_R, importance_R=represents_R))
    assert metrics.report()["request_auc"] == 0.25, "one of four represented requests is ordered correctly"


@pytest.mark.parametrize(
    ("policy", "score"), [("negatives", "all"), ("random", "probe"), ("negatives", "kept")]
)
def test_g11_a_restored_loop_skips_the_same_requests_and_ends_in_the_same_bits(
    policy: Any, score: Any
) -> None:
    settings: dict[str, Any] = {
        "selection": SelectionConfig(policy=policy, keep=0.4, score=score),
        "deferral": DeferralConfig(share=0.8, min_visits=2, visits=4),
    }
    uninterrupted, _ = assert_a_restored_loop_continues_bit_equal(N60, 6, exact=True, **settings)
    assert uninterrupted.loop.selection.state(), "the state must not be empty, or the test shows nothing"


def test_frozen_requests_are_not_judged_and_flush_deferred_gradients() -> None:
    freeze_at_ms = samples.T0 + 40_000
    deferral = DeferralConfig(share=0.9, min_visits=2, visits=100)
    built = build(CLICKS, selection=NEGATIVES, freeze_at_ms=freeze_at_ms, deferral=deferral)
    while built.loop.step():
        waits = built.loop.selection.deferral
        if built.loop.watermark_ms > freeze_at_ms + 5_000:
            assert waits is not None and waits.num_waiting == 0
    skipped = {n for n in skipped_numbers(NEGATIVES) if n < 40}
    assert outcome_counts(built) == {
        "taken": 60,
        "trained": 39 - len(skipped),
        "negative": len(skipped),
        "frozen": 21,
    }


def test_the_end_of_the_input_flushes_deferred_gradients() -> None:
    built = build(N60, deferral=DeferralConfig(share=0.9, min_visits=2, visits=100))
    while built.loop.step():
        pass
    assert built.loop.selection.deferral and built.loop.selection.deferral.num_waiting > 0
    assert not built.loop.finish() and built.loop.selection.deferral.num_waiting == 0


@pytest.mark.parametrize("deferral", [DeferralConfig(share=0.6, visits=1), DeferralConfig(share=0.0)])
def test_deferral_that_never_waits_equals_none_bit_for_bit(deferral: DeferralConfig) -> None:
    assert rows(build(N60, deferral=deferral).train_all()) == rows(build(N60).train_all())


def test_a_non_finite_batch_does_not_change_deferred_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(CLICKS, selection=NEGATIVES, deferral=DeferralConfig(share=0.9, min_visits=2, visits=100))
    for _ in range(8):
        built.loop.step()
    assert built.loop.selection.deferral
    before = {name: x.tobytes() for name, x in built.loop.selection.deferral.state().items()}
    assert built.loop.selection.deferral.num_waiting
    monkeypatch.setattr(built.loop.optimizer, "step", lambda: False)
    built.loop.step()
    assert {name: x.tobytes() for name, x in built.loop.selection.deferral.state().items()} == before
    monkeypatch.undo()
    built.train_all()
    assert (
        built.loop.outcomes.total["non_finite"] == built.loop.counts.non_finite > 0
        and outcome_counts(built)["taken"] == 60
    )


def test_a_correction_of_a_skipped_negative_is_trained() -> None:
    number = min(skipped_numbers(NEGATIVES))
    correction = samples.correction(number, 0)
    built = build(
        samples.with_offsets([*CLICKS, correction]),
        selection=NEGATIVES,
        corrections="on",
        partitions=(("samples", 0), ("samples", 1), ("corrections", 0), ("corrections", 1)),
    ).train_all()
    assert built.loop.counts.corrections == 1 and built.pushes()[number] == 1
    assert outcome_counts(built)["taken"] == 60


def test_the_loss_is_divided_by_the_number_of_kept_candidates() -> None:
    part = build_part(Decoder(samples.schema(), {}.get).decode(CLICKS[:3])[0], trains=True)
    weight_R = np.array([1.0, 4.0, 4.0], np.float32)
    choice = SelectionWeights(np.zeros(3, np.uint8), weight_R, np.ones(3, np.float32))
    selection = build(CLICKS).loop.selection
    label, logits = torch.zeros(3, 1), torch.zeros(3, 1)
    targets = selection.weight_targets(
        Targets(label, torch.ones(3, 1)), dataclasses.replace(part, choice=choice)
    )
    assert float(loss(logits, targets)) == pytest.approx(9 * np.log(2) / 3)
    assert float(loss(logits, Targets(label, targets.weight_BT))) == pytest.approx(np.log(2)), (
        "without total_T the loss is divided by the sum of weights"
    )
    assert selection.weight_targets(Targets(label, label), part) == Targets(label, label)


SLIPSTREAM = SlipstreamConfig(
    hot_ratio=1e-4, warm_up_steps=4, snapshots=3, snapshot_steps=2, drop=0.5, hot_share=0.5, unvisited="stale"
)


SLIPSTREAM_SELECTION = SelectionConfig(policy="slipstream", slipstream=SLIPSTREAM)


def repeated_users(count: int) -> list[Record]:
    numbers = list(range(1, count + 1))
    return [
        r._replace(value=samples.sample(n, user=n % 5 + 1))
        for n, r in zip(numbers, samples.records(numbers), strict=True)
    ]


def build_with_slipstream(**more: Any) -> Built:
    return build(repeated_users(240), selection=SLIPSTREAM_SELECTION, exact=True, **more)


def test_slipstream_skips_stale_inputs_after_its_snapshots() -> None:
    built = build_with_slipstream().train_all()
    skipped = {p.step for p in built.predicted if p.disposition == pb.DISPOSITION_STALE}
    assert skipped and min(skipped) > SLIPSTREAM.last_snapshot + 16
    report = built.loop.selection.report()
    assert (
        report["slipstream_phase"] == 2 and report["slipstream_hot_rows"] == 12 and report["skip_share"] > 0.1
    )
    assert outcome_counts(built)["stale"] == len(
        [p for p in built.predicted if p.disposition == pb.DISPOSITION_STALE]
    )
    assert 0 <= report["slipstream_unvisited_share"] < 1
    assert 0 < report["slipstream_realised_drop"] <= SLIPSTREAM.drop
    assert "slipstream.numbers" in built.loop.snapshot().shared


def test_slipstream_takes_snapshots_at_the_configured_steps() -> None:
    policy = SlipstreamPolicy(dataclasses.replace(SLIPSTREAM, snapshot_steps=3), samples.schema())
    steps_with_snapshot, step = list[int](), 0

    def pull(lookup: Lookup) -> dict[str, np.ndarray]:
        steps_with_snapshot.append(step)
        return {
            stack: np.zeros((len(stack_lookup.id_U), 1), np.float32)
            for stack, stack_lookup in lookup.stacks.items()
        }

    for step in range(1, 20):
        policy.on_trained(step, [], pull)
    assert steps_with_snapshot == [4, 7, 10] and policy.T is not None


@pytest.mark.parametrize("steps", [6, 40])
def test_slipstream_turned_on_too_late_ends_and_everything_is_trained(steps: int) -> None:
    before = build(repeated_users(240), exact=True)
    for _ in range(steps):
        before.loop.step()
    built = build_with_slipstream()
    built.loop.restore(before.loop.snapshot(), same_schema=True)
    built.train_all()
    assert outcome_counts(built).get("stale", 0) == 0
    assert list(built.loop.selection.state()) == ["slipstream.over"]


@pytest.mark.parametrize("steps", [6, 12])
def test_slipstream_whose_warm_up_became_longer_ends_and_everything_is_trained(steps: int) -> None:
    before = build_with_slipstream()
    for _ in range(steps):
        before.loop.step()
    longer = dataclasses.replace(SLIPSTREAM, warm_up_steps=20)
    built = build(
        repeated_users(240), selection=SelectionConfig(policy="slipstream", slipstream=longer), exact=True
    )
    built.loop.restore(before.loop.snapshot(), same_schema=True)
    built.train_all()
    assert outcome_counts(built).get("stale", 0) == 0
    assert list(built.loop.selection.state()) == ["slipstream.over"]


@pytest.mark.parametrize("missing", [4, 7, 10])
def test_slipstream_goes_on_after_a_step_that_a_changed_schema_left_out(missing: int) -> None:
    policy = SlipstreamPolicy(dataclasses.replace(SLIPSTREAM, snapshot_steps=3), samples.schema())
    batch = Decoder(samples.schema(), {}.get).decode(CLICKS)[0]
    lookup = build_lookup(batch)

    def zero_rows(looked_up: Lookup) -> dict[str, np.ndarray]:
        return {s: np.zeros((len(stack.id_U), 1), np.float32) for s, stack in looked_up.stacks.items()}

    for step in range(1, 40):
        policy.stale(batch, step + AHEAD)
        if step != missing:
            policy.on_trained(step, [(batch, lookup)], zero_rows)
    assert policy.phase == (2 if missing == 7 else 3), "only the snapshot between the others can be missing"


@pytest.mark.parametrize("steps", [2, 5, 9, 30])
def test_g11_slipstream_restored_in_any_phase_ends_in_the_same_bits(steps: int) -> None:
    assert_a_restored_loop_continues_bit_equal(
        repeated_users(240), steps, selection=SLIPSTREAM_SELECTION, exact=True
    )


def test_slipstream_needs_history_and_ends_when_the_stream_begins() -> None:
    built = build_with_slipstream()
    for _ in range(30):
        built.loop.step()
    with pytest.raises(
        ConfigError, match=r"selection\.policy: expected off, negatives or random for a stream"
    ):
        built.loop.selection.begin_phase(finite=False, handed_over=False)
    built.loop.selection.begin_phase(finite=True, handed_over=False)
    assert built.loop.selection.slipstream and built.loop.selection.slipstream.phase == 2
    built.loop.selection.begin_phase(finite=False, handed_over=True)
    before = outcome_counts(built).get("stale", 0)
    built.train_all()
    assert outcome_counts(built).get("stale", 0) == before, "no request is skipped any more"
    assert list(built.loop.selection.state()) == ["slipstream.over"]


@pytest.mark.parametrize(
    "settings",
    [
        {"selection": SelectionConfig(policy="slipstream")},
        {"deferral": DeferralConfig(share=0.5)},
        {"rehearsal": RehearsalConfig(batches=3)},
        {"expand": "impressions", "batch_impressions": 5},
    ],
)
def test_settings_for_a_single_worker_are_rejected_with_several(settings: Any) -> None:
    loop = build(CLICKS, **settings).loop
    loop.validate(workers=1)
    with pytest.raises(ConfigError, match="with 2 workers"):
        loop.validate(workers=2)


@pytest.mark.parametrize("policy", ["random", "negatives"])
def test_refilled_chunks_train_the_same_requests_in_fewer_steps(policy: Any) -> None:
    numbers = list(range(1, 241))
    log = [
        r._replace(value=samples.sample(n, num_candidates=1))
        for n, r in zip(numbers, samples.records(numbers), strict=True)
    ]
    config = SelectionConfig(policy=policy, keep=0.25)
    plain = build(log, selection=config).train_all()
    refilled = build(log, selection=dataclasses.replace(config, refill=True)).train_all()
    assert {n: 1 for n in refilled.pushes()} == refilled.pushes() == plain.pushes(), (
        "the same requests, each once"
    )
    assert outcome_counts(refilled) == outcome_counts(plain) and refilled.offsets() == plain.offsets() == [
        120,
        120,
    ]
    kept = outcome_counts(plain)["trained"] / 240
    assert plain.loop.num_steps == 60 and refilled.loop.num_steps < 60 * (kept + 0.2), (
        "a refilled step trains about as many requests as a step without selection"
    )


@pytest.mark.parametrize("sample", [0, MIN_SAMPLE])
def test_slipstream_saves_the_interval_of_a_sampled_search(sample: int) -> None:
    config = dataclasses.replace(SLIPSTREAM, sample=sample)
    built = build(
        repeated_users(80), selection=SelectionConfig(policy="slipstream", slipstream=config), exact=True
    ).train_all()
    policy, restored = built.loop.selection.slipstream, SlipstreamPolicy(config, samples.schema())
    assert policy is not None and policy.T is not None
    assert policy.half_width == (0 if sample else None), (
        "the sample contains all inputs, so the interval is zero"
    )
    restored.load(policy.state())
    assert (restored.T, restored.half_width) == (policy.T, policy.half_width)


def test_refill_reads_at_most_the_expected_number_of_requests() -> None:
    refilled = build(N60, selection=SelectionConfig(policy="random", keep=0.5, refill=True)).train_all()
    assert 90 < refilled.loop.selection.chunk_size(64) < 200
    assert refilled.loop.selection.chunk_size(1 << 16) == 1 << 16
    off = build(N60, selection=SelectionConfig(refill=True))
    assert off.loop.selection.chunk_size(64) == 64, "without selection no request is skipped"


def test_slipstream_warns_if_it_skips_a_different_share_than_requested(
    caplog: pytest.LogCaptureFixture,
) -> None:
    all_or_none = dataclasses.replace(SLIPSTREAM, drop=0.99, unvisited="varying", alpha=1.0)
    selection = SelectionConfig(policy="slipstream", slipstream=all_or_none)
    build(repeated_users(100), selection=selection, exact=True).train_all()
    assert "99 %" in caplog.text


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_slipstream_warns_if_no_input_is_hot_or_few_accesses_make_a_row_hot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cold = dataclasses.replace(SLIPSTREAM, hot_ratio=0.9, hot_share=1.0)
    built = build(
        repeated_users(100), selection=SelectionConfig(policy="slipstream", slipstream=cold), exact=True
    ).train_all()
    assert [text for text in warnings_of(caplog) if "no input was hot" in text]
    assert "stale" not in outcome_counts(built)
    caplog.clear()
    few = dataclasses.replace(SLIPSTREAM, count_requests=8)
    build(
        repeated_users(100), selection=SelectionConfig(policy="slipstream", slipstream=few), exact=True
    ).train_all()
    assert [text for text in warnings_of(caplog) if "hot_ratio" in text]


@pytest.mark.parametrize("steps", [2, 30])
def test_rows_of_removed_tables_are_forgotten_with_a_warning(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted, restored = build_with_slipstream(), build_with_slipstream()
    for _ in range(steps):
        uninterrupted.loop.step()
    state = dict(uninterrupted.loop.selection.state())
    stack, table = next((k.split(".")[1], x) for k, x in state.items() if k.endswith(".table"))
    changed_table = table.copy()
    changed_table[0] = 99
    state[f"slipstream.{stack}.table"] = changed_table
    policy = restored.loop.selection.slipstream
    assert policy is not None
    caplog.clear()
    policy.load(state)
    assert [text for text in warnings_of(caplog) if "forgot 1 " in text]
    restored_state = policy.state()
    assert (
        99 not in restored_state[f"slipstream.{stack}.table"]
        and len(restored_state[f"slipstream.{stack}.id"]) == len(changed_table) - 1
    )
    restored.shard.rows = {key: row.copy() for key, row in uninterrupted.shard.rows.items()}
    snapshot = uninterrupted.loop.snapshot()
    restored.loop.restore(dataclasses.replace(snapshot, shared={**snapshot.shared, **state}))
    outcome_counts(restored.train_all())


@pytest.mark.parametrize(
    "settings",
    [{"selection": SelectionConfig(policy="slipstream")}, {"deferral": DeferralConfig(share=0.5)}],
)
def test_every_value_that_selection_reports_has_a_metric(settings: dict[str, object]) -> None:
    built = build(samples.records([1, 2, 3, 4]), **settings).train_all()  # type: ignore[arg-type]
    assert built.loop.selection.report().keys() <= set(map(key_of, SELECTION))


def test_deferred_gradients_of_a_commit_are_named_when_deferral_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = build(N60, deferral=DeferralConfig(share=0.9, min_visits=2, visits=100))
    while first.loop.step():
        pass
    assert first.loop.selection.deferral and (waiting := first.loop.selection.deferral.num_waiting)
    build(N60).loop.restore(first.loop.snapshot())
    assert f"gradients of {waiting} rows" in caplog.text
