"""UserArch equals its formula and runs once per request. Gradients are checked in float64."""

from __future__ import annotations

import dataclasses

import torch

from roostream.models.feature_encoders import LinearCompression, UserArch
from roostream.models.ranker import Ranker
from tests.models.layer_checks import assert_gradients, build_float64, randn
from tests.models.model_cases import make_batch, make_schema
from tests.models.model_checks import COUNTS, SMALL, score, trained_model

CONFIG = dataclasses.replace(SMALL, request_side="userarch", userarch_embeddings=2, userarch_width=4)


def test_compression_equals_its_formula() -> None:
    net, x_RCI = build_float64(LinearCompression(5, 3, 2, 4)), randn(6, 3, 5)
    assert isinstance(net, LinearCompression)
    got = net(x_RCI)
    assert got.shape == (6, 2, 4)
    for r in range(6):
        for o in range(2):
            one_C = sum(x_RCI[r, :, i] * net.across.weight[o, i] for i in range(5)) + net.across.bias[o]
            torch.testing.assert_close(got[r, o], net.each.weight @ one_C + net.each.bias)
    assert_gradients(net, net, x_RCI)


def test_each_list_gives_one_embedding_and_all_floats_together_give_one() -> None:
    part = UserArch(make_schema("everything"), CONFIG)
    assert part.compression is not None and part.compression.across.weight.shape == (2, 4), (
        "four inputs: user, history, topics, floats"
    )
    assert part.width == 8 and set(part.widen) == {"user", "topics"}, "lists whose tables are not 4 wide"
    few = UserArch(make_schema("plain history"), CONFIG)
    assert few.width == 4, "there are at most as many outputs as inputs"


def test_user_arch_runs_once_per_request_in_place_of_the_tower() -> None:
    schema = make_schema("everything")
    model = trained_model(schema, CONFIG)
    assert isinstance(model, Ranker) and model.user_arch is not None
    assert not [name for name, _ in model.named_parameters() if name.startswith("request_tower")]
    rows: list[int] = []
    model.user_arch.register_forward_hook(lambda _, args, out: rows.append(out.shape[0]))
    score(model, make_batch(schema, COUNTS, seed=1))
    assert rows == [len(COUNTS)]


def test_without_request_features_there_is_no_user_arch() -> None:
    schema = make_schema("candidate only")
    model = trained_model(schema, CONFIG)
    assert isinstance(model, Ranker) and model.user_arch is None
    assert score(model, make_batch(schema, [3, 2])).shape == (5, 2)
