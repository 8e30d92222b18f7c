"""What is trained once more: which batches, how much of them is kept, through restores, and nobody takes it
for a request."""

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
from tests.trainer.selection.drawn_batches import drawn_batch
from trainer.rows import PushTimes
from trainer.selection.config import RehearsalConfig
from trainer.selection.rehearsal import Rehearsal, decode_batch, encode_batch

N24 = samples.records(list(range(1, 25)))
ON = RehearsalConfig(batches=3)


def batch_of(*numbers: int) -> Batch:
    return Decoder(samples.schema(), {}.get).decode(samples.records(list(numbers)))[0]


def rehearsal(**settings: Any) -> Rehearsal:
    return Rehearsal(RehearsalConfig(**{"batches": 3, **settings}), samples.schema(), seed=7)


def drawn(of: Rehearsal, steps: range = range(60)) -> list[tuple[int, ...]]:
    """The requests of each draw."""
    return [tuple(part.batch.sample_id_R.tolist()) for step in steps if (part := of.draw(step))]


def test_a_batch_is_decoded_as_it_was_encoded_in_every_column() -> None:
    batches = batch_of(1, 2, 3), batch_of(5).take_requests(np.zeros(0, np.int64)), drawn_batch(3)
    assert batches[2].ro_lists.columns and len(batches[2].ro_lists.values)
    for batch in batches:
        again = decode_batch(encode_batch(batch), batch.schema)
        for field in dataclasses.fields(Batch):
            mine, theirs = getattr(batch, field.name), getattr(again, field.name)
            if isinstance(mine, np.ndarray):
                assert (
                    mine.dtype == theirs.dtype
                    and mine.shape == theirs.shape
                    and mine.tobytes() == theirs.tobytes()
                )
        for mine, theirs in ((batch.ro_lists, again.ro_lists), (batch.nro_lists, again.nro_lists)):
            assert mine.keys == theirs.keys and mine.columns.keys() == theirs.columns.keys()
            assert (
                mine.values.tolist() == theirs.values.tolist()
                and mine.lengths_KN.tolist() == theirs.lengths_KN.tolist()
            )
            assert all(mine.columns[name].tolist() == theirs.columns[name].tolist() for name in mine.columns)


def test_draws_depend_on_seed_and_step_only() -> None:
    mine, theirs = rehearsal(), rehearsal()
    assert mine.draw(1) is None, "nothing is kept yet"
    for number in range(1, 6):
        mine.keep(batch_of(number))
    for number in range(3, 6):
        theirs.keep(batch_of(number))
    assert set(drawn(mine)) == {(3,), (4,), (5,)}
    assert drawn(mine) == drawn(theirs) != drawn(dataclass_seed(theirs, 8))


def dataclass_seed(of: Rehearsal, seed: int) -> Rehearsal:
    other = Rehearsal(of.config, of.schema, seed)
    other.load(of.state())
    return other


