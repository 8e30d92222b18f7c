"""`build_groups` pads the candidate lists of a batch in groups of similar length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.models.candidate_groups import build_groups


@settings(max_examples=100)
@given(st.lists(st.integers(0, 80), max_size=12))
def test_padding_keeps_requests_and_order_and_unpad_is_its_inverse(counts: list[int]) -> None:
    groups = build_groups(np.array(counts, dtype=np.int32))
    b = np.arange(sum(counts))
    request_B = np.repeat(np.arange(len(counts)), counts)
    x_BD = torch.from_numpy(b)[:, None].double() + 1
    seen, padded_SD = [], groups.pad(x_BD)
    assert torch.equal(groups.unpad(padded_SD), x_BD)
    for group in groups.groups:
        mask = torch.ones(group.shape_GK, dtype=torch.bool) if group.mask_GK is None else group.mask_GK
        padded_rows = group.of_slots(padded_SD)[:, :, 0]
        for request, row, kept in zip(groups.request_order[group.requests], padded_rows, mask, strict=True):
            assert row[kept].tolist() == (b[request_B == request] + 1).tolist() and not row[~kept].any()
            seen.append(request)
    assert seen == groups.request_order.tolist() and len(seen) == len(set(seen))
    assert {r for r, n in enumerate(counts) if n} <= set(seen)


@pytest.mark.parametrize(
    ("counts", "shapes", "reason"),
    [
        ([5], [(1, 5)], "one request needs no padding"),
        ([1, 1, 1], [(3, 1)], "an expanded batch needs no padding"),
        ([3, 2, 100], [(2, 3), (1, 100)], "a long list does not widen the short ones"),
        ([16, 17], [(1, 16), (1, 17)], "groups end at 16, 64, 256, …"),
        ([0, 0], [], "without candidates there is no group"),
        ([], [], "without requests there is no group"),
    ],
)
def test_shapes_of_groups(counts: list[int], shapes: list[tuple[int, int]], reason: str) -> None:
    assert [g.shape_GK for g in build_groups(np.array(counts, dtype=np.int32)).groups] == shapes, reason
