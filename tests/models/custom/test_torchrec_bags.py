"""`RemoteEmbeddingBagCollection` reads rows from the shards. Its outputs and row gradients equal those of
TorchRec's EmbeddingBagCollection that holds the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType

from roostream.errors import SchemaError
from roostream.models.custom.torchrec_bags import RemoteEmbeddingBagCollection, as_kjt, rows_of
from roostream.models.feature_encoders import pool_features
from roostream.models.inputs import Inputs
from tests.models.model_cases import inputs_of, make_batch, make_schema

SCHEMA = make_schema("everything")
COUNTS = [3, 0, 5, 1, 0, 2]
MEAN, SUM = PoolingType.MEAN, PoolingType.SUM


def make_inputs(counts: list[int], seed: int = 3) -> Inputs:
    return inputs_of(make_batch(SCHEMA, counts, seed), train=True)


def config(
    table: str, dim: int, *features: str, pooling: PoolingType = MEAN, rows: int = 1
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table, embedding_dim=dim, num_embeddings=rows, feature_names=list(features), pooling=pooling
    )


def all_configs(pooling: PoolingType) -> list[EmbeddingBagConfig]:
    return [
        config("item", 4, "item", "history", pooling=pooling),
        config("user", 6, "topics", "user", pooling=MEAN if pooling is SUM else SUM),
        config("action", 2, "history.action", "tags", pooling=pooling),
    ]


def torchrec_collection(
    configs: list[EmbeddingBagConfig], rows: Mapping[str, Tensor], is_weighted: bool
) -> EmbeddingBagCollection:
    """Build TorchRec's EmbeddingBagCollection. Each table holds the rows of its stack."""
    stacks = {c.name: SCHEMA.table_by_name[c.name].stack for c in configs}
    sized = [dataclasses.replace(c, num_embeddings=max(len(rows[stacks[c.name]]), 1)) for c in configs]
    collection = EmbeddingBagCollection(tables=sized, is_weighted=is_weighted)
    with torch.no_grad():
        for name, bag in collection.embedding_bags.items():
            bag.weight[: len(rows[stacks[name]])] = rows[stacks[name]]
    return collection


def compare(
    configs: list[EmbeddingBagConfig], counts: list[int], *, is_weighted: bool = False, expand: bool = False
) -> int:
    """Check that both collections return equal KeyedTensors and row gradients. Return the number of
    candidates."""
    inputs = make_inputs(counts)
    kjt = as_kjt(inputs, expand=expand)
    with rows_of(inputs):
        output = RemoteEmbeddingBagCollection(configs, SCHEMA, is_weighted)(kjt)
    collection = torchrec_collection(configs, inputs.rows, is_weighted)
    # TorchRec's collection cannot share requests if there are no candidates.
    expected = collection(as_kjt(inputs, expand=not expand or not sum(counts)))
    assert output.keys() == expected.keys() and output.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(output.values(), expected.values(), rtol=1e-6, atol=1e-6)
    upstream = torch.sin(torch.arange(output.values().numel(), dtype=torch.float32)).view_as(output.values())
    for values in (output.values(), expected.values()):
        (values * upstream).sum().backward()
    for c in configs:
        rows_UD = inputs.rows[SCHEMA.table_by_name[c.name].stack]
        weight = collection.embedding_bags[c.name].weight
        assert rows_UD.grad is not None and weight.grad is not None
        torch.testing.assert_close(rows_UD.grad, weight.grad[: len(rows_UD)], rtol=1e-6, atol=1e-6)
    return len(output.values())


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("pooling", [MEAN, SUM])
@pytest.mark.parametrize("counts", [COUNTS, [4], []])
def test_outputs_and_gradients_equal_torchrecs(counts: list[int], pooling: PoolingType, expand: bool) -> None:
    assert compare(all_configs(pooling), counts, expand=expand) == sum(counts)


@pytest.mark.parametrize("expand", [False, True])
def test_weighted_outputs_and_gradients_equal_torchrecs(expand: bool) -> None:
    compare([config("user", 6, "topics", "user", pooling=SUM)], COUNTS, is_weighted=True, expand=expand)


def test_entries_of_a_sequence_equal_torchrecs_embedding_collection() -> None:
    inputs = make_inputs(COUNTS)
    rows_UD, jagged = inputs.rows["d4-adagrad"].detach(), as_kjt(inputs)["history"]
    tables = [
        EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=len(rows_UD), feature_names=["history"])
    ]
    collection = EmbeddingCollection(tables=tables)
    collection.load_state_dict({"embeddings.item.weight": rows_UD})
    expected = collection(
        KeyedJaggedTensor(keys=["history"], values=jagged.values(), lengths=jagged.lengths())
    )["history"]
    sequence = inputs.sequences["history"]
    assert torch.equal(expected.offsets(), sequence.offset_R1)
    assert torch.equal(expected.values(), rows_UD[sequence.index_L])


