"""The example models of the documentation (examples/models) pass all checks, learn, and score alike in
serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from roostream.models.build import load_model_config, model_config_from_dict
from roostream.models.custom.model_checks import check_model
from tests.trainer.visits import SCHEMA, assert_serving_scores_as, log_losses, visit_loop, visits

MODELS = Path(__file__).resolve().parents[3] / "examples" / "models"
TOMLS = {"recent_history": "width = 16\ntask_weights = [1.0, 0.5]\n", "parallel_dcn": ""}


@pytest.fixture(params=TOMLS)
def example(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "model.toml"
    shutil.copy(MODELS / f"{request.param}.py", tmp_path)
    path.write_text(f'kind = "{request.param}.py:build"\n{TOMLS[request.param]}')
    return path


def test_an_example_passes_every_check(example: Path) -> None:
    assert [v for v in check_model(SCHEMA, load_model_config(str(example))) if v.wrong] == []


def test_an_example_learns_and_serving_scores_as_training_does(example: Path) -> None:
    torch.set_num_threads(1)
    records = visits(600)
    loop, outputs = visit_loop(load_model_config(str(example)), records)
    while loop.step() or loop.finish():
        pass
    first, last = np.array_split(log_losses(outputs.predicted), 4)[::3]
    assert loop.counts.requests == len(records) and loop.counts.non_finite == 0
    assert last.mean() < 0.95 * first.mean()

    committed = json.loads(json.dumps(vars(loop.model_config)))
    assert_serving_scores_as(loop, model_config_from_dict(committed), records[-10:])
