"""The default ranker with each schema that ships in roostream/replay/schemas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roostream.models.build import build_model
from roostream.models.config import RankerConfig
from roostream.models.model import Targets
from roostream.models.ranker import Ranker
from roostream.schema.schema_file import load_schema
from tests.models.model_cases import inputs_of, make_batch

SCHEMAS = sorted((Path(__file__).parents[2] / "roostream" / "replay" / "schemas").glob("*.toml"))
assert {"demo", "ebnerd", "yambda"} <= {path.stem for path in SCHEMAS}


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda p: p.stem)
def test_every_dense_parameter_of_the_default_ranker_learns(path: Path) -> None:
    schema = load_schema(path)
    batch = make_batch(schema, [5, 1, 0, 20], seed=1)
    inputs = inputs_of(batch, train=True)
    model = build_model(schema, RankerConfig(), seed=0)
    assert isinstance(model, Ranker)
    with torch.no_grad():
        for head in model.heads.logits.parameters():
            head.add_(0.1)  # the heads start at zero, which would give the layers below no gradient
    targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
    model.loss(inputs, model(inputs), targets).backward()
    assert [
        name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()
    ] == []
    assert all(rows.grad is not None for rows in inputs.rows.values())
