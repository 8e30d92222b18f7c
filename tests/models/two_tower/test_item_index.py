"""The index of item vectors: it has each item once, finds the exact best items, and is stored in a file."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from roostream.errors import CheckpointError
from roostream.models.two_tower.item_index import ItemIndex, build_item_index, decode, encode, merged
from roostream.models.two_tower.models import Retrieval
from roostream.runtime import tensor_file
from tests.models.model_cases import inputs_of, make_batch
from tests.models.model_checks import trained_model
from tests.models.two_tower.test_retrieval import CONFIG, SCHEMA


def make_index(seed: int = 0, version: str = "1-7") -> tuple[ItemIndex, np.ndarray, np.ndarray]:
    """Build an index of a random batch; return it with the items of the batch and their vectors."""
    model, batch = trained_model(SCHEMA, CONFIG), make_batch(SCHEMA, [30, 20], seed=seed)
    assert isinstance(model, Retrieval)
    inputs = inputs_of(batch)
    with torch.inference_mode():
        vectors = model.item_vectors(inputs).numpy()
    return build_item_index(model, inputs, f"{SCHEMA.fingerprint:016x}", version), batch.item_B, vectors


def test_the_index_has_the_last_vector_of_each_item() -> None:
    index, item_B, vector_BD = make_index()
    assert len(set(item_B.tolist())) < len(item_B) and index.id_I.tolist() == sorted(set(item_B.tolist()))
    for item, vector_D in zip(index.id_I, index.vector_ID, strict=True):
        np.testing.assert_array_equal(vector_D, vector_BD[np.flatnonzero(item_B == item)[-1]])


def test_best_returns_the_items_with_the_largest_dot_products() -> None:
    index, _, _ = make_index()
    request_D = np.array([0.3, -0.2, 0.9, 0.1], dtype=np.float32)
    ids, products = index.best(request_D, 5)
    every = sorted(
        zip((index.vector_ID @ request_D).tolist(), (-index.id_I).tolist(), strict=True), reverse=True
    )
    assert [(p, -i) for p, i in zip(products.tolist(), ids.tolist(), strict=True)] == every[:5]
    assert len(index.best(request_D, 1000)[0]) == len(index.id_I)


def test_decode_is_the_inverse_of_encode() -> None:
    index, _, _ = make_index()
    decoded = decode(encode(index))
    assert (decoded.schema, decoded.version) == (index.schema, "1-7")
    np.testing.assert_array_equal(decoded.id_I, index.id_I)
    np.testing.assert_array_equal(decoded.vector_ID, index.vector_ID)


def test_merged_prefers_the_newer_index_of_the_same_version() -> None:
    (older, _, _), (newer, _, _) = make_index(0), make_index(1)
    both = merged(older, newer)
    assert both.id_I.tolist() == sorted({*older.id_I.tolist(), *newer.id_I.tolist()})
    place = np.searchsorted(both.id_I, newer.id_I)
    np.testing.assert_array_equal(both.vector_ID[place], newer.vector_ID)
    with pytest.raises(CheckpointError, match="expected vectors of model version 1-7, got 1-8"):
        merged(older, dataclasses.replace(newer, version="1-8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "2"}, "expected an index of items of format 1, got 2"),
        ({"id": np.array([3, 3], np.int64)}, "rising ids"),
        ({"id": np.array([3, 4], np.int32)}, "rising ids"),
        ({"vector": np.full((2, 4), np.nan, np.float32)}, "a finite vector"),
        ({"vector": np.ones((3, 4), np.float32)}, "a finite vector for each"),
    ],
)
def test_an_invalid_index_is_rejected(change: dict[str, object], message: str) -> None:
    tensors = {"id": np.array([3, 4], np.int64), "vector": np.ones((2, 4), np.float32)}
    tensors |= {k: v for k, v in change.items() if isinstance(v, np.ndarray)}
    with pytest.raises(CheckpointError, match=message):
        decode(tensor_file.encode(tensors, {"format": str(change.get("format", "1"))}))
