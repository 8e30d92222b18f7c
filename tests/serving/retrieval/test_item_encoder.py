"""The vector of an item depends only on the item, its embedding rows and the model version."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from roostream.errors import ConfigError
from roostream.models.build import build_model
from roostream.models.inputs import build_inputs
from roostream.models.two_tower.models import Retrieval, retrieval_model
from roostream.schema.schema import Transform
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from serving.retrieval.item_vectors import check_item_features, encode_items
from tests.serving.retrieval_cases import CASCADE, NUM_ITEMS, TOWERS, make_catalogue, make_version
from tests.serving.serving_cases import NOW_MS, SCHEMA
from tests.serving.serving_fakes import FakeRows


def towers() -> Retrieval:
    model = retrieval_model(make_version().model)
    assert model is not None
    return model


def test_an_item_vector_has_norm_one_and_does_not_depend_on_the_batch() -> None:
    model, rows, catalogue = towers(), FakeRows(SCHEMA), make_catalogue()
    all_ID = encode_items(model, rows, catalogue.items)
    assert all_ID.shape == (NUM_ITEMS, 4) and len(np.unique(all_ID.round(5), axis=0)) > 0.9 * NUM_ITEMS
    np.testing.assert_allclose(np.linalg.norm(all_ID, axis=1), 1.0, atol=1e-3)
    for slot in (0, 17, 59):
        np.testing.assert_allclose(
            encode_items(model, rows, catalogue.take(np.array([slot])))[0], all_ID[slot], atol=1e-6
        )


def test_an_item_vector_equals_that_of_training() -> None:
    model, rows, catalogue, slots = towers(), FakeRows(SCHEMA), make_catalogue(), np.array([5, 6, 7])
    ro = encode_ro(SCHEMA, {"mood": 0.5, "hour": 3.0})
    block = encode_nro(SCHEMA, {**catalogue.features(slots), "clicks": np.array([1.0, 2.0, 3.0])}, 3)
    decoder = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get)
    batch = decoder.decode_request(ro, block, catalogue.id_I[slots], NOW_MS)
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, rows.gather(lookup))
    with torch.inference_mode():
        u_RTD, v_BD = model.vectors(inputs)
        logits_BT = model(inputs).numpy()
        alone_RTD = model.request_vectors(inputs).numpy()
    np.testing.assert_allclose(encode_items(model, rows, catalogue.take(slots)), v_BD.numpy(), atol=1e-6)
    np.testing.assert_array_equal(alone_RTD, u_RTD.numpy())
    products_BT = v_BD.numpy() @ alone_RTD[0].T
    for t in range(2):
        assert (np.argsort(products_BT[:, t]) == np.argsort(logits_BT[:, t])).all()


@pytest.mark.parametrize(
    ("floats", "transforms", "message"),
    [
        (("age_h",), (), ""),
        (("age_log",), (Transform(output="age_log", input="age_h", op="log1p"),), ""),
        (
            ("clicks",),
            (),
            "item_floats: expected floats that a catalogue can have, got 'clicks', kept online",
        ),
        (
            ("clicks_log",),
            (Transform(output="clicks_log", input="clicks", op="log1p"),),
            "item_floats: expected floats that a catalogue can have, got 'clicks', kept online",
        ),
        (
            ("age_rank",),
            (Transform(output="age_rank", input="age_h", op="rank"),),
            "item_floats: expected floats of an item's own, got 'age_rank', a rank within a list",
        ),
    ],
)
def test_item_towers_with_list_or_online_features_are_refused(
    floats: tuple[str, ...], transforms: tuple[Transform, ...], message: str
) -> None:
    schema = dataclasses.replace(SCHEMA, transforms=transforms)
    model = build_model(schema, dataclasses.replace(TOWERS, item_floats=floats), 0)
    assert isinstance(model, Retrieval)
    if not message:
        check_item_features(schema, model)
        return
    with pytest.raises(ConfigError, match=message):
        check_item_features(schema, model)


def test_only_cascades_and_two_tower_models_retrieve() -> None:
    assert isinstance(retrieval_model(build_model(SCHEMA, TOWERS, 0)), Retrieval)
    assert isinstance(retrieval_model(build_model(SCHEMA, CASCADE, 0)), Retrieval)
    assert (
        retrieval_model(build_model(SCHEMA, dataclasses.replace(TOWERS, stage="ranking", item_floats=()), 0))
        is None
    )
