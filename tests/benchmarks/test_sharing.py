"""Training on requests, on single impressions and on deduplicated impressions gives the same losses and
gradients. The speed-up of sharing a request's part among its impressions has a bound, which is derived and
tested here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from benchmarks import roo_vs_expanded as bound
from benchmarks.common.dataset_paths import EBNERD, MIND, absent
from benchmarks.common.flop_count import flops
from benchmarks.common.public_logs import pointwise
from benchmarks.common.rebatch import Rebatcher, concatenate, cut, shuffled
from benchmarks.harness.benchmark import SubjectResult
from benchmarks.roo_vs_expanded import ARCHITECTURES, FORMS, pool, trained
from roostream.models.attention import attend_to_each_other
from roostream.models.build import build_model
from roostream.models.candidate_groups import build_groups
from roostream.models.inputs import build_inputs
from roostream.models.model import Model, Targets
from roostream.schema.schema import Transform
from roostream.wire.batch import Batch
from roostream.wire.dedup import group_impressions
from roostream.wire.lookup import build_lookup
from tests.models.model_cases import make_batch, make_rows, make_schema

POOL_SIZE = 4, 12, 3  # candidates a request, impressions a batch, batches
LOGS = [
    pytest.param(
        name, marks=pytest.mark.skipif(bool(absent(folder)), reason=absent(folder) or "the data set is there")
    )
    for name, folder in (("EB-NeRD", EBNERD), ("MIND", MIND))
]


def model_of(name: str) -> Model:
    """Build a model whose weights are moved off their initial values, so that every part affects the
    output."""
    model = build_model(pool(*POOL_SIZE)[0].schema, ARCHITECTURES[name], seed=1)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + i).view(parameter.shape))
    return model


class TrainingResult(NamedTuple):
    """Loss, logits and gradients of a batch, before the optimizer's step."""

    loss: float
    logits_BT: torch.Tensor
    dense_P: torch.Tensor  # gradients of all dense weights
    rows: dict[tuple[int, int], np.ndarray]  # gradients of embedding rows, by (table, id)


def compute_gradients(model: Model, batch: Batch, total_T: torch.Tensor) -> TrainingResult:
    """Train on `batch`. `total_T` is the sum of weights per task of the whole that `batch` is a part of."""
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, make_rows(batch.schema, lookup), train=True)
    model.zero_grad()
    logits_BT = model(inputs)
    targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT), total_T=total_T)
    loss = model.loss(inputs, logits_BT, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    rows = {
        (table, id_): inputs.rows[stack].grad[u].numpy()  # type: ignore[index]
        for stack, part in lookup.stacks.items()
        for u, (table, id_) in enumerate(zip(part.table_U.tolist(), part.id_U.tolist(), strict=True))
    }
    dense_P = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return TrainingResult(loss.item(), logits_BT.detach(), dense_P, rows)


def assert_same(parts: Sequence[TrainingResult], whole: TrainingResult) -> None:
    """Assert that losses and gradients of `parts` add up to those of `whole`, and that their logits are its
    logits, each to 1e-5 of the largest value.
    """
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    assert_close(torch.cat([part.logits_BT for part in parts]), whole.logits_BT)
    assert_close(torch.stack([part.dense_P for part in parts]).sum(dim=0), whole.dense_P)
    assert set().union(*(part.rows for part in parts)) == whole.rows.keys()
    sums = [
        np.sum([part.rows.get(key, 0 * row_D) for part in parts], axis=0) for key, row_D in whole.rows.items()
    ]
    assert_close(np.stack(sums), np.stack(list(whole.rows.values())))


def assert_close(got: torch.Tensor | np.ndarray, wanted: torch.Tensor | np.ndarray) -> None:
    largest = float(abs(wanted).max())
    assert largest > 1e-4, "there is nothing to compare"
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize(
    "make", [Batch.expand, lambda batch: group_impressions(batch.expand())], ids=["expanded", "deduplicated"]
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_impressions_of_requests_give_the_same_losses_logits_and_gradients(
    name: str, make: Callable[[Batch], Batch]
) -> None:
    model, batch = model_of(name), concatenate(pool(*POOL_SIZE))
    total_T = torch.from_numpy(batch.weight_BT.sum(axis=0))
    assert_same([compute_gradients(model, make(batch), total_T)], compute_gradients(model, batch, total_T))


@pytest.mark.parametrize(
    "name", [name for name in ARCHITECTURES if name != "retrieval"]
)  # retrieval takes its negatives from the batch, so another batch gives other losses
def test_rebatched_impressions_add_up_to_the_same_losses_and_gradients(name: str) -> None:
    model, batches = model_of(name), pool(*POOL_SIZE)
    whole = concatenate(batches)
    total_T = torch.from_numpy(whole.weight_BT.sum(axis=0))
    rebatcher = Rebatcher(7)  # 7 impressions a batch, so batches split requests
    parts = [part for batch in batches for part in rebatcher.add(batch)]
    rest = rebatcher.flush()
    assert rest is not None and rest.num_candidates == 36 % 7
    assert_same(
        [compute_gradients(model, part, total_T) for part in [*parts, rest]],
        compute_gradients(model, whole, total_T),
    )


def test_subjects_whose_candidates_attend_to_each_other_are_not_compared() -> None:
    assert all(getattr(config, "list_layers", 0) == 0 for config in ARCHITECTURES.values())
    schema = make_schema("everything")
    assert {t.op for t in schema.transforms} == {"rank", "share"} and pointwise(schema).transforms == ()
    dependent, independent = (
        Transform(output=of, input=of, op="log1p") for of in (schema.transforms[0].output, "price")
    )
    more = dataclasses.replace(schema, transforms=(*schema.transforms, dependent, independent))
    assert pointwise(more).transforms == (independent,)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("first of each", "one impression")])
