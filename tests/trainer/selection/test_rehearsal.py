"""Rehearsal trains earlier batches again: which batches it draws, how many it keeps, what a restore brings
back, and that rehearsed requests are counted separately."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from roostream.models.linear_part import LinearPart
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from tests.trainer import samples
from tests.trainer.loops import Built, assert_a_restored_loop_continues_bit_equal, build
from tests.trainer.selection.random_batches import random_batch
from trainer.rows import PushTimes
from trainer.selection.config import RehearsalConfig
from trainer.selection.rehearsal import Rehearsal, decode_batch, encode_batch

N24 = samples.records(list(range(1, 25)))
REHEARSAL = RehearsalConfig(batches=3)


def batch_of(*numbers: int) -> Batch:
    return Decoder(samples.schema(), {}.get).decode(samples.records(list(numbers)))[0]


def make_rehearsal(**settings: Any) -> Rehearsal:
    return Rehearsal(RehearsalConfig(**{"batches": 3, **settings}), samples.schema(), seed=7)


def draws(rehearsal: Rehearsal, steps: range = range(60)) -> list[tuple[int, ...]]:
    """Return the request ids of the batch that each step draws."""
    return [tuple(part.batch.sample_id_R.tolist()) for step in steps if (part := rehearsal.draw(step))]


def test_decode_batch_is_the_inverse_of_encode_batch() -> None:
    batches = batch_of(1, 2, 3), batch_of(5).take_requests(np.zeros(0, np.int64)), random_batch(3)
    assert batches[2].ro_lists.columns and len(batches[2].ro_lists.values)
    for batch in batches:
        decoded = decode_batch(encode_batch(batch), batch.schema)
        for field in dataclasses.fields(Batch):
            original, copy = getattr(batch, field.name), getattr(decoded, field.name)
            if isinstance(original, np.ndarray):
                assert (
                    original.dtype == copy.dtype
                    and original.shape == copy.shape
                    and original.tobytes() == copy.tobytes()
                )
        for original, copy in ((batch.ro_lists, decoded.ro_lists), (batch.nro_lists, decoded.nro_lists)):
            assert original.keys == copy.keys and original.columns.keys() == copy.columns.keys()
            assert (
                original.values.tolist() == copy.values.tolist()
                and original.lengths_KN.tolist() == copy.lengths_KN.tolist()
            )
            assert all(
                original.columns[name].tolist() == copy.columns[name].tolist() for name in original.columns
            )


def test_draws_depend_on_seed_and_step_only() -> None:
    first, second = make_rehearsal(), make_rehearsal()
    assert first.draw(1) is None, "no batch has been kept yet"
    for number in range(1, 6):
        first.keep(batch_of(number))
    for number in range(3, 6):
        second.keep(batch_of(number))
    assert set(draws(first)) == {(3,), (4,), (5,)}
    assert draws(first) == draws(second) != draws(with_seed(second, 8))


def with_seed(rehearsal: Rehearsal, seed: int) -> Rehearsal:
    other = Rehearsal(rehearsal.config, rehearsal.schema, seed)
    other.load(rehearsal.state())
    return other


def test_kept_batches_are_bounded_in_bytes() -> None:
    one = len(encode_batch(batch_of(1)))
    small = make_rehearsal(batches=100, max_bytes=3 * one + one // 2)
    for number in range(1, 9):
        small.keep(batch_of(number))
        assert small.num_bytes <= small.config.max_bytes
    assert set(draws(small)) == {(6,), (7,), (8,)} and small.report() == {
        "rehearsal_batches": 3,
        "rehearsal_bytes": small.num_bytes,
    }
    small.keep(batch_of(*range(1, 200)))
    assert set(draws(small)) == {(6,), (7,), (8,)}, "a batch larger than max_bytes is not kept"


def test_a_restore_draws_the_same_batches_and_none_of_another_schema() -> None:
    before, after = make_rehearsal(), make_rehearsal()
    for number in (1, 2, 3):
        before.keep(batch_of(number))
    after.keep(batch_of(9))
    after.load(before.state())
    assert draws(after) == draws(before) and after.num_bytes == before.num_bytes
    after.load({**before.state(), "rehearsal.schema": np.array([1], np.uint64)})
    assert after.num_batches == after.num_bytes == 0
    after.load({})
    assert after.num_batches == 0


def test_each_request_is_reported_once_and_rehearsed_ones_are_counted_separately() -> None:
    built = build(N24, rehearsal=REHEARSAL).train_all()
    loop = built.loop
    assert (
        [p.sample_id for p in built.predicted] == list(range(1, 25))
        and loop.num_steps == 6
        and loop.optimizer.num_steps == 11
    )
    assert loop.counts.requests == loop.outcomes.total["trained"] == 24 and loop.counts.rehearsed == 20
    assert loop.report()["requests"] == 24 and built.offsets() == [12, 12]
    pushes = built.pushes()
    assert sum(pushes.values()) == 24 + 20 and max(pushes.values()) > 1, "each request has its own user row"
    assert max(pushes[number] for number in range(21, 25)) == 1, (
        "a batch is rehearsed only after the step that trained it"
    )


def test_a_rehearsed_push_reports_no_freshness(monkeypatch: pytest.MonkeyPatch) -> None:
    built, seen = build(N24, rehearsal=REHEARSAL), list[PushTimes]()
    push = built.loop.rows.push
    monkeypatch.setattr(
        built.loop.rows,
        "push",
        lambda lookup, gradients, times: (seen.append(times), push(lookup, gradients, times)),
    )
    built.train_all()
    is_new = [times.oldest_close_ms > 0 for times in seen]
    assert is_new == [True, True, False, True, False, True, False, True, False, True, False]
    assert [times.step for times in seen] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def num_kept(built: Built) -> int:
    assert built.loop.selection.rehearsal is not None
    return built.loop.selection.rehearsal.num_batches


def test_g11_a_restored_loop_rehearses_the_same_batches() -> None:
    assert_a_restored_loop_continues_bit_equal(N24, 3, rehearsal=REHEARSAL)


def test_kept_batches_are_those_of_the_restored_commit() -> None:
    snapshot = build(N24[:12], rehearsal=REHEARSAL).train_all().loop.snapshot()
    restored = build(N24, rehearsal=REHEARSAL)
    restored.loop.restore(snapshot)
    assert num_kept(restored) == 3
    restored.loop.restore(build(N24).loop.snapshot())
    assert num_kept(restored) == 0, "the restored commit has no batches"
    restored.loop.restore(snapshot)
    restored.loop.reset()
    assert num_kept(restored) == 0


def test_frozen_requests_cause_no_rehearsal() -> None:
    built = build(N24, rehearsal=REHEARSAL, freeze_at_ms=samples.T0 + 12_500).train_all()
    assert built.loop.counts.frozen and built.loop.counts.rehearsed == 4 * (
        built.loop.optimizer.num_steps // 2
    )


def test_a_rehearsed_batch_with_non_finite_results_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(N24, rehearsal=REHEARSAL)
    monkeypatch.setattr(built.loop.dense_trainer, "train_unscored", lambda pulled, targets, is_new: False)
    built.train_all()
    assert built.loop.counts.rehearsed == 0 and built.bits() == build(N24).train_all().bits()
    pulled = built.loop.pull_part(built.loop.selection.rehearsal.draw(1))  # type: ignore[union-attr, arg-type]
    monkeypatch.undo()
    with torch.no_grad():
        for rows_UD in pulled.inputs.rows.values():
            rows_UD.fill_(torch.nan)
    assert not built.loop.dense_trainer.train_unscored(pulled, built.loop.targets(pulled.part))


def test_a_rehearsed_batch_does_not_change_the_share_of_the_linear_part() -> None:
    built = build(N24, rehearsal=REHEARSAL).train_all()
    part = built.loop.model.linear
    assert isinstance(part, LinearPart)
    share_T, weight_TF = part.share.detach().clone(), part.weight.detach().clone()
    pulled = built.loop.pull_part(built.loop.selection.rehearsal.draw(1))  # type: ignore[union-attr, arg-type]
    assert built.loop.dense_trainer.train_unscored(pulled, built.loop.targets(pulled.part), is_new=False)
    assert torch.equal(part.share, share_T) and not torch.equal(part.weight, weight_TF)
