"""What requests share is worked out once: the same logits, losses and gradients as where each works out its
own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from roostream.models.config import RankerConfig
from roostream.models.inputs import Inputs, build_inputs, change_tensors
from roostream.models.model import Model, Targets
from roostream.wire import transform
from roostream.wire.batch import Batch
from roostream.wire.lookup import build_lookup
from tests.models.kind_cases import CONFIGS
from tests.models.model_cases import make_rows
from tests.models.model_checks import trained_model
from tests.models.returning import AS_BEFORE, MOVED_ON, returning

BATCHES = {"moved on": returning(MOVED_ON), "as before": returning(AS_BEFORE, as_before=True)}


def inputs_of(batch: Batch, *, deduplicated: bool, train: bool = True) -> Inputs:
    lookup = build_lookup(batch, deduplicated=deduplicated)
    return build_inputs(batch, lookup, make_rows(batch.schema, lookup), train=train)


def learned(model: Model, batch: Batch, *, deduplicated: bool) -> dict[str, Any]:
    """In float64: logits, loss, gradients by name and by row."""
    lookup = build_lookup(batch, deduplicated=deduplicated)
    inputs = build_inputs(batch, lookup, make_rows(batch.schema, lookup), train=True)
    inputs = change_tensors(inputs, lambda x: x.double() if x.is_floating_point() else x)
    model.zero_grad()
    logits_BT = model(inputs)
    loss = model.loss(
        inputs, logits_BT, Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
    )
    loss.backward()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {"logits": logits_BT.detach(), "loss": loss.detach()}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for stack, part in lookup.stacks.items():
        gradient_UD = inputs.rows[stack].grad
        for u, (table, id_) in enumerate(zip(part.table_U.tolist(), part.id_U.tolist(), strict=True)):
            if gradient_UD is not None:
                found[f"{table}/{id_}"] = gradient_UD[u]
    return found


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_sharing_changes_neither_logits_nor_gradients(kind: str, case: str) -> None:
    """To 1e-12 of the largest: sums of shared entries are in another order."""
    batch = BATCHES[case]
    model = trained_model(batch.schema, CONFIGS[kind]).double()
    plain, shared = (learned(model, batch, deduplicated=of) for of in (False, True))
    assert plain.keys() == shared.keys() and float(plain["logits"].abs().max()) > 1e-3
    for name, wanted in plain.items():
        most = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-3)
        torch.testing.assert_close(
            shared[name], wanted, rtol=0, atol=1e-12 * most, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", BATCHES)
def test_a_deduplicated_lookup_names_the_same_rows(case: str) -> None:
    batch = BATCHES[case]
    plain, shared = (build_lookup(batch, deduplicated=of) for of in (False, True))
    assert (
        shared.shared["history"].entry_V.size * 1.5 <= batch.ro_lists.total_of("history") and not plain.shared
    )
    for stack, found in plain.stacks.items():
        its = shared.stacks[stack]
        assert found.index.keys() == its.index.keys()
        for key, index_L in found.index.items():
            assert its.id_U[its.index[key]].tolist() == found.id_U[index_L].tolist()
            assert its.table_U[its.index[key]].tolist() == found.table_U[index_L].tolist()
        assert len(its.id_U) == len(found.id_U)


def test_equal_requests_are_computed_once() -> None:
    equal = build_lookup(BATCHES["as before"], deduplicated=True).unique
    assert equal is not None and equal.row_N.tolist() == [0, 1, 0, 1, 0, 2, 2, 3, 0]
    assert build_lookup(BATCHES["moved on"], deduplicated=True).unique is None
    inputs = inputs_of(BATCHES["as before"], deduplicated=True)
    assert inputs.once(inputs.ro_float_RG).shape[0] == 4 and int(inputs.shared_index_B.max()) == 3


def test_transforms_of_equal_requests_give_the_same_bits() -> None:
    batch = BATCHES["as before"]
    unique = build_lookup(batch, deduplicated=True).unique
    for wanted, got in zip(
        transform.apply_transforms(batch), transform.apply_transforms(batch, unique), strict=True
    ):
        assert np.array_equal(got.view(np.int32), wanted.view(np.int32))


def test_little_sharing_is_not_used() -> None:
    alone = returning([(1, 4), (2, 7), (3, 5)])
    lookup = build_lookup(alone, deduplicated=True)
    assert not lookup.shared and lookup.unique is None
    inputs = inputs_of(alone, deduplicated=True)
    assert inputs.unique is None and all(s.shared_entries is None for s in inputs.sequences.values())
    assert inputs.shared_index_B is inputs.request_index_B
    empty = build_lookup(returning([]), deduplicated=True)
    assert empty.unique is None and not empty.shared


def counted(model: Model, batch: Batch) -> Iterator[int]:
    """FLOPs of the matrix products of a forward pass, plain and shared."""
    for deduplicated in (False, True):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(inputs_of(batch, deduplicated=deduplicated, train=False))
        yield int(counter.get_total_flops())


@pytest.mark.parametrize("case", BATCHES)
def test_sharing_saves_matrix_products(case: str) -> None:
    plain, shared = counted(trained_model(BATCHES[case].schema, RankerConfig()), BATCHES[case])
    assert shared < plain


def test_copying_inputs_to_a_device_copies_shared_entries() -> None:
    moved = change_tensors(inputs_of(BATCHES["as before"], deduplicated=True), lambda x: x.to("meta"))
    kept = moved.sequences["history"].shared_entries
    assert kept is not None and kept.at_L.is_meta and kept.column_V["action"].is_meta
    assert moved.unique is not None and moved.unique.first_U.is_meta