def test_every_form_trains_the_same_impressions(form: str) -> None:
    batches = pool(*POOL_SIZE)
    arrival = FORMS[form](batches, POOL_SIZE[1])
    batches_trained = [next(arrival.trained) for _ in batches]
    assert [batch.num_candidates for batch in batches_trained] == [12, 12, 12]
    shown = [
        sorted(zip(b.item_B.tolist(), b.sample_id_R[b.request_index_B].tolist(), strict=True))
        for b in batches_trained
    ]
    wanted = sorted(
        zip(concatenate(batches).item_B.tolist(), np.repeat(np.arange(1, 10), 4).tolist(), strict=True)
    )
    assert sorted(itertools.chain(*shown)) == wanted
    assert batches_trained[0].num_requests == (3 if form in ("requests", "recd") else 12)


@pytest.mark.parametrize("what", ["float", "presence", "time", "value", "weight", "column", "length"])
def test_impressions_that_differ_in_any_field_are_not_deduplicated(what: str) -> None:
    """Of two impressions of one request, the second is changed in one field. Then they are not
    deduplicated."""
    batch = make_batch(make_schema("everything"), [2], seed=4).expand()
    lists, columns = batch.ro_lists, dict(batch.ro_lists.columns)
    assert lists.weights is not None and group_impressions(batch).num_requests == 1

    def last_changed(array: np.ndarray, to: object = None) -> np.ndarray:
        out = array.copy()
        out.reshape(-1)[-1] = out.reshape(-1)[-1] + 1 if to is None else to
        return out

    columns["history.time"] = last_changed(columns["history.time"])
    changes: dict[str, dict[str, object]] = {
        "float": {"ro_float_RF": last_changed(batch.ro_float_RF)},
        "presence": {"ro_present_RF": last_changed(batch.ro_present_RF, not batch.ro_present_RF[-1, -1])},
        "time": {"time_ms_R": last_changed(batch.time_ms_R)},
        "value": {"ro_lists": dataclasses.replace(lists, values=last_changed(lists.values))},
        "weight": {"ro_lists": dataclasses.replace(lists, weights=last_changed(lists.weights))},
        "column": {"ro_lists": dataclasses.replace(lists, columns=columns)},
        "length": {
            "ro_lists": concatenate(
                [make_batch(batch.schema, [1, 1], seed=s) for s in (4, 5)]
            ).ro_lists.take_rows(np.array([0, 3]))
        },
    }
    assert group_impressions(dataclasses.replace(batch, **changes[what])).num_requests == 2  # type: ignore[arg-type]


