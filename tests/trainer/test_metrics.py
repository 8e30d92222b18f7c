"""Every value that selection reports has a metric."""

from __future__ import annotations

import pytest

from tests.trainer import samples
from tests.trainer.loops import build
from trainer.selection.config import DeferralConfig, SelectionConfig
from trainer.worker_monitor import SELECTION_METRICS


@pytest.mark.parametrize(
    "settings",
    [{"selection": SelectionConfig(policy="slipstream")}, {"deferral": DeferralConfig(share=0.5)}],
)
def test_every_value_that_selection_reports_has_a_metric(settings: dict[str, object]) -> None:
    built = build(samples.records([1, 2, 3, 4]), **settings).train_all()  # type: ignore[arg-type]
    assert built.loop.selection.report().keys() <= set(SELECTION_METRICS.values())
