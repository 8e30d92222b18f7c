"""Data that requests share is computed once. Logits, losses and gradients equal those of separate
computation."""

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
from tests.models.returning_users import GROWING_HISTORIES, UNCHANGED_HISTORIES, returning_users_batch

BATCHES = {
    "growing histories": returning_users_batch(GROWING_HISTORIES),
    "unchanged histories": returning_users_batch(UNCHANGED_HISTORIES, same_floats=True),
}


def inputs_of(batch: Batch, *, deduplicated: bool, train: bool = True) -> Inputs:
    lookup = build_lookup(batch, deduplicated=deduplicated)
    return build_inputs(batch, lookup, make_rows(batch.schema, lookup), train=train)


def outputs_and_gradients(model: Model, batch: Batch, *, deduplicated: bool) -> dict[str, Any]:
    """Compute logits, loss and gradients (by parameter name and by row) in float64."""
    lookup = build_lookup(batch, deduplicated=deduplicated)
    inputs = build_inputs(batch, lookup, make_rows(batch.schema, lookup), train=True)
    inputs = change_tensors(inputs, lambda x: x.double() if x.is_floating_point() else x)
    model.zero_grad()
    logits_BT = model(inputs)
    loss = model.loss(
        inputs, logits_BT, Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
    )
    loss.backward()  # type: ignore[no-untyped-call]
    results: dict[str, Any] = {"logits": logits_BT.detach(), "loss": loss.detach()}
    results |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for stack, part in lookup.stacks.items():
        gradient_UD = inputs.rows[stack].grad
        for u, (table, id_) in enumerate(zip(part.table_U.tolist(), part.id_U.tolist(), strict=True)):
            if gradient_UD is not None:
                results[f"{table}/{id_}"] = gradient_UD[u]
    return results


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_sharing_changes_neither_logits_nor_gradients(kind: str, case: str) -> None:
    """Equal to 1e-12 of the largest value, because sums over shared entries have another order."""
    batch = BATCHES[case]
    model = trained_model(batch.schema, CONFIGS[kind]).double()
    plain, shared = (
        outputs_and_gradients(model, batch, deduplicated=is_deduplicated) for is_deduplicated in (False, True)
    )
    assert plain.keys() == shared.keys() and float(plain["logits"].abs().max()) > 1e-3
    for name, expected in plain.items():
        largest = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
        torch.testing.assert_close(
            shared[name], expected, rtol=0, atol=1e-12 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", BATCHES)
def test_a_deduplicated_lookup_names_the_same_rows(case: str) -> None:
    batch = BATCHES[case]
    plain, shared = (build_lookup(batch, deduplicated=is_deduplicated) for is_deduplicated in (False, True))
    assert (
        shared.shared["history"].entry_V.size * 1.5 <= batch.ro_lists.total_of("history") and not plain.shared
    )
    for stack, plain_part in plain.stacks.items():
        stack_part = shared.stacks[stack]
        assert plain_part.index.keys() == stack_part.index.keys()
        for key, index_L in plain_part.index.items():
            assert stack_part.id_U[stack_part.index[key]].tolist() == plain_part.id_U[index_L].tolist()
            assert stack_part.table_U[stack_part.index[key]].tolist() == plain_part.table_U[index_L].tolist()
        assert len(stack_part.id_U) == len(plain_part.id_U)


def test_equal_requests_are_computed_once() -> None:
    equal = build_lookup(BATCHES["unchanged histories"], deduplicated=True).unique
    assert equal is not None and equal.row_N.tolist() == [0, 1, 0, 1, 0, 2, 2, 3, 0]
    assert build_lookup(BATCHES["growing histories"], deduplicated=True).unique is None
    inputs = inputs_of(BATCHES["unchanged histories"], deduplicated=True)
    assert inputs.once(inputs.ro_float_RG).shape[0] == 4 and int(inputs.shared_index_B.max()) == 3


def test_transforms_of_equal_requests_give_the_same_bits() -> None:
    batch = BATCHES["unchanged histories"]
    unique = build_lookup(batch, deduplicated=True).unique
    for expected, got in zip(
        transform.apply_transforms(batch), transform.apply_transforms(batch, unique), strict=True
    ):
        assert np.array_equal(got.view(np.int32), expected.view(np.int32))


def test_little_sharing_is_not_used() -> None:
    alone = returning_users_batch([(1, 4), (2, 7), (3, 5)])
    lookup = build_lookup(alone, deduplicated=True)
    assert not lookup.shared and lookup.unique is None
    inputs = inputs_of(alone, deduplicated=True)
    assert inputs.unique is None and all(s.shared_entries is None for s in inputs.sequences.values())
    assert inputs.shared_index_B is inputs.request_index_B
    empty = build_lookup(returning_users_batch([]), deduplicated=True)
    assert empty.unique is None and not empty.shared


def count_flops(model: Model, batch: Batch) -> Iterator[int]:
    """Count the FLOPs of the matrix products of a forward pass, first without and then with sharing."""
    for deduplicated in (False, True):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(inputs_of(batch, deduplicated=deduplicated, train=False))
        yield int(counter.get_total_flops())


@pytest.mark.parametrize("case", BATCHES)
def test_sharing_saves_matrix_products(case: str) -> None:
    plain, shared = count_flops(trained_model(BATCHES[case].schema, RankerConfig()), BATCHES[case])
    assert shared < plain


def test_copying_inputs_to_a_device_copies_shared_entries() -> None:
    moved = change_tensors(
        inputs_of(BATCHES["unchanged histories"], deduplicated=True), lambda x: x.to("meta")
    )
    kept = moved.sequences["history"].shared_entries
    assert kept is not None and kept.at_L.is_meta and kept.column_V["action"].is_meta
    assert moved.unique is not None and moved.unique.first_U.is_meta
