"""Batches for TorchRec modules: the same lists, and the same pooled rows, as our own models see."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType

from models.inputs import build_inputs
from models.parts import pool
from roo.jagged import Jagged
from roo.lookup import build_lookup
from roo.schema import Schema
from tests.models.model_cases import make_batch, make_rows, make_schema
from trainer.torchrec import candidate_kjt, request_kjt, variable_stride_kjt

COUNTS = [3, 0, 5, 1]


def bag_collection(
    stack: str, schema: Schema, features: list[str], rows_UD: np.ndarray, weighted: bool
) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name=stack.replace("-", "_"),
        embedding_dim=rows_UD.shape[1],
        num_embeddings=len(rows_UD),
        feature_names=features,
        pooling=PoolingType.SUM if weighted else PoolingType.MEAN,
    )
    bags = EmbeddingBagCollection(tables=[config], is_weighted=weighted)
    bags.load_state_dict({f"embedding_bags.{config.name}.weight": torch.from_numpy(rows_UD)})
    return bags


def with_squashed(lists: Jagged) -> Jagged:
    """Weights as our pooling counts them."""
    return lists if lists.weights is None else dataclasses.replace(lists, weights=np.arcsinh(lists.weights))


@pytest.mark.parametrize("side", ["ro", "nro"])
def test_pooled_lookups_equal_torchrecs_embedding_bag_collection(side: str) -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, COUNTS, seed=3)
    lookup = build_lookup(batch)
    rows = make_rows(schema, lookup)
    pooled = pool(build_inputs(batch, lookup, rows))
    compared = []
    for stack in schema.stacks:
        for weighted in (False, True):
            names = [
                f.name
                for f in schema.lists(side)  # type: ignore[arg-type]
                if schema.table_by_name[f.table].stack == stack and (f.kind == "weighted_ids") == weighted
            ]
            if not names:
                continue
            squashed = dataclasses.replace(
                batch, ro_lists=with_squashed(batch.ro_lists), nro_lists=with_squashed(batch.nro_lists)
            )
            kjt = (request_kjt if side == "ro" else candidate_kjt)(squashed, lookup, stack)
            theirs = bag_collection(stack, schema, names, rows[stack], weighted)(kjt)
            for name in names:
                torch.testing.assert_close(pooled[name], theirs[name], rtol=1e-6, atol=1e-6)
                compared.append(name)
    assert sorted(compared) == sorted(f.name for f in schema.lists(side))  # type: ignore[arg-type]


def test_sequence_lookups_equal_torchrecs_embedding_collection() -> None:
    schema = make_schema("plain history")
    batch = make_batch(schema, COUNTS, seed=4)
    lookup = build_lookup(batch)
    (stack,) = schema.stacks
    rows_UD = make_rows(schema, lookup)[stack]
    sequences = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=len(rows_UD), feature_names=["history"])]
    )
    sequences.load_state_dict({"embeddings.t.weight": torch.from_numpy(rows_UD)})
    theirs = sequences(request_kjt(batch, lookup, stack))["history"]
    sequence = build_inputs(batch, lookup, {stack: rows_UD}).sequences["history"]
    assert torch.equal(theirs.offsets(), sequence.offset_R1)
    torch.testing.assert_close(torch.from_numpy(rows_UD)[sequence.index_L], theirs.values(), rtol=0, atol=0)


def test_ids_keep_their_lists_strides_and_memory() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, COUNTS)
    for kjt, side, stride in ((request_kjt(batch), batch.ro_lists, 4), (candidate_kjt(batch), batch.nro_lists, 9)):
        assert kjt.keys() == list(side.keys) and kjt.stride() == stride
        assert kjt.values().data_ptr() == side.values.ctypes.data
        for key in side.keys:
            assert kjt[key].values().tolist() == side.values_of(key).tolist()
            assert kjt[key].offsets().tolist() == side.offsets_of(key).tolist()
    weights = request_kjt(batch)["topics"].weights_or_none()
    assert weights is not None and weights.numpy().tolist() == batch.ro_lists.weights_of("topics").tolist()


def test_one_tensor_with_a_stride_a_key() -> None:
    batch = make_batch(make_schema("everything"), COUNTS)
    kjt = variable_stride_kjt(batch)
    assert kjt.variable_stride_per_key()
    assert kjt.stride_per_key() == [4] * len(batch.ro_lists.keys) + [9] * len(batch.nro_lists.keys)
    for side in (batch.ro_lists, batch.nro_lists):
        for key in side.keys:
            assert kjt[key].values().tolist() == side.values_of(key).tolist()
            assert kjt[key].lengths().tolist() == side.lengths_KN[side.index(key)].tolist()


def test_gradients_reach_the_rows_through_a_torchrec_module() -> None:
    schema = make_schema("candidate only")
    batch = make_batch(schema, COUNTS, seed=5)
    lookup = build_lookup(batch)
    rows = make_rows(schema, lookup)
    (stack,) = [s for s, part in lookup.stacks.items() if "item" in part.index]
    inputs = build_inputs(batch, lookup, rows, train=True)
    pool(inputs)["item"].square().sum().backward()
    theirs = bag_collection(stack, schema, ["item"], rows[stack], False)
    theirs(candidate_kjt(batch, lookup, stack))["item"].square().sum().backward()
    (weight,) = theirs.parameters()
    assert weight.grad is not None and inputs.rows[stack].grad is not None
    torch.testing.assert_close(inputs.rows[stack].grad, weight.grad, rtol=1e-5, atol=1e-6)