def test_batches_end_with_the_request_that_is_nearest_to_their_size() -> None:
    batch = make_batch(make_schema("one float"), [4, 9, 3, 8, 1, 2])
    assert [b.num_candidates_R.tolist() for b in cut(batch, 8)] == [[4], [9, 3], [8]]
    assert cut(batch, 100) == [] and [b.num_candidates for b in cut(batch, 15)] == [16, 11], (
        "the last batch may be short"
    )
    assert sorted(shuffled(batch).num_candidates_R.tolist()) == [1, 2, 3, 4, 8, 9]


def test_flops_count_products_and_attention_forward_and_backward() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    assert flops(lambda: (x @ torch.ones(4, 5)).sum().backward()) == 2 * 2 * 3 * 4 * 5
    q = torch.ones(2, 3, 4, 8, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    k, v = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5, 8)
    products = 2 * (2 * 3) * 4 * 5 * 8
    assert flops(lambda: attend(q, k, v)) == 2 * products, "scores, and values by scores"
    assert flops(lambda: attend(q, k, v).sum().backward()) == (2 + 5) * products
    own, groups = torch.ones(5, 12, requires_grad=True), build_groups(np.array([2, 3]))
    assert (
        flops(lambda: attend_to_each_other(own, groups, 2).sum().backward())
        == (2 + 5) * 2 * (2 * 2 + 3 * 3) * 4
    )


def make_result(
    cost_us: float, num_impressions: float, a_request: float = 1.0, flop: float = 1.0
) -> SubjectResult:
    return SubjectResult(
        cost_us, {bound.A_BATCH: num_impressions, bound.A_REQUEST: a_request, bound.FLOP: flop}
    )


def test_costs_of_both_sides_follow_from_three_kinds_of_batches() -> None:
    """In µs: a = 90 a request, b = 10 an impression, c = 1000 a batch; for 64 requests of 10 candidates."""
    whole, first, single = (
        make_result((1000 + 64 * 90 + 640 * 10) / 640, 640, 10),
        make_result((1000 + 160 * 100) / 160, 160),
        make_result(1100, 1),
    )
    costs = bound.costs(whole, first, single)
    assert costs == pytest.approx((90, 10, 1000))
    assert costs.bound(10) == pytest.approx(10 * 100 / 190) and costs.bound(1) == 1.0
    assert costs.forecast(640, 10) == pytest.approx((1000 + 640 * 100) / (1000 + 64 * 90 + 640 * 10))
    row = {
        "requests": whole,
        "first of each": first,
        "one impression": single,
        "adapter": make_result(101, 640),
        "impressions": make_result(99, 640),
    }
    figures = bound.derived(row)
    assert figures["bound K(a+b)/(a+Kb)"] == pytest.approx(1000 / 190)
    assert figures["of the bound: impressions"] == pytest.approx(99 / whole.cost_us * 190 / 1000)


def test_flop_ratio_for_a_long_history_matches_the_paper() -> None:
    assert bound.paper_count(1000, 10, 256) == pytest.approx(9.82, abs=0.005)
    row = {"requests": make_result(1, 1, flop=2.0), "a target at a time": make_result(1, 1, flop=19.0)}
    assert list(bound.of_history(1000, 10, 256, row).values()) == pytest.approx([9.5, 9.82], abs=0.005)


@pytest.mark.parametrize("log", LOGS)
def test_public_logs_give_batches_of_the_expected_size(log: str) -> None:
    batches = pool(log, 200, 2)
    assert len(batches) == 2 and all(100 < batch.num_candidates < 300 for batch in batches)
    lists = batches[0].ro_lists
    assert (
        lists.lengths_KN[lists.index("history")].mean() > 5
        and batches[0].label_BT[:, 0].sum() >= batches[0].num_requests * 0.9
    )
    with trained("early", "recd", log, 200, 2) as work:
        work.step()
        assert work.figures()["impressions a request"] > 5
