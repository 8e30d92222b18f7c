"""What no restore mends ends training with the batch in hand saved; what one may mend doesn't."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from roostream.errors import UnavailableError
from tests.trainer import samples
from tests.trainer.loops import Built, build
from tests.trainer.test_loop import poison
from tests.trainer.test_worker import Stage
from trainer.chunks import Chunk, Rejected
from trainer.dead_letter_quarantine import MAX_CONSECUTIVE, DeadLetterQuarantine, NotFiniteError
from trainer.failure_policy import MAX_RELAPSES, FailurePolicy, find_non_finite
from trainer.saved_batch import SavedBatches, decode


def staged(home: Path, numbers: range = range(1, 13)) -> Stage:
    """A worker that saves in `home`, with commit 1 behind it."""
    stage = Stage(numbers=numbers)
    stage.worker.loop.saved = SavedBatches(home)
    return stage


def diverged(stage: Stage, manifest: str) -> str:
    """Restored, and then its weights are spoilt; what it then reports as fatal."""
    stage.started(manifest)
    with torch.no_grad():
        next(iter(stage.built.loop.model.parameters())).fill_(math.nan)
    assert not stage.worker.turn() and "dense weights" in stage.worker.report()["broken"]
    return str(stage.worker.report()["fatal"])


def test_repeated_non_finite_weights_are_permanent_and_the_batch_is_saved(
    tmp_path: Path,
) -> None:
    stage = staged(tmp_path)
    manifest = stage.committed()
    for _ in range(MAX_RELAPSES - 1):
        assert diverged(stage, manifest.name) == ""
    fatal = diverged(stage, manifest.name)
    path = stage.worker.report()["saved"]
    assert (
        f"{MAX_RELAPSES} times after a restore to {manifest.name}; `roostream inspect batch {path}`" in fatal
    )
    saved = decode(Path(path).read_bytes(), path)
    assert (saved.manifest, saved.checksum) == (manifest.name, manifest.checksum)
    assert (saved.step, saved.worker) == (2, 0)
    trained = sum(manifest.offsets.values())
    assert len(saved.records) == 4
    assert min(r.timestamp_ms for r in saved.records) == samples.records([trained + 1])[0].timestamp_ms
    assert any(finding.startswith("dense weight ") for finding in saved.findings)
    assert any(finding.startswith("scores of task click: ") for finding in saved.findings)
    assert "in the training of samples-0" in saved.reason and not stage.outputs.letters


def test_a_commit_in_between_resets_the_count_of_failures(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    manifest = stage.committed()
    for n in range(2 * MAX_RELAPSES):
        name = f"manifests/{n % 2 + 1:08d}"
        stage.put(dataclasses.replace(manifest, seq=n % 2 + 1))
        assert diverged(stage, name) == ""


def test_outages_are_never_permanent(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    for _ in range(2 * MAX_RELAPSES):
        stage.built.transport.down = False
        stage.started()
        stage.built.transport.down = True
        assert not stage.worker.turn() and stage.worker.report()["broken"]
    assert stage.worker.report()["fatal"] == stage.worker.report()["saved"] == ""
    assert not list(tmp_path.iterdir())


def test_repeated_non_finite_requests_are_permanent_and_the_rows_are_named(tmp_path: Path) -> None:
    stage = staged(tmp_path, range(1, MANY + 1))
    poisoned(stage.built, *range(1, MANY + 1))
    for _ in range(MAX_RELAPSES):
        stage.started()
        while stage.worker.turn():
            pass
    assert "gradients" in stage.worker.report()["fatal"]
    saved = decode(Path(stage.worker.report()["saved"]).read_bytes(), "x")
    assert saved.manifest == saved.checksum == ""
    assert any(finding.startswith("rows of stack ") for finding in saved.findings)


def test_an_unexpected_error_saves_its_batch_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(tmp_path).started()

    def fail(*_: object) -> None:
        raise ValueError("shapes don't match")

    monkeypatch.setattr(stage.built.loop, "record_scores", fail)
    with pytest.raises(ValueError, match="shapes don't match"):
        stage.worker.turn()
    path = stage.worker.report()["saved"]
    saved = decode(Path(path).read_bytes(), "x")
    assert saved.reason == 'ValueError("shapes don\'t match")' and len(saved.records) == 4
    assert not saved.findings
    loop = build(
        samples.records([1]),
        rewire=lambda dependencies: dataclasses.replace(dependencies, saved=SavedBatches(tmp_path)),
    ).loop
    assert FailurePolicy(loop, 0).saved == path


def test_an_unwritable_folder_does_not_hide_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(tmp_path)
    manifest = stage.committed()

    def full(*_: object) -> None:
        raise UnavailableError("no space left")

    monkeypatch.setattr(SavedBatches, "save", full)
    fatals = [diverged(stage, manifest.name) for _ in range(MAX_RELAPSES)]
    assert fatals[-1].endswith(f"times after a restore to {manifest.name}")
    assert stage.worker.report()["saved"] == ""


# What isn't finite is named, as far as it can be known, and finding it out raises nothing


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


# An odd request costs itself; where all are odd, it isn't the requests


MANY = MAX_CONSECUTIVE + 8


def poisoned(built: Built, *users: int) -> Built:
    poison(built, *users)
    return built


@pytest.mark.parametrize("batch_requests", [4, MANY])
def test_many_consecutive_non_finite_requests_are_blamed_on_the_model(
    batch_requests: int,
) -> None:
    built = poisoned(
        build(samples.records(list(range(1, MANY + 1))), batch_requests=batch_requests), *range(1, MANY + 1)
    )
    with pytest.raises(NotFiniteError, match="state"):
        built.train_all()
    before = MAX_CONSECUTIVE - batch_requests if batch_requests < MAX_CONSECUTIVE else 0
    assert len(built.letters) == built.loop.counts.non_finite == before
    assert built.loop.quarantine.current is not None
    assert len(built.loop.quarantine.current.records) == batch_requests


def test_one_finite_request_shows_that_the_model_is_sound() -> None:
    odd = [n for n in range(1, MANY + 1) if n != MANY // 2]
    built = poisoned(build(samples.records(list(range(1, MANY + 1))), batch_requests=MANY), *odd).train_all()
    assert len(built.letters) == built.loop.counts.non_finite == MANY - 1 and len(built.predicted) == 1


def test_undecodable_records_are_dead_letters_and_do_not_count_against_the_model() -> None:
    built = build(samples.records([1, 2, 3, 4]))
    chunk = built.loop.source.poll(4, 0)
    assert chunk is not None
    dead: list[Rejected] = []
    burial = DeadLetterQuarantine(dead.append)
    for _ in range(2 * MAX_CONSECUTIVE):
        burial.begin(chunk)
        assert burial.settle() == 0 and burial.current is None
    assert not dead