def test_requests_are_shared_or_expanded_in_the_tensor() -> None:
    inputs = make_inputs(COUNTS)
    shared, expanded = as_kjt(inputs), as_kjt(inputs, expand=True)
    per_request = {
        "user": True,
        "history": True,
        "topics": True,
        "history.action": True,
        "item": False,
        "tags": False,
    }
    assert {key: n == 6 for key, n in zip(shared.keys(), shared.stride_per_key(), strict=True)} == per_request
    assert shared.stride() == expanded.stride() == sum(COUNTS) and set(expanded.stride_per_key()) == {
        sum(COUNTS)
    }
    keys, bag_KB = shared.inverse_indices()
    for key, bag_B in zip(keys, bag_KB, strict=True):
        bags = [bag.tolist() for bag in shared[key].to_dense()]
        assert [bag.tolist() for bag in expanded[key].to_dense()] == [bags[b] for b in bag_B.tolist()]


def test_learned_weights_get_gradients() -> None:
    inputs = make_inputs(COUNTS)
    kjt = as_kjt(inputs, expand=True)
    weights = kjt.weights().clone().requires_grad_()
    weighted = KeyedJaggedTensor(keys=kjt.keys(), values=kjt.values(), lengths=kjt.lengths(), weights=weights)
    with rows_of(inputs):
        RemoteEmbeddingBagCollection([config("user", 6, "topics", pooling=SUM)], SCHEMA, True)(
            weighted
        ).values().sum().backward()
    assert weights.grad is not None and int((weights.grad != 0).sum()) == len(kjt["topics"].values())


def test_the_collection_has_no_parameters_and_needs_rows() -> None:
    inputs = make_inputs(COUNTS)
    collection = RemoteEmbeddingBagCollection([config("item", 4)], SCHEMA)
    assert (
        collection.state_dict() == {} and list(collection.parameters()) == [] and not collection.is_weighted()
    )
    assert collection.embedding_bag_configs()[0].feature_names == ["item"], (
        "a config without feature names uses the name of the table"
    )
    with rows_of(inputs):
        assert collection.device == inputs.rows["d4-adagrad"].device
    with pytest.raises(SchemaError, match="expected the rows of a batch, got none; call the model inside"):
        collection(as_kjt(inputs))


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "expected an EmbeddingBagConfig"),
        ([config("itm", 4, "item")], "'itm': expected a table of the schema .* did you mean 'item'"),
        ([config("item", 8, "item")], "expected embedding_dim = 4"),
        ([config("item", 4, "ctr")], "feature 'ctr': expected a list feature of the schema"),
        ([config("item", 4, "user")], "feature 'user': expected it in config 'user'"),
        ([config("item", 4, "item", "item")], "feature 'item': expected it in one config"),
        ([config("item", 4, "item"), config("item", 4, "history")], "expected one config a table"),
        ([config("item", 4, "item", pooling=PoolingType.NONE)], "expected pooling SUM or MEAN"),
        (
            [dataclasses.replace(config("item", 4, "item"), data_type=DataType.FP16)],
            "expected data_type FP32",
        ),
    ],
)
def test_configs_that_differ_from_the_schema_are_rejected(
    configs: list[EmbeddingBagConfig], message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        RemoteEmbeddingBagCollection(configs, SCHEMA)


def test_weights_require_sum_pooling() -> None:
    with pytest.raises(SchemaError, match=r"expected pooling SUM, as weights need it, got PoolingType\.MEAN"):
        RemoteEmbeddingBagCollection([config("user", 6, "topics")], SCHEMA, is_weighted=True)


def test_tensors_of_another_batch_are_rejected() -> None:
    inputs = make_inputs(COUNTS)
    collection = RemoteEmbeddingBagCollection([config("item", 4, "item", "history")], SCHEMA)
    ids = KeyedJaggedTensor(
        keys=["item", "history"], values=torch.tensor([10**12, 5]), lengths=torch.tensor([1, 1]), stride=1
    )
    order = [list(as_kjt(inputs).keys()).index(key) for key in ("history", "item")]
    with rows_of(inputs):
        with pytest.raises(
            SchemaError, match=r"expected positions in \d+ rows, got 5 to 1000000000000; .* not ids"
        ):
            collection(ids)
        with pytest.raises(
            SchemaError, match="expected feature 'history' in the KeyedJaggedTensor, got item"
        ):
            collection(
                KeyedJaggedTensor(
                    keys=["item"], values=torch.zeros(1, dtype=torch.int64), lengths=torch.tensor([1])
                )
            )
        with pytest.raises(SchemaError, match="11 of item, 6 of history: inverse indices were dropped"):
            collection(as_kjt(inputs).permute(order))
        expanded = as_kjt(inputs, expand=True)
        torch.testing.assert_close(
            collection(expanded.permute(order)).values(), collection(expanded).values()
        )


def test_contexts_of_rows_may_be_nested() -> None:
    collection = RemoteEmbeddingBagCollection([config("item", 4, "item")], SCHEMA)
    one, other = make_inputs([2, 1], 1), make_inputs([4], 2)
    with rows_of(one):
        with rows_of(other):
            assert len(collection(as_kjt(other)).values()) == 4
        np.testing.assert_array_equal(
            collection(as_kjt(one)).values().detach().numpy(), pool_features(one)["item"].detach().numpy()
        )