def test_kept_batches_are_bounded_in_bytes() -> None:
    one = len(encode_batch(batch_of(1)))
    few = rehearsal(batches=100, max_bytes=3 * one + one // 2)
    for number in range(1, 9):
        few.keep(batch_of(number))
        assert few.num_bytes <= few.config.max_bytes
    assert set(drawn(few)) == {(6,), (7,), (8,)} and few.report() == {
        "rehearsal_batches": 3,
        "rehearsal_bytes": few.num_bytes,
    }
    few.keep(batch_of(*range(1, 200)))
    assert set(drawn(few)) == {(6,), (7,), (8,)}, "a batch that fits alone in no bound changes nothing"


def test_a_restore_draws_the_same_batches_and_none_of_another_schema() -> None:
    before, after = rehearsal(), rehearsal()
    for number in (1, 2, 3):
        before.keep(batch_of(number))
    after.keep(batch_of(9))
    after.load(before.state())
    assert drawn(after) == drawn(before) and after.num_bytes == before.num_bytes
    after.load({**before.state(), "rehearsal.schema": np.array([1], np.uint64)})
    assert after.num_batches == after.num_bytes == 0
    after.load({})
    assert after.num_batches == 0


def test_each_request_is_reported_once_and_rehearsed_ones_are_counted_separately() -> None:
    built = build(N24, rehearsal=ON).train_all()
    loop = built.loop
    assert (
        [p.sample_id for p in built.predicted] == list(range(1, 25))
        and loop.num_steps == 6
        and loop.optimizer.num_steps == 11
    )
    assert loop.counts.requests == loop.outcomes.total["trained"] == 24 and loop.counts.rehearsed == 20
    assert loop.report()["requests"] == 24 and built.offsets() == [12, 12]
    pushes = built.pushes()
    assert sum(pushes.values()) == 24 + 20 and max(pushes.values()) > 1, "a user a request"
    assert max(pushes[number] for number in range(21, 25)) == 1, (
        "the newest batch is drawn behind its own step at the earliest"
    )


def test_a_rehearsed_push_reports_no_freshness(monkeypatch: pytest.MonkeyPatch) -> None:
    built, seen = build(N24, rehearsal=ON), list[PushTimes]()
    push = built.loop.rows.push
    monkeypatch.setattr(
        built.loop.rows,
        "push",
        lambda lookup, gradients, times: (seen.append(times), push(lookup, gradients, times)),
    )
    built.train_all()
    news = [times.oldest_close_ms > 0 for times in seen]
    assert news == [True, True, False, True, False, True, False, True, False, True, False]
    assert [times.step for times in seen] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def num_kept(built: Built) -> int:
    assert built.loop.selection.rehearsal is not None
    return built.loop.selection.rehearsal.num_batches


def test_g11_a_restored_loop_rehearses_the_same_batches() -> None:
    assert_a_restored_loop_continues_bit_equal(N24, 3, rehearsal=ON)


def test_kept_batches_are_those_of_the_restored_commit() -> None:
    at = build(N24[:12], rehearsal=ON).train_all().loop.snapshot()
    forgot = build(N24, rehearsal=ON)
    forgot.loop.restore(at)
    assert num_kept(forgot) == 3
    forgot.loop.restore(build(N24).loop.snapshot())
    assert num_kept(forgot) == 0, "of a commit without any"
    forgot.loop.restore(at)
    forgot.loop.reset()
    assert num_kept(forgot) == 0


def test_frozen_requests_cause_no_rehearsal() -> None:
    built = build(N24, rehearsal=ON, freeze_at_ms=samples.T0 + 12_500).train_all()
    assert built.loop.counts.frozen and built.loop.counts.rehearsed == 4 * (
        built.loop.optimizer.num_steps // 2
    )


def test_a_rehearsed_batch_with_non_finite_results_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(N24, rehearsal=ON)
    monkeypatch.setattr(built.loop.dense_trainer, "train_unscored", lambda pulled, targets, is_new: False)
    built.train_all()
    assert built.loop.counts.rehearsed == 0 and built.bits() == build(N24).train_all().bits()
    pulled = built.loop.pull_part(built.loop.selection.rehearsal.draw(1))  # type: ignore[union-attr, arg-type]
    monkeypatch.undo()
    with torch.no_grad():
        for rows_UD in pulled.inputs.rows.values():
            rows_UD.fill_(torch.nan)
    assert not built.loop.dense_trainer.train_unscored(pulled, built.loop.targets(pulled.part))


def test_a_rehearsed_batch_does_not_tell_which_part_of_the_model_predicts_better() -> None:
    built = build(N24, rehearsal=ON).train_all()
    part = built.loop.model.linear
    assert isinstance(part, LinearPart)
    share_T, weight_TF = part.share.detach().clone(), part.weight.detach().clone()
    pulled = built.loop.pull_part(built.loop.selection.rehearsal.draw(1))  # type: ignore[union-attr, arg-type]
    assert built.loop.dense_trainer.train_unscored(pulled, built.loop.targets(pulled.part), is_new=False)
    assert torch.equal(part.share, share_T) and not torch.equal(part.weight, weight_TF)
