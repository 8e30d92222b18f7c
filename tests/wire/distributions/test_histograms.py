"""Histograms of feature values, and the population stability index (PSI) of two histograms."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.wire.feature_histograms import BINS, Histograms, float_bins, list_bins
from tests.models.model_cases import make_batch, make_schema


def test_psi_equals_its_definition() -> None:
    a, b = Histograms(1), Histograms(1)
    a.add(np.repeat([0, 1], [600, 400])[:, None])
    b.add(np.repeat([0, 1], [300, 700])[:, None])
    expected = (0.6 - 0.3) * np.log(0.6 / 0.3) + (0.4 - 0.7) * np.log(0.4 / 0.7)
    assert a.psi_F(b)[0] == pytest.approx(expected, rel=0.02) and a.psi_F(a)[0] == 0


def test_floats_are_binned_by_sign_and_power_of_two_and_missing_ones_have_a_bin() -> None:
    value_N = np.array([0.0, 1.0, -1.0, 1e-30, 1e30, -1e30, 7.0], dtype=np.float32)[:, None]
    present_N = np.array([True] * 6 + [False])[:, None]
    assert float_bins(value_N, present_N)[:, 0].tolist() == [32, 43, 21, 33, 62, 2, 0]
    assert BINS == 64


def test_lists_are_binned_by_their_first_id_and_by_their_length() -> None:
    lists = make_batch(make_schema("everything"), [1] * 50, seed=2).ro_lists
    first_NF, length_NF = list_bins(lists)
    assert first_NF.shape == length_NF.shape == (50, 3) and list_bins(lists, 1)[0].shape == (50, 1)
    empty_NF = lists.lengths_KN.T == 0
    assert ((first_NF == 0) == empty_NF).all() and ((length_NF == 0) == empty_NF).all()
    assert length_NF.max() == 3, "the bin of the longest lists, which have seven entries"
