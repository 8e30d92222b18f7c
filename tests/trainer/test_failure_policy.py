"""Failures that a restore cannot repair put training on hold and save the current batch. Other failures do
not."""

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
from tests.trainer.test_worker import WorkerHarness
from trainer.chunks import Chunk, Rejected
from trainer.dead_letter_quarantine import MAX_CONSECUTIVE, DeadLetterQuarantine, NotFiniteError
from trainer.failure_policy import MAX_RELAPSES, FailurePolicy, find_non_finite
from trainer.saved_batch import SavedBatches, decode


def harness_saving_to(home: Path, numbers: range = range(1, 13)) -> WorkerHarness:
    """A worker that saves batches in `home`."""
    harness = WorkerHarness(numbers=numbers)
    harness.worker.loop.saved = SavedBatches(home)
    return harness


def diverge(harness: WorkerHarness, manifest: str) -> str:
    """Restore the worker, make its weights non-finite and train. Returns the failure that it reports as
    fatal."""
    harness.started(manifest)
    with torch.no_grad():
        next(iter(harness.built.loop.model.parameters())).fill_(math.nan)
    assert not harness.worker.turn() and "dense weights" in harness.worker.report()["broken"]
    return str(harness.worker.report()["fatal"])


def test_repeated_non_finite_weights_are_permanent_and_the_batch_is_saved(
    tmp_path: Path,
) -> None:
    harness = harness_saving_to(tmp_path)
    manifest = harness.committed()
    for _ in range(MAX_RELAPSES - 1):
        assert diverge(harness, manifest.name) == ""
    fatal = diverge(harness, manifest.name)
    path = harness.worker.report()["saved"]
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
    assert "in the training of samples-0" in saved.reason and not harness.outputs.letters


def test_a_commit_in_between_resets_the_count_of_failures(tmp_path: Path) -> None:
    harness = harness_saving_to(tmp_path)
    manifest = harness.committed()
    for n in range(2 * MAX_RELAPSES):
        name = f"manifests/{n % 2 + 1:08d}"
        harness.put(dataclasses.replace(manifest, seq=n % 2 + 1))
        assert diverge(harness, name) == ""


def test_outages_are_never_permanent(tmp_path: Path) -> None:
    harness = harness_saving_to(tmp_path)
    for _ in range(2 * MAX_RELAPSES):
        harness.built.transport.down = False
        harness.started()
        harness.built.transport.down = True
        assert not harness.worker.turn() and harness.worker.report()["broken"]
    assert harness.worker.report()["fatal"] == harness.worker.report()["saved"] == ""
    assert not list(tmp_path.iterdir())


def test_repeated_non_finite_requests_are_permanent_and_the_rows_are_named(tmp_path: Path) -> None:
    harness = harness_saving_to(tmp_path, range(1, MANY + 1))
    poisoned(harness.built, *range(1, MANY + 1))
    for _ in range(MAX_RELAPSES):
        harness.started()
        while harness.worker.turn():
            pass
    assert "gradients" in harness.worker.report()["fatal"]
    saved = decode(Path(harness.worker.report()["saved"]).read_bytes(), "x")
    assert saved.manifest == saved.checksum == ""
    assert any(finding.startswith("rows of stack ") for finding in saved.findings)


def test_an_unexpected_error_saves_its_batch_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = harness_saving_to(tmp_path).started()

    def fail(*_: object) -> None:
        raise ValueError("shapes don't match")

    monkeypatch.setattr(harness.built.loop, "record_scores", fail)
    with pytest.raises(ValueError, match="shapes don't match"):
        harness.worker.turn()
    path = harness.worker.report()["saved"]
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
    harness = harness_saving_to(tmp_path)
    manifest = harness.committed()

    def fail(*_: object) -> None:
        raise UnavailableError("no space left")

    monkeypatch.setattr(SavedBatches, "save", fail)
    fatals = [diverge(harness, manifest.name) for _ in range(MAX_RELAPSES)]
    assert fatals[-1].endswith(f"times after a restore to {manifest.name}")
    assert harness.worker.report()["saved"] == ""


# `find_non_finite` names what is not finite, and never raises


def loop_and_chunk() -> tuple[Built, Chunk]:
    built = build(samples.records([1, 2, 3, 4]))
    chunk = built.loop.source.poll(4, 0)
    assert chunk is not None
    return built, chunk


def test_a_sound_model_has_no_findings_and_stays_unchanged() -> None:
    built, chunk = loop_and_chunk()
    before = {name: weight.clone() for name, weight in built.loop.model.state_dict().items()}
    assert find_non_finite(built.loop, chunk) == ()
    assert all(torch.equal(weight, before[name]) for name, weight in built.loop.model.state_dict().items())
    assert not built.shard.rows, "the search must not create rows"


def test_a_non_finite_row_is_named_with_its_effects() -> None:
    built, chunk = loop_and_chunk()
    found = find_non_finite(poisoned(built, 2).loop, chunk)
    assert [line for line in found if line.startswith("rows of stack")] != []
    assert "scores of task click: 3 of 12 numbers are not finite" in found
    assert "the loss is not finite" in found
    assert any(line.startswith("gradient of dense weight") for line in found)
    assert not any(line.startswith("dense weight") for line in found)


def test_a_non_finite_weight_is_named_first() -> None:
    built, chunk = loop_and_chunk()
    name, weight = next(iter(built.loop.model.named_parameters()))
    with torch.no_grad():
        weight.fill_(math.inf)
    n = weight.numel()
    assert (
        find_non_finite(built.loop, chunk)[0] == f"dense weight {name}: {n:,} of {n:,} numbers are not finite"
    )


def test_unavailable_rows_are_reported() -> None:
    built, chunk = loop_and_chunk()
    built.transport.down = True
    (found,) = find_non_finite(built.loop, chunk)
    assert "pulled" in found


def test_an_error_in_the_search_is_reported_after_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    built, chunk = loop_and_chunk()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(built.loop.model, "loss", fail)
    found = find_non_finite(poisoned(built, 2).loop, chunk)
    assert found[0].startswith("rows of stack") and found[-1].endswith("RuntimeError('no memory')")


# A single bad request becomes a dead letter. Many in a row mean that the model is corrupt.


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
    quarantine = DeadLetterQuarantine(dead.append)
    for _ in range(2 * MAX_CONSECUTIVE):
        quarantine.begin(chunk)
        assert quarantine.settle() == 0 and quarantine.current is None
    assert not dead
