"""Model kinds "dlrm" and "dcn" equal TorchRec's DLRM and DLRM_DCN, which run on impressions with plain
ids."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM, DLRM_DCN

from roostream.errors import ConfigError, SchemaError
from roostream.models.build import build_model, load_model_config, model_config_from_dict
from roostream.models.config import DcnConfig, DlrmConfig
from roostream.models.custom.model_checks import check_model, example_request
from roostream.models.dlrm import Dlrm
from roostream.models.ranker import rate_rank
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema, schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from tests.models.model_cases import CASES, LABELS, inputs_of, make_batch, make_schema
from tests.models.model_checks import (
    COUNTS,
    loss_and_gradients,
    make_optimizer,
    make_sample_record,
    score,
    trained_model,
)
from trainer.dense_part import dense_checkpoint

SMALL: dict[str, Any] = {"dense_arch_layer_sizes": (6, 4), "over_arch_layer_sizes": (7, 5, 2)}
CONFIGS = {"dlrm": DlrmConfig(**SMALL), "dcn": DcnConfig(**SMALL, dcn_num_layers=3, dcn_low_rank_dim=2)}
NUM_IDS = 40


def same_width_schema(*more: dict[str, Any]) -> Schema:
    """Build the schema "everything" with tables of one width and without transforms over the list. `more`:
    candidate features that are put first."""
    raw = CASES["everything"]
    tables = {name: {**table, "dim": 4} for name, table in raw["tables"].items()}
    nro = [*more, *raw["nro"]]
    return schema_from_dict({**raw, "tables": tables, "nro": nro, "transform": [], "label": LABELS})


class Impressions:
    """The impressions of a batch in TorchRec's form: floats, a KeyedJaggedTensor of ids, and a collection
    with a row for each id. Mean pooling is a sum with weights of 1 / length."""

    def __init__(self, model: Dlrm, batch: Batch) -> None:
        self.batch = batch.expand()
        configs = model.dlrm.sparse_arch.embedding_bag_collection.embedding_bag_configs()
        features = [(c.name, f, c.pooling) for c in configs for f in c.feature_names]
        lengths, values, weights = zip(*(self._list(f, pooling) for _, f, pooling in features), strict=True)
        self.kjt = KeyedJaggedTensor(
            keys=[f for _, f, _ in features],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            weights=torch.from_numpy(np.concatenate(weights)),
        )
        self.collection = EmbeddingBagCollection(
            is_weighted=True,
            tables=[
                EmbeddingBagConfig(
                    name=f"{c.pooling.name}-{c.name}",
                    embedding_dim=c.embedding_dim,
                    num_embeddings=NUM_IDS,
                    feature_names=c.feature_names,
                    pooling=PoolingType.SUM,
                )
                for c in configs
            ],
        )
        self.tables = [batch.schema.table_by_name[c.name] for c in configs]
        with torch.no_grad():
            for table, bag in zip(self.tables, self.collection.embedding_bags.values(), strict=True):
                phase = (np.arange(NUM_IDS) * 0.7 + table.id % 97)[:, None] * np.arange(1, table.dim + 1)
                bag.weight.copy_(torch.from_numpy(0.5 * np.sin(phase)))  # the rows of model_cases.make_rows

    def _list(self, key: str, pooling: PoolingType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        feature, _, column = key.partition(".")
        lists = self.batch.ro_lists if feature in self.batch.ro_lists.keys else self.batch.nro_lists
        length_B = lists.lengths_KN[lists.index(feature)].astype(np.int64)
        values = lists.columns[key] if column else lists.values_of(feature)
        if pooling is PoolingType.SUM:
            given = lists.weights_of(feature)
            assert given is not None
            return length_B, values, np.arcsinh(given)
        return length_B, values, np.repeat((1 / np.maximum(length_B, 1)).astype(np.float32), length_B)

    def floats(self) -> torch.Tensor:
        b = self.batch
        ro = [np.arcsinh(b.ro_float_RF), b.ro_present_RF, b.ro_lists.present_KN.T]
        nro = [np.arcsinh(b.nro_float_BF), b.nro_present_BF, b.nro_lists.present_KN.T]
        return torch.from_numpy(np.concatenate([*ro, *nro], axis=1).astype(np.float32))


@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_and_gradients_equal_torchrecs_module_on_impressions(kind: str) -> None:
    schema = same_width_schema()
    config = dataclasses.replace(CONFIGS[kind], linear=False)
    model, batch = trained_model(schema, config), make_batch(schema, COUNTS, seed=2)
    assert isinstance(model, Dlrm)
    impressions = Impressions(model, batch)
    floats_BG = impressions.floats()
    sizes = [list(SMALL[f"{part}_arch_layer_sizes"]) for part in ("dense", "over")]
    torchrec_model = (
        DLRM(impressions.collection, floats_BG.shape[1], *sizes)
        if kind == "dlrm"
        else DLRM_DCN(
            impressions.collection, floats_BG.shape[1], *sizes, dcn_num_layers=3, dcn_low_rank_dim=2
        )
    )
    missing, unexpected = torchrec_model.load_state_dict(model.dlrm.state_dict(), strict=False)
    assert not unexpected and all("embedding_bags" in name for name in missing)

    logits_BT = torchrec_model(floats_BG, impressions.kjt)
    torch.testing.assert_close(score(model, batch), logits_BT.detach(), rtol=1e-5, atol=1e-6)

    label_BT, weight_BT = torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT)
    each_BT = F.binary_cross_entropy_with_logits(logits_BT, label_BT, reduction="none")
    expected = ((each_BT * weight_BT).sum(dim=0) / weight_BT.sum(dim=0)).sum()
    expected.backward()
    value, dense, rows = loss_and_gradients(model, batch)
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in torchrec_model.named_parameters():
        if "embedding_bags" not in name:
            torch.testing.assert_close(dense[f"dlrm.{name}"], parameter.grad, rtol=1e-4, atol=1e-6)
    total: dict[int, np.ndarray] = {}
    for table, bag in zip(impressions.tables, impressions.collection.embedding_bags.values(), strict=True):
        total[table.id] = total.get(table.id, 0) + bag.weight.grad.numpy()
    for (table_id, id_), gradient_D in rows.items():
        np.testing.assert_allclose(gradient_D, total[table_id][id_], rtol=1e-4, atol=1e-6)
    found = {(t, int(i)) for t, grad in total.items() for i in np.flatnonzero(np.abs(grad).max(axis=1))}
    assert found <= rows.keys()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_kind_passes_every_check_of_a_custom_model(kind: str) -> None:
    assert [verdict for verdict in check_model(same_width_schema(), CONFIGS[kind]) if verdict.wrong] == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_defaults_learn_every_dense_parameter_of_shipped_schemas(kind: str) -> None:
    config = type(CONFIGS[kind])()
    for path in (Path(__file__).parents[2] / "roostream" / "replay" / "schemas").glob("*.toml"):
        schema = load_schema(path)
        _, dense, _ = loss_and_gradients(
            trained_model(schema, config), make_batch(schema, [5, 1, 0, 20], seed=1)
        )
        assert dense.keys() == dict(build_model(schema, config, 0).named_parameters()).keys()
        assert all(torch.isfinite(gradient).all() for gradient in dense.values())


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_linear_part_is_mixed_with_the_network_by_its_share(kind: str) -> None:
    schema = same_width_schema()
    model, batch = trained_model(schema, CONFIGS[kind]), make_batch(schema, COUNTS, seed=2)
    assert isinstance(model, Dlrm) and model.linear is not None
    both_BT, inputs = score(model, batch), inputs_of(batch)
    part = model.linear
    linear_BT, share_T = part(model.linear_columns(inputs)).detach(), part.share.detach()[:, 0]
    scale_T, shift_T = part.calibration.detach().T
    model.linear = None
    mixture_BT = (1 - share_T) * score(model, batch) + share_T * linear_BT
    assert (linear_BT - mixture_BT).abs().max() > 0.01
    torch.testing.assert_close(both_BT, (1 + scale_T) * mixture_BT + shift_T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_task_of_an_untrained_model_predicts_its_prior(kind: str) -> None:
    labels = [{**LABELS[0], "prior": 0.25}, LABELS[1]]
    schema = schema_from_dict({**CASES["candidate only"], "label": labels})
    model = build_model(schema, dataclasses.replace(CONFIGS[kind], prior=0.03), seed=4)
    score_BT = torch.sigmoid(score(model, make_batch(schema, [3, 2])))
    torch.testing.assert_close(score_BT, torch.tensor([[0.25, 0.03]]).expand(5, 2))


def test_an_untrained_model_orders_by_click_rate_as_the_ranker_does() -> None:
    schema = load_schema(Path(__file__).parents[2] / "roostream" / "replay" / "schemas" / "demo.toml")
    column = rate_rank(schema, schema.labels[0].action)
    assert column is not None
    inputs = inputs_of(make_batch(schema, [20], seed=1))
    logits, plain = (
        build_model(schema, DlrmConfig(first_order=on), seed=0)(inputs)[:, 0].detach() for on in (True, False)
    )
    order = torch.argsort(inputs.nro_float_BG[:, column], stable=True)
    assert torch.equal(order, torch.argsort(logits, stable=True))
    assert len(plain.unique()) == 1


@pytest.mark.parametrize("config", [DlrmConfig(features=("item",)), DcnConfig(dcn_low_rank_dim=7)])
def test_settings_go_through_a_manifest(config: DlrmConfig, tmp_path: Path) -> None:
    written = json.loads(json.dumps(dataclasses.asdict(config)))
    assert model_config_from_dict(written) == config
    path = tmp_path / "model.toml"
    path.write_text(f'kind = "{config.kind}"\ndense_arch_layer_sizes = [32, 4]\n')
    assert load_model_config(str(path)) == type(config)(dense_arch_layer_sizes=(32, 4))


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("everything", {}, "table 'item': expected dim = 6, as table 'user' has, .* got 4; change one"),
        ("everything", {"features": ["item"], "embedding_dim": 8}, "expected dim = 8, as embedding_dim has"),
        (
            "everything",
            {"features": ["itm"]},
            "key 'features': expected list features .* did you mean 'item'",
        ),
        ("floats only", {}, "expected a list feature with a table for kind = 'dlrm', got none"),
    ],
)
def test_schemas_that_do_not_fit_are_rejected(case: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        build_model(make_schema(case), DlrmConfig(**settings), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense_arch_layer_sizes": (8, 5)}, r"'dense_arch_layer_sizes': expected 4 at the end, .* \[8, 5\]"),
        ({"over_arch_layer_sizes": (8, 1)}, r"'over_arch_layer_sizes': expected 2 at the end, .* \[8, 1\]"),
        ({"over_arch_layer_sizes": (2,)}, "'over_arch_layer_sizes': expected two widths or more"),
    ],
)
def test_layers_that_do_not_fit_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(same_width_schema(), DlrmConfig(**settings), 0)


def test_without_torchrec_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.delitem(sys.modules, "roostream.models.dlrm", raising=False)
    with pytest.raises(
        ConfigError, match=r"kind = 'dcn' in worker and serving needs torchrec.*'roostream\[torchrec\]'"
    ):
        build_model(same_width_schema(), DcnConfig(), 0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_added_float_changes_no_score_until_it_is_trained(kind: str) -> None:
    """Weights over pairs of lists are reset when the lists change. Adding a float feature resets none of
    them."""
    before, now = same_width_schema(), same_width_schema({"name": "price"})
    known = {s.fingerprint: s for s in (before, now)}
    request = example_request(now, 5, 1, known="all")
    records = [make_sample_record(now, request.ro, request.nro, request.item_n)]
    first, second = (Decoder(s, known.get).decode(records)[0] for s in (before, now))
    model, after = trained_model(before, CONFIGS[kind]), build_model(now, CONFIGS[kind], seed=2)
    dense_checkpoint.restore(
        dense_checkpoint.snapshot(model, make_optimizer(model)),
        after,
        make_optimizer(after),
        same_schema=False,
        fresh=dense_checkpoint.weights_of_inputs(now, CONFIGS[kind], ["nro floats"]),
    )
    torch.testing.assert_close(score(after, second), score(model, first), rtol=1e-5, atol=1e-5)
