"""The training loop: which samples are trained, which are only scored, and which are left out and counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from roostream.errors import UnavailableError
from roostream.models.build import build_model
from roostream.models.inputs import INPUT_NAMES, Inputs, build_inputs
from roostream.models.model import Targets
from roostream.models.named_columns import COLUMN_NAMES
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.fake_shard import Row
from tests.trainer.loops import Built, build
from trainer.chunks import build_part, split_frozen
from trainer.config import LoopConfig
from trainer.device.numerics import set_numerics
from trainer.loop import Snapshot
from trainer.rows import clip_rows

N12 = samples.records(list(range(1, 13)))


def raw(number: int, value: bytes, close_ms: int = samples.T0) -> Record:
    return Record("samples", 0, number, close_ms, None, value)


def weights(built: Built) -> dict[str, np.ndarray]:
    return {k: v.detach().numpy().copy() for k, v in built.loop.model.state_dict().items()}


def test_every_request_is_scored_and_applied_once() -> None:
    built = build(N12).train_all()
    assert built.pushes() == dict.fromkeys(range(1, 13), 1)
    assert [p.sample_id for p in built.predicted] == list(range(1, 13)), (
        "samples of all partitions must be merged by event time"
    )
    assert built.offsets() == [6, 6] and built.loop.num_steps == 3
    assert (built.loop.counts.requests, built.loop.counts.candidates) == (12, 36)
    assert built.loop.watermark_ms == samples.T0 + 12_500


def test_scores_are_those_from_before_the_update() -> None:
    built = build(N12[:4])
    batch, _ = Decoder(samples.schema(), {}.get).decode(N12[:4])
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, built.loop.rows.pull(lookup))
    with torch.no_grad():
        expected_BT = torch.sigmoid(built.loop.model(inputs)).numpy()
    before = weights(built)
    assert built.loop.step()
    scores = [s for p in built.predicted for s in p.scores]
    assert scores == expected_BT.ravel().tolist()
    assert any((before[k] != v).any() for k, v in weights(built).items()), "the step must change the weights"


def sizes(built: Built) -> list[int]:
    """The number of requests of each step."""
    steps = [p.step for p in built.predicted]
    return [steps.count(step) for step in sorted(set(steps))]


RAMP = {"first_batch_requests": 1, "batch_growth_requests": 2, "batch_requests": 3}


def test_batches_grow_with_the_requests_trained() -> None:
    assert sizes(build(N12, **RAMP).train_all()) == [1, 1, 2, 3, 3, 2]
    assert sizes(build(N12, **{**RAMP, "batch_requests": 2}).train_all()) == [1, 1, 2, 2, 2, 2, 2]
    assert sizes(build(N12, **{**RAMP, "first_batch_requests": 9}).train_all()) == [3, 3, 3, 3], (
        "a batch must not exceed batch_requests"
    )


def test_exact_batches_are_full_and_take_turns_over_partitions() -> None:
    built = build(N12, exact=True, batch_requests=2).train_all()
    assert [p.sample_id % 2 for p in built.predicted] == [0, 0, 1, 1] * 3
    seven = build(N12[:7], exact=True, batch_requests=3).train_all()
    seven.clock.advance(60)
    assert not seven.loop.step() and seven.offsets() == [3, 3], "the seventh must wait for a full batch"


def test_g2_a_duplicate_sample_is_skipped() -> None:
    records = samples.records([1, 2, 3, 1, 2, 4])
    built = build(records).train_all()
    assert built.pushes() == {1: 1, 2: 1, 3: 1, 4: 1}
    assert built.loop.counts.duplicates == 2 and len(built.predicted) == 4
    assert built.offsets() == [3, 3]


def test_g6_a_bad_message_becomes_a_dead_letter_and_the_partition_moves_on() -> None:
    records = [
        raw(0, b"\x03\x01\xff\xff"),
        *[r._replace(partition=0, offset=i + 1) for i, r in enumerate(N12[:3])],
    ]
    built = build(records).train_all()
    (letter,) = built.letters
    assert (letter.reason, letter.topic, letter.partition, letter.offset) == ("undecodable", "samples", 0, 0)
    assert letter.raw == b"\x03\x01\xff\xff" and letter.raw_bytes == 4 and letter.error
    assert built.pushes() == {1: 1, 2: 1, 3: 1} and built.offsets()[0] == 4
    assert built.loop.counts.dead_letters == 1


def test_a_request_without_candidates_is_trained() -> None:
    alone = build([raw(0, samples.sample(1, num_candidates=0), samples.T0 + 1500)]).train_all()
    assert len(alone.predicted) == 1 and not alone.pushes() and alone.offsets()[0] == 1
    mixed = build(
        [
            raw(0, samples.sample(1, num_candidates=0), samples.T0 + 1500),
            raw(1, samples.sample(2), samples.T0 + 2500),
        ]
    ).train_all()
    assert mixed.pushes()[2] == 1 and len(mixed.predicted) == 2
    assert mixed.loop.counts.non_finite == 0


def test_requests_after_the_freeze_are_scored_but_not_trained() -> None:
    freeze_ms = samples.T0 + 7000
    built = build(N12, freeze_at_ms=freeze_ms)
    built.loop.step()
    built.loop.step()
    frozen = weights(built)
    built.train_all()
    assert built.pushes() == dict.fromkeys(range(1, 7), 1)
    assert [p.sample_id for p in built.predicted] == list(range(1, 13))
    assert built.loop.counts.frozen == 6 and built.offsets() == [6, 6]
    assert all((frozen[k] == v).all() for k, v in weights(built).items())


def poison(built: Built, *users: int) -> None:
    """Make the rows of these users NaN, so that their scores are not finite."""
    table = samples.schema().table_by_name["user"].id
    for user in users:
        built.shard.rows[table, user] = Row(np.full(2, math.nan, np.float32), np.ones(2, np.float32), 0)


def finite(report: Mapping[str, object]) -> bool:
    return all(math.isfinite(v) for v in report.values() if isinstance(v, (int, float)))


def test_a_non_finite_request_becomes_a_dead_letter_and_others_are_trained() -> None:
    built = build(N12, batch_requests=12)
    poison(built, 3, 8, 9)
    built.train_all()
    others = [n for n in range(1, 13) if n not in (3, 8, 9)]
    assert {n: p for n, p in built.pushes().items() if p} == dict.fromkeys(others, 1)
    assert [p.sample_id for p in built.predicted] == others and built.loop.report()["requests"] == len(others)
    assert all(math.isfinite(s) for p in built.predicted for s in p.scores) and finite(built.loop.report())
    assert [(x.reason, x.topic, x.partition, x.offset) for x in built.letters] == [
        ("non_finite", "samples", n % 2, (n - 1) // 2) for n in (3, 8, 9)
    ]
    assert [x.raw for x in built.letters] == [samples.sample(n) for n in (3, 8, 9)]
    assert built.offsets() == [6, 6]
    assert (built.loop.counts.non_finite, built.loop.counts.dead_letters) == (3, 3)
    assert all(np.isfinite(v).all() for v in built.loop.snapshot().shared.values())


def test_a_non_finite_request_that_is_only_scored_becomes_a_dead_letter() -> None:
    built = build(N12[:4], freeze_at_ms=1)
    poison(built, 2)
    built.train_all()
    assert [p.sample_id for p in built.predicted] == [1, 3, 4] and [x.offset for x in built.letters] == [0]
    assert built.loop.counts.frozen == 3 and finite(built.loop.report())


def test_a_non_finite_gradient_affects_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(N12[:4])
    loss = built.loop.model.loss

    def steep(inputs: Inputs, logits_BT: torch.Tensor, targets: Targets) -> torch.Tensor:
        return loss(inputs, logits_BT, targets) * (1e30 if len(inputs.ro_float_RG) > 1 else 1.0)

    monkeypatch.setattr(built.loop.model, "loss", steep)
    built.train_all()
    assert {n: p for n, p in built.pushes().items() if p} == dict.fromkeys(range(1, 5), 1), (
        "each request alone has a finite gradient"
    )
    assert not built.letters and built.loop.counts.requests == 4


def test_non_finite_weights_make_no_dead_letters() -> None:
    built = build(N12)
    built.loop.step()
    with torch.no_grad():
        next(iter(built.loop.model.parameters())).fill_(math.nan)
    with pytest.raises(UnavailableError, match="dense weights"):
        built.loop.step()
    assert not built.letters and sum(built.offsets()) == 4


def test_row_gradients_are_clipped_to_their_maximum_norm() -> None:
    gradient_UD = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-3e18, 0.0]])
    assert clip_rows({"s": gradient_UD}, 1.0)
    torch.testing.assert_close(gradient_UD, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [-1.0, 0.0]]))
    kept, bad = torch.tensor([[5.0, 0.0]]), torch.tensor([[1e20, 0.0]])
    assert not clip_rows({"s": kept, "t": bad}, 1.0) and kept[0, 0] == 5.0 and bad[0, 0] == 1e20


def bits(snapshot: Snapshot) -> dict[str, bytes]:
    of_partitions = {
        f"{partition} {name}": value
        for partition, cut in snapshot.partitions.items()
        for name, value in cut.tensors.items()
    }
    return {name: value.tobytes() for name, value in (snapshot.shared | of_partitions).items()}


def test_a_prepared_chunk_is_not_in_a_snapshot_until_trained() -> None:
    built = build(N12)
    first, second = (built.loop.source.poll(4, 0.0) for _ in range(2))
    assert first is not None and second is not None
    before = bits(built.loop.snapshot())
    prepared = built.loop.pull(built.loop.claim(first))
    assert bits(built.loop.snapshot()) == before and built.offsets() == [0, 0]
    ahead = built.loop.pull(built.loop.claim(second))
    built.loop.train(prepared)
    at = built.loop.snapshot()
    assert sum(at.progress.values()) == 4
    assert sum(cut.dedupe.num_ids for cut in at.partitions.values()) == 4
    built.loop.train(ahead)
    assert built.pushes() == dict.fromkeys(range(1, 9), 1) and sum(built.offsets()) == 8


def test_unused_stacks_are_not_pushed() -> None:
    built = build(N12)
    (unused, *_) = built.loop.schema.stacks
    forward = built.loop.model.forward

    def without(inputs: Inputs) -> torch.Tensor:
        hidden = {**inputs.rows, unused: inputs.rows[unused].detach()}
        return forward(dataclasses.replace(inputs, rows=hidden))

    built.loop.model.forward = without  # type: ignore[method-assign]
    built.loop.step()
    (pushed,) = built.shard.push_headers
    assert pushed["stacks"] == [s for s in built.loop.schema.stacks if s != unused]


def sample_at(number: int, close_ms: int) -> Record:
    """Sample `number` at offset `number - 1` of partition 0."""
    value = samples.sample(number, close_ms=close_ms)
    return Record("samples", 0, number - 1, close_ms, number.to_bytes(8, "little"), value)


def test_g8_a_wrong_close_time_moves_the_watermark_only_by_a_bound() -> None:
    close_ms = [samples.T0 + 1000 * n for n in range(12)]
    close_ms[5] = 1 << 50
    built = build([sample_at(n + 1, t) for n, t in enumerate(close_ms)])
    built.train_all()
    pushed_ms = [header["time_ms"] for header in built.shard.push_headers]
    assert pushed_ms == [samples.T0 + 1000 * n for n in (3, 7, 11)]
    assert built.loop.watermark_ms == samples.T0 + 11_000 and sum(built.offsets()) == 12


def test_a_reset_loop_is_untrained() -> None:
    built, fresh = build(N12).train_all(), build(N12)
    built.loop.reset()
    assert all((weights(fresh)[k] == v).all() for k, v in weights(built).items())
    assert built.offsets() == [0, 0] and not built.loop.report()["requests"] and built.loop.num_steps == 0


def test_freshness_is_measured_only_near_real_time() -> None:
    built = build(N12[:4])
    built.clock.advance(6)
    built.loop.step()
    assert built.stages == [("close_to_readable", 4500.0), ("readable_to_trained", 0.0)]
    replay = build(N12[:4])
    replay.clock.advance(86_400 * 300)
    replay.loop.step()
    assert replay.stages == [], "in a replay, the wall clock says nothing about freshness"


def test_exact_mode_uses_one_thread_and_deterministic_layers() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        set_numerics(LoopConfig(threads=3))
        assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == (before[0], 3)
        set_numerics(LoopConfig(threads=3, exact=True))
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
        assert build(N12, exact=True).train_all().pushes(), (
            "every layer must have a deterministic implementation"
        )
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_num_threads(before[1])


# `deduplicate`: request-only features that requests share are computed once. The results stay the same.


def test_lookups_are_deduplicated_only_if_requested() -> None:
    batch = Decoder(samples.schema(), {}.get).decode(N12)[0].take_requests(np.array([0, 0, 0, 1]))
    assert build_part(batch, trains=True).lookup.unique is None
    (part,) = split_frozen(batch, 0, deduplicated=True)
    assert part.lookup.unique is not None and part.lookup.unique.row_N.tolist() == [0, 0, 0, 1]
    between_ms = int(batch.time_ms_R.max())
    parts = split_frozen(batch, between_ms, deduplicated=True)
    assert [p.lookup.unique is not None for p in parts] == [True, False], "a single request shares nothing"


def test_training_with_deduplication_gives_the_same_scores() -> None:
    plain, shared = (build(N12, deduplicate=value).train_all() for value in (False, True))
    for one, other in zip(plain.predicted, shared.predicted, strict=True):
        assert one.sample_id == other.sample_id
        assert list(other.scores) == pytest.approx(list(one.scores), abs=1e-6)
    assert shared.pushes() == plain.pushes() and shared.loop.num_steps == plain.loop.num_steps


RANK = {"input": "age", "op": "rank"}
SCHEMAS = {
    "same": samples.TABLES,
    "a transform more": {**samples.TABLES, "transform": [RANK]},  # its fingerprint is the same
    "another float": {**samples.TABLES, "nro": [samples.TABLES["nro"][0], {"name": "price"}]},
    "another order": {**samples.TABLES, "nro": [{"name": "price"}, *samples.TABLES["nro"]]},
    "a wider table": {
        **samples.TABLES,
        "tables": {**samples.TABLES["tables"], "item": {"dim": 6, "rule": "rowwise_adagrad"}},
    },
}
IN_PLACE = {**samples.TABLES, "transform": [{"input": "age", "op": "log1p"}]}  # names stay


def restored(at: Snapshot, change: str) -> Built:
    """A loop with a changed schema that is restored from a snapshot."""
    built = build([])
    built.loop.schema = schema_from_dict({**SCHEMAS, "a transform in place": IN_PLACE}[change])
    built.loop.restore(at, same_schema=built.loop.schema.fingerprint == samples.schema().fingerprint)
    return built


def without(at: Snapshot, name: str) -> Snapshot:
    return dataclasses.replace(at, shared={k: v for k, v in at.shared.items() if k != name})


@pytest.mark.parametrize("change", SCHEMAS)
def test_weights_that_read_changed_features_are_initialized_if_a_commit_does_not_name_their_columns(
    change: str,
) -> None:
    before = build(N12).train_all()
    after = restored(without(before.loop.snapshot(), COLUMN_NAMES), change)
    kept, now = weights(before), weights(after)
    initial = build_model(after.loop.schema, samples.MODEL, after.loop.config.seed).state_dict()
    for name in ("linear.weight", "cross.layers.0.weight", "dense.layers.0.weight"):
        expected = kept[name] if change == "same" else initial[name].numpy()
        if not (change == "a wider table" and name == "linear.weight"):  # the linear part reads no rows
            assert np.array_equal(now[name], expected), name
        optimizer = after.loop.optimizer.slots
        assert change == "same" or name not in optimizer or not optimizer[name]["exp_avg"].any()
    for name in ("heads.towers.0.layers.0.weight", "request_tower.layers.0.weight"):
        assert np.array_equal(now[name], kept[name]), name


@pytest.mark.parametrize("change", SCHEMAS)
def test_columns_of_unchanged_features_keep_their_weights_and_optimizer_state(change: str) -> None:
    before = build(N12).train_all()
    moment = before.loop.optimizer.slots["dense.layers.0.weight"]["exp_avg"]
    moment.copy_(1 + torch.arange(moment.numel()).view(moment.shape))
    after = restored(before.loop.snapshot(), change)
    kept, now = weights(before), weights(after)
    moments = [b.loop.optimizer.slots["dense.layers.0.weight"]["exp_avg"].numpy() for b in (before, after)]
    old, new = (b.loop.model.column_names()["dense.layers.0.weight"][1] for b in (before, after))
    assert old is not None and new is not None and (old == new) == (change == "same")
    unchanged = [column for column in new if column in old]
    assert len(unchanged) == len(old) - 2 * (change == "another float")
    at_old, at_new = [old.index(c) for c in unchanged], [new.index(c) for c in unchanged]
    for old_weight, weight in (
        (kept["dense.layers.0.weight"], now["dense.layers.0.weight"]),
        (moments[0], moments[1]),
    ):
        assert np.array_equal(weight[:, at_new], old_weight[:, at_old])
        assert not np.delete(weight, at_new, axis=1).any()


@pytest.mark.parametrize("change", SCHEMAS)
def test_a_restore_with_other_features_requests_a_commit_for_serving(change: str) -> None:
    at = build(N12).train_all().loop.snapshot()
    assert restored(at, change).loop.num_steps - at.step == (change != "same")


def test_a_restore_with_other_values_of_a_feature_keeps_weights_and_requests_a_commit_for_serving() -> None:
    before = build(N12).train_all()
    at = before.loop.snapshot()
    after = restored(at, "a transform in place")
    for name, weight in weights(before).items():
        assert np.array_equal(weights(after)[name], weight), name
    assert after.loop.num_steps == at.step + 1
    again = restored(after.loop.snapshot(), "a transform in place")
    assert again.loop.num_steps == after.loop.num_steps


def test_a_commit_after_a_changed_transform_continues_bit_for_bit() -> None:
    changed = restored(build(N12).train_all().loop.snapshot(), "a transform more")
    again = restored(changed.loop.snapshot(), "a transform more")
    assert changed.bits() == again.bits()


def test_a_commit_without_names_of_inputs_is_restored_if_the_schema_is_unchanged() -> None:
    at = build(N12).train_all().loop.snapshot()
    old = without(without(at, INPUT_NAMES), COLUMN_NAMES)
    assert restored(old, "same").bits() == restored(at, "same").bits()


def test_freshness_is_never_negative() -> None:
    built = build(N12[:4])
    built.clock.advance(6)
    forward = built.loop.model.forward

    def set_back(inputs: Inputs) -> torch.Tensor:
        built.clock.jump(-3_600_000)
        return forward(inputs)

    built.loop.model.forward = set_back  # type: ignore[method-assign]
    built.loop.step()
    assert built.stages[-1] == ("readable_to_trained", 0.0), "a sum that falls looks like a restart"
