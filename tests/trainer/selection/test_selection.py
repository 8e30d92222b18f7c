"""The loop with selection: what is trained, scored and told, through restores, and nothing at all while it is
off."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from roostream.errors import ConfigError
from roostream.models.loss import loss
from roostream.models.model import Targets
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.loops import Built, build
from trainer.chunks import build_part
from trainer.selection.config import MIN_SAMPLE, DeferralConfig, SelectionConfig, SlipstreamConfig
from trainer.selection.decision import NEGATIVE, SelectionWeights, decide
from trainer.selection.outcomes import unaccounted_requests
from trainer.selection.slipstream_policy import SlipstreamPolicy, _HotStack

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


def accounted(built: Built) -> dict[str, int]:
    assert unaccounted_requests(built.loop.outcomes.total) == 0
    return {name: n for name, n in built.loop.outcomes.total.items() if n}


def test_off_is_bit_equal_to_a_policy_that_keeps_everything_and_keeps_no_state() -> None:
    off = build(N60).train_all()
    kept = build(N60, selection=SelectionConfig(policy="random", keep=1.0)).train_all()
    assert weights(off) == weights(kept) and rows(off) == rows(kept)
    assert [p.SerializeToString() for p in off.predicted] == [p.SerializeToString() for p in kept.predicted]
    assert off.loop.selection.state() == {} and accounted(off) == {"taken": 60, "trained": 60}


def test_skipped_requests_are_scored_and_counted_and_never_applied() -> None:
    built, skipped = build(CLICKS, selection=NEGATIVES).train_all(), skipped_numbers(NEGATIVES)
    assert 10 < len(skipped) < 40
    assert built.pushes() == {n: 1 for n in NUMBERS if n not in skipped}
    assert {p.sample_id for p in built.predicted if p.disposition == NEGATIVE} == skipped
    assert sorted(p.sample_id for p in built.predicted) == NUMBERS and all(p.scores for p in built.predicted)
    assert accounted(built) == {"taken": 60, "trained": 60 - len(skipped), "negative": len(skipped)}
    assert built.offsets() == [30, 30] and built.loop.watermark_ms == samples.T0 + 60_500, (
        "as if they were trained"
    )
    assert built.loop.report()["requests"] == 60 and built.loop.counts.requests == 60


def test_a_kept_negative_stands_for_those_that_are_not() -> None:
    built = build(CLICKS, selection=NEGATIVES).train_all()
    said = {p.sample_id: (p.disposition, round(p.train_weight, 4), list(p.labels)) for p in built.predicted}
    for disposition, weight, labels in said.values():
        if disposition == pb.DISPOSITION_TRAINED:
            assert weight == (0.0 if any(labels) else 3.3333), "1 isn't written"


def test_skipped_requests_are_scored_by_the_weights_that_the_others_of_their_chunk_are_scored_by() -> None:
    off = build(CLICKS[:24])
    on = build(CLICKS[:24], selection=SelectionConfig(policy="random", keep=0.5))
    for _ in range(5):
        off.loop.step()
    on.shard.rows = {key: row.copy() for key, row in off.shard.rows.items()}
    on.loop.restore(off.loop.snapshot())
    assert off.loop.step() and on.loop.step() and 0 < accounted(on)["random"] < 4
    expected = {p.sample_id: p.scores[0] for p in off.predicted[-4:]}
    assert {p.sample_id: p.scores[0] for p in on.predicted} == pytest.approx(expected, rel=1e-5)


def test_probes_count_for_all_that_was_skipped_and_the_rest_is_told_without_scores() -> None:
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
    assert accounted(built) == {"taken": 60, "trained": 60 - len(skipped), "negative": len(skipped)}


@pytest.mark.parametrize("policy", ["negatives", "random"])
def test_where_the_kept_alone_are_scored_they_stand_for_all_and_train_the_same(policy: Any) -> None:
    config = SelectionConfig(policy=policy, keep=0.3)
    every = build(CLICKS, selection=config).train_all()
    kept = build(CLICKS, selection=dataclasses.replace(config, score="kept")).train_all()
    assert weights(every) == weights(kept) and rows(every) == rows(kept), (
        "to the bit: what is scored changes nothing"
    )
    skipped = skipped_numbers(config)
    before = {p.sample_id: p for p in every.predicted}
    assert sorted(p.sample_id for p in kept.predicted) == NUMBERS and accounted(kept) == accounted(every)
    expected = {"weight": 0.0, "positive": 0.0}
    for said in kept.predicted:
        was = before[said.sample_id]
        told = (
            said.disposition,
            said.train_weight,
            list(said.labels),
            list(said.item_ids),
            said.time_ms,
            said.offset,
        )
        assert told == (
            was.disposition,
            was.train_weight,
            list(was.labels),
            list(was.item_ids),
            was.time_ms,
            was.offset,
        )
        assert list(said.scores) == ([] if said.sample_id in skipped else list(was.scores))
        if said.sample_id in skipped:
            assert said.metric_weight == 0, "it is in no metric"
            continue
        stands = 1.0 if policy == "negatives" and any(said.labels) else 1 / 0.3
        assert said.metric_weight == pytest.approx(0.0 if stands == 1 else stands), "1 isn't written"
        expected["weight"] += stands
        expected["positive"] += stands * sum(said.labels)
    found = kept.loop.partitions.metrics().sums()["click"]
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert kept.loop.counts.requests == 60 and kept.loop.selection.report()["probed"] == 0


def test_metrics_by_request_count_a_probe_for_as_many_as_it_stands_for() -> None:
    from trainer.monitoring.progressive_metrics import Metrics, ScoredBatch

    score, label = np.array([[0.9], [0.1], [0.2], [0.8]]), np.array([[1.0], [0.0], [1.0], [0.0]])
    index_B, time_ms_R = np.array([0, 0, 1, 1]), np.zeros(2, np.int64)
    metrics, stands = Metrics(["click"]), np.array([1.0, 3.0])
    weight_BT = stands[index_B][:, None]
    metrics.update(ScoredBatch(score, label, weight_BT, index_B, time_ms_R, importance_R=stands))
    assert metrics.report()["request_auc"] == 0.25, "one of four requests is in order"


@pytest.mark.parametrize("score", ["all", "probe", "kept"])
@pytest.mark.parametrize("policy", ["negatives", "random"])
def test_g11_whoever_is_restored_skips_the_same_and_ends_in_the_same_bits(policy: Any, score: Any) -> None:
    settings: dict[str, Any] = {
        "selection": SelectionConfig(policy=policy, keep=0.4, score=score),
        "deferral": DeferralConfig(share=0.8, min_visits=2, visits=4),
    }
    whole, again = build(N60, exact=True, **settings), build(N60, exact=True, **settings)
    for _ in range(6):
        whole.loop.step()
    again.shard.rows = {key: row.copy() for key, row in whole.shard.rows.items()}
    again.loop.restore(whole.loop.snapshot())
    assert whole.loop.selection.state(), "there is something to lose"
    whole.train_all()
    again.train_all()
    assert weights(whole) == weights(again) and rows(whole) == rows(again)
    assert [p.SerializeToString() for p in whole.predicted][-len(again.predicted) :] == [
        p.SerializeToString() for p in again.predicted
    ]


def test_a_restore_without_what_waits_would_not_be_bit_equal() -> None:
    settings: dict[str, Any] = {"deferral": DeferralConfig(share=0.8, min_visits=2, visits=4), "exact": True}
    whole, again = build(N60, **settings), build(N60, **settings)
    for _ in range(6):
        whole.loop.step()
    assert whole.loop.selection.deferral and whole.loop.selection.deferral.num_waiting
    again.shard.rows = {key: row.copy() for key, row in whole.shard.rows.items()}
    at = whole.loop.snapshot()
    lost = {name: x for name, x in at.shared.items() if not name.startswith("deferral.")}
    again.loop.restore(dataclasses.replace(at, shared=lost))
    assert rows(whole.train_all()) != rows(again.train_all())


def test_frozen_requests_are_never_judged_and_nothing_waits_behind_them() -> None:
    freeze_at_ms = samples.T0 + 40_000
    deferral = DeferralConfig(share=0.9, min_visits=2, visits=100)
    built = build(CLICKS, selection=NEGATIVES, freeze_at_ms=freeze_at_ms, deferral=deferral)
    while built.loop.step():
        waits = built.loop.selection.deferral
        if built.loop.watermark_ms > freeze_at_ms + 5_000:
            assert waits is not None and waits.num_waiting == 0
    skipped = {n for n in skipped_numbers(NEGATIVES) if n < 40}
    assert accounted(built) == {
        "taken": 60,
        "trained": 39 - len(skipped),
        "negative": len(skipped),
        "frozen": 21,
    }


def test_the_end_of_the_input_leaves_no_gradient_waiting() -> None:
    built = build(N60, deferral=DeferralConfig(share=0.9, min_visits=2, visits=100))
    while built.loop.step():
        pass
    assert built.loop.selection.deferral and built.loop.selection.deferral.num_waiting > 0
    assert not built.loop.finish() and built.loop.selection.deferral.num_waiting == 0


@pytest.mark.parametrize("deferral", [DeferralConfig(share=0.6, visits=1), DeferralConfig(share=0.0)])
def test_deferral_that_never_waits_is_bit_equal_to_none(deferral: DeferralConfig) -> None:
    assert rows(build(N60, deferral=deferral).train_all()) == rows(build(N60).train_all())


def test_a_batch_that_is_not_finite_leaves_what_waits_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
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
        and accounted(built)["taken"] == 60
    )


def test_a_correction_of_a_negative_is_trained_whatever_became_of_its_sample() -> None:
    number = min(skipped_numbers(NEGATIVES))
    correction = samples.corrected(number, 0)
    built = build(
        samples.placed([*CLICKS, correction]),
        selection=NEGATIVES,
        corrections="on",
        partitions=(("samples", 0), ("samples", 1), ("corrections", 0), ("corrections", 1)),
    ).train_all()
    assert built.loop.counts.corrections == 1 and built.pushes()[number] == 1
    assert accounted(built)["taken"] == 60


def test_the_loss_of_what_is_kept_is_divided_by_the_kept_candidates_and_not_by_their_weights() -> None:
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
        "the sum of weights cancels them"
    )
    assert selection.weight_targets(Targets(label, label), part) == Targets(label, label)


SLIPSTREAM = SlipstreamConfig(
    hot_ratio=1e-4, warm_up_steps=4, snapshots=3, snapshot_steps=2, drop=0.5, hot_share=0.5, unvisited="stale"
)


def returning_users(count: int) -> list[Record]:
    numbers = list(range(1, count + 1))
    return [
        r._replace(value=samples.sample(n, user=n % 5 + 1))
        for n, r in zip(numbers, samples.records(numbers), strict=True)
    ]


def slipping(**more: Any) -> Built:
    config = SelectionConfig(policy="slipstream", slipstream=SLIPSTREAM)
    return build(returning_users(240), selection=config, exact=True, **more)


def test_slipstream_counts_looks_classifies_and_skips_stale_inputs() -> None:
    built = slipping().train_all()
    skipped = {p.step for p in built.predicted if p.disposition == pb.DISPOSITION_STALE}
    assert skipped and min(skipped) > SLIPSTREAM.last_snapshot + 16
    report = built.loop.selection.report()
    assert (
        report["slipstream_phase"] == 2 and report["slipstream_hot_rows"] == 12 and report["skip_share"] > 0.1
    )
    assert accounted(built)["stale"] == len(
        [p for p in built.predicted if p.disposition == pb.DISPOSITION_STALE]
    )
    assert "slipstream.numbers" in built.loop.snapshot().shared


def test_slipstream_tells_its_phase() -> None:
    built, phases = slipping(), []
    its = built.loop.selection.slipstream
    assert its is not None
    for _ in range(SLIPSTREAM.last_snapshot):
        phases.append(its.report()["phase"])
        built.loop.step()
    between = SLIPSTREAM.last_snapshot - SLIPSTREAM.warm_up_steps
    assert phases == [0] * SLIPSTREAM.warm_up_steps + [1] * between and its.phase == 2
    assert its.report()["hot_rows"]
    its.end()
    assert its.phase == 3 and its.report()["hot_rows"] == 0, "nothing is remembered"
    assert SlipstreamPolicy(SLIPSTREAM, samples.schema()).phase == 0, "before anything is loaded, too"


def test_slipstream_counts_each_access_of_each_request_once() -> None:
    built = slipping()
    assert built.loop.step() and built.loop.step()
    its = built.loop.selection.slipstream
    assert its is not None and its.num_counted == built.loop.counts.requests == 8
    totals = sorted(counts.total for counts in its.counts.values())
    assert totals == [8, 3 * 8], "a user a request, and an item a candidate"


def test_slipstream_looks_when_the_warm_up_ends_and_every_so_many_steps_behind_it() -> None:
    its, looked, at = (
        SlipstreamPolicy(dataclasses.replace(SLIPSTREAM, snapshot_steps=3), samples.schema()),
        list[int](),
        0,
    )

    def pull(lookup: Lookup) -> dict[str, np.ndarray]:
        looked.append(at)
        return {stack: np.zeros((len(of.id_U), 1), np.float32) for stack, of in lookup.stacks.items()}

    for at in range(1, 20):
        its.on_trained(at, [], pull)
    assert looked == [4, 7, 10] and its.T is not None


def test_slipstream_says_which_share_of_the_hot_rows_no_step_has_visited() -> None:
    its = SlipstreamPolicy(SLIPSTREAM, samples.schema())
    assert its.report()["unvisited_share"] is None
    for n, stack in enumerate(samples.schema().stacks):
        its.hot[stack] = _HotStack(np.zeros(4, np.uint32), np.arange(4))
        its.hot[stack].visited_N[: n + 1] = True
    assert (
        len(its.hot) == 2 and its.report()["unvisited_share"] == 1 - 3 / 8 and its.report()["hot_rows"] == 8
    )


@pytest.mark.parametrize("steps", [2, 4, 5, 6, 8, 9, 20, 30, 45])
def test_g11_slipstream_restored_in_any_phase_ends_in_the_same_bits_and_skips(steps: int) -> None:
    whole, again = slipping(), slipping()
    for _ in range(steps):
        whole.loop.step()
    again.shard.rows = {key: row.copy() for key, row in whole.shard.rows.items()}
    again.loop.restore(whole.loop.snapshot())
    whole.train_all()
    again.train_all()
    assert weights(whole) == weights(again) and rows(whole) == rows(again)
    tail = [(p.sample_id, p.disposition) for p in whole.predicted][-len(again.predicted) :]
    assert tail == [(p.sample_id, p.disposition) for p in again.predicted]


def test_slipstream_with_the_papers_search_has_an_interval_and_keeps_it() -> None:
    sampled = dataclasses.replace(SLIPSTREAM, sample=MIN_SAMPLE)
    built = build(
        returning_users(240), selection=SelectionConfig(policy="slipstream", slipstream=sampled), exact=True
    )
    for _ in range(30):
        built.loop.step()
    its, exact = built.loop.selection.slipstream, slipping()
    for _ in range(30):
        exact.loop.step()
    assert its is not None and exact.loop.selection.slipstream is not None
    assert its.inputs.num_inputs < MIN_SAMPLE, "all of them"
    assert its.half_width == 0 and its.T is not None and math.isfinite(its.T)
    assert its.realised == exact.loop.selection.slipstream.realised, "so it skips what the exact one does"
    report = built.loop.selection.report()
    assert (
        report["slipstream_half_width"] == 0
        and exact.loop.selection.report()["slipstream_half_width"] is None
    )
    its.half_width = 0.125
    kept = its.state()
    its.load({})
    assert its.half_width is None
    its.load(kept)
    assert its.half_width == 0.125


def test_slipstream_is_for_logs_that_end_and_is_over_when_the_stream_begins() -> None:
    built = slipping()
    for _ in range(30):
        built.loop.step()
    with pytest.raises(
        ConfigError, match=r"selection\.policy: expected off, negatives or random for a stream"
    ):
        built.loop.selection.begin_phase(finite=False, handed_over=False)
    built.loop.selection.begin_phase(finite=True, handed_over=False)
    assert built.loop.selection.slipstream and built.loop.selection.slipstream.phase == 2
    built.loop.selection.begin_phase(finite=False, handed_over=True)
    before = accounted(built).get("stale", 0)
    built.train_all()
    assert accounted(built).get("stale", 0) == before, "everything is trained again"
    assert list(built.loop.selection.state()) == ["slipstream.over"]


@pytest.mark.parametrize(
    "settings", [{"selection": SelectionConfig(policy="slipstream")}, {"deferral": DeferralConfig(share=0.5)}]
)
def test_what_needs_all_visits_of_a_row_is_refused_to_several_workers(settings: Any) -> None:
    selection = build(CLICKS, **settings).loop.selection
    selection.validate(workers=1)
    with pytest.raises(ConfigError, match="with 2 workers"):
        selection.validate(workers=2)


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
    assert {n: 1 for n in refilled.pushes()} == refilled.pushes() == plain.pushes(), "the same ones, once"
    assert accounted(refilled) == accounted(plain) and refilled.offsets() == plain.offsets() == [120, 120]
    kept = accounted(plain)["trained"] / 240
    assert plain.loop.num_steps == 60 and refilled.loop.num_steps < 60 * (kept + 0.2), (
        "about as many are trained in each"
    )


def test_nothing_is_read_for_more_where_nothing_is_skipped_or_nobody_asked() -> None:
    off = build(N60, selection=SelectionConfig(refill=True)).train_all()
    assert weights(off) == weights(build(N60).train_all()), "to the bit"
    half = SelectionConfig(policy="random", keep=0.5)
    plain, refilled = (
        build(N60, selection=half).train_all(),
        build(N60, selection=dataclasses.replace(half, refill=True)),
    )
    assert plain.loop.selection.chunk_size(64) == 64 == refilled.loop.selection.chunk_size(64)
    refilled.train_all()
    assert 90 < refilled.loop.selection.chunk_size(64) < 200
    few = build(one_candidate([n for n in NUMBERS if n in skipped_numbers(NEGATIVES)]), selection=NEGATIVES)
    few.loop.selection.config = dataclasses.replace(NEGATIVES, refill=True)
    few.loop.step()
    assert few.loop.selection.chunk_size(3) == 10, (
        "a chunk of which nothing was kept says nothing: no more than 1 / keep"
    )
    assert refilled.loop.selection.chunk_size(1 << 16) == 1 << 16, "a chunk has a budget, whatever is skipped"


def test_refilled_chunks_are_refused_to_exact_mode() -> None:
    with pytest.raises(ConfigError, match=r"selection\.refill.: expected false with exact = true"):
        build(N60, selection=SelectionConfig(policy="random", refill=True), exact=True)


# What Slipstream says


def said_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_slipstream_says_once_that_it_needs_its_control(caplog: pytest.LogCaptureFixture) -> None:
    built = slipping()
    for _ in range(5):
        built.loop.step()
    (told,) = said_by(caplog)
    assert "random" in told and "policy = 'random'" in told
    build(CLICKS, selection=NEGATIVES).train_all()
    assert len(said_by(caplog)) == 1, "of it alone"


def test_slipstream_says_how_much_it_skips_and_when_that_is_not_what_was_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    built = slipping().train_all()
    realised = built.loop.selection.report()["slipstream_realised_drop"]
    assert 0 < realised <= SLIPSTREAM.drop
    told = [text for text in said_by(caplog) if "expected to skip" in text]
    assert len(told) == (abs(realised - SLIPSTREAM.drop) > 0.05)
    caplog.clear()
    alike = dataclasses.replace(SLIPSTREAM, alpha=0.01, drop=0.01)
    build(
        returning_users(240), selection=SelectionConfig(policy="slipstream", slipstream=alike), exact=True
    ).train_all()
    assert not [text for text in said_by(caplog) if "expected to skip" in text], "within 5 points"
    all_or_none = dataclasses.replace(SLIPSTREAM, drop=0.99, unvisited="varying", alpha=1.0)
    build(
        returning_users(240),
        selection=SelectionConfig(policy="slipstream", slipstream=all_or_none),
        exact=True,
    ).train_all()
    assert [text for text in said_by(caplog) if "99 %" in text]


def test_slipstream_says_when_no_input_is_hot_and_when_a_sight_makes_a_row_hot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cold = dataclasses.replace(SLIPSTREAM, hot_ratio=0.9, hot_share=1.0)
    built = build(
        returning_users(100), selection=SelectionConfig(policy="slipstream", slipstream=cold), exact=True
    ).train_all()
    assert [text for text in said_by(caplog) if "no input was hot" in text]
    assert "stale" not in accounted(built)
    caplog.clear()
    few = dataclasses.replace(SLIPSTREAM, count_requests=8)
    build(
        returning_users(100), selection=SelectionConfig(policy="slipstream", slipstream=few), exact=True
    ).train_all()
    assert [text for text in said_by(caplog) if "hot_ratio" in text]


@pytest.mark.parametrize(("steps", "early"), [(3, True), (30, False)])
def test_slipstream_says_that_it_is_over_and_whether_it_ever_began(
    steps: int, early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    built = slipping()
    for _ in range(steps):
        built.loop.step()
    caplog.clear()
    for _ in range(2):
        built.loop.selection.begin_phase(finite=False, handed_over=True)
    (told,) = said_by(caplog)
    assert "slipstream ends" in told and ("nothing was skipped" in told) == early


@pytest.mark.parametrize("steps", [2, 6, 30])
def test_rows_of_tables_that_are_gone_are_forgotten_with_a_word(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, again = slipping(), slipping()
    for _ in range(steps):
        whole.loop.step()
    state = dict(whole.loop.selection.state())
    stack, table = next((k.split(".")[1], x) for k, x in state.items() if k.endswith(".table"))
    gone = table.copy()
    gone[0] = 99
    state[f"slipstream.{stack}.table"] = gone
    course = again.loop.selection.slipstream
    assert course is not None
    caplog.clear()
    course.load(state)
    assert [text for text in said_by(caplog) if "forgot 1 " in text]
    left = course.state()
    assert (
        99 not in left[f"slipstream.{stack}.table"] and len(left[f"slipstream.{stack}.id"]) == len(gone) - 1
    )
    again.shard.rows = {key: row.copy() for key, row in whole.shard.rows.items()}
    at = whole.loop.snapshot()
    again.loop.restore(dataclasses.replace(at, shared={**at.shared, **state}))
    accounted(again.train_all())
