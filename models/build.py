"""From a schema, a configuration and a seed to a model: the same bits in the trainer and in serving."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.mlp import init_parameters
from models.ranker import Ranker
from roo.schema import Schema


def build_model(schema: Schema, config: ModelConfig, seed: int) -> Ranker:
    """A ranker whose parameters are a function of the arguments; the global random state is left as it was.

    Raises:
        SchemaError: the schema declares no feature.
    """
    with torch.random.fork_rng(devices=[]):
        model = Ranker(schema, config)
    init_parameters(model, seed)
    return model
