"""What isn't finite is named, as far as it can be known, and finding it out raises nothing."""

from __future__ import annotations

import math

import pytest
import torch

from tests.trainer import samples
from tests.trainer.loops import Built, build
from tests.trainer.test_dead_letter_quarantine import poisoned
from trainer.chunks import Chunk
from trainer.failure_policy import find_non_finite


def given() -> tuple[Built, Chunk]:
    built = build(samples.records([1, 2, 3, 4]))
    chunk = built.loop.source.poll(4, 0)
    assert chunk is not None
    return built, chunk


def test_a_sound_model_has_no_findings_and_stays_unchanged() -> None:
    built, chunk = given()
    before = {name: weight.clone() for name, weight in built.loop.model.state_dict().items()}
    assert find_non_finite(built.loop, chunk) == ()
    assert all(torch.equal(weight, before[name]) for name, weight in built.loop.model.state_dict().items())
    assert not built.shard.rows, "no row was made by looking"


def test_a_non_finite_row_is_named_with_its_effects() -> None:
    built, chunk = given()
    found = find_non_finite(poisoned(built, 2).loop, chunk)
    assert [line for line in found if line.startswith("rows of stack")] != []
    assert "scores of task click: 3 of 12 numbers are not finite" in found
    assert "the loss is not finite" in found
    assert any(line.startswith("gradient of dense weight") for line in found)
    assert not any(line.startswith("dense weight") for line in found)


def test_a_non_finite_weight_is_named_first() -> None:
    built, chunk = given()
    name, weight = next(iter(built.loop.model.named_parameters()))
    with torch.no_grad():
        weight.fill_(math.inf)
    n = weight.numel()
    assert (
        find_non_finite(built.loop, chunk)[0] == f"dense weight {name}: {n:,} of {n:,} numbers are not finite"
    )


def test_unavailable_rows_are_reported() -> None:
    built, chunk = given()
    built.transport.down = True
    (found,) = find_non_finite(built.loop, chunk)
    assert "pulled" in found


def test_an_error_in_the_search_is_reported_after_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    built, chunk = given()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(built.loop.model, "loss", fail)
    found = find_non_finite(poisoned(built, 2).loop, chunk)
    assert found[0].startswith("rows of stack") and found[-1].endswith("RuntimeError('no memory')")
