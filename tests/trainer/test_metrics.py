"""Metrics of the trainer's programs: literal names in base units, and a name for every value."""

from __future__ import annotations

import pytest

from tests.trainer import samples
from tests.trainer.loops import build
from trainer.metrics import CONTROLLER, WORKER, MetricSpec, StateCollector
from trainer.selection.config import DeferralConfig, SelectionConfig


@pytest.mark.parametrize(("program", "specs"), [("worker", WORKER), ("controller", CONTROLLER)])
def test_names_are_unique_and_have_the_prefix_of_their_program(
    program: str, specs: dict[str, MetricSpec]
) -> None:
    names = [spec.name for spec in specs.values()]
    assert len(set(names)) == len(names) and all(name.startswith(f"roostream_{program}_") for name in names)


def test_a_counter_a_scaled_gauge_and_labels_are_exported() -> None:
    state = {"requests": 3, "lag_ms": 1500, "stage_seconds": {("pull", "loop"): 2.0}, "eta_s": None}
    families = {family.name: family for family in StateCollector(lambda: state, WORKER).collect()}
    assert families["roostream_worker_requests"].type == "counter"
    assert families["roostream_worker_lag_seconds"].samples[0].value == 1.5
    assert families["roostream_worker_stage_seconds"].samples[0].labels == {"stage": "pull", "thread": "loop"}
    assert "roostream_worker_eta_seconds" not in families


@pytest.mark.parametrize(
    "settings",
    [{"selection": SelectionConfig(policy="slipstream")}, {"deferral": DeferralConfig(share=0.5)}],
)
def test_every_value_that_selection_reports_has_a_metric(settings: dict[str, object]) -> None:
    built = build(samples.records([1, 2, 3, 4]), **settings).train_all()  # type: ignore[arg-type]
    assert built.loop.selection.report().keys() <= WORKER.keys()
