"""The map from buckets to owners: every bucket has exactly one owner."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.errors import CheckpointError, ConfigError
from roostream.runtime.bucket_map import BucketMap, moved


def test_a_map_round_trips_and_no_map_means_modulo() -> None:
    modulo = BucketMap.modulo(64, 3)
    assert modulo.is_modulo and modulo.version == 0 and modulo.buckets_of(1)[:3] == [1, 4, 7]
    decoded = BucketMap.from_plain(modulo.plain())
    assert decoded == modulo and hash(decoded) == hash(modulo) and decoded.num_owners == 3
    assert decoded != BucketMap(modulo.owner_B, 3, 1) and decoded != BucketMap.modulo(64, 2)


@pytest.mark.parametrize("owners", [[0, 3], [-1, 0], []])
def test_a_bucket_without_an_owner_is_refused(owners: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"an owner of 0\.\.2 for every bucket"):
        BucketMap(np.array(owners, np.int32), 3)
    with pytest.raises(CheckpointError):
        BucketMap.from_plain({"owners": owners, "num_owners": 3, "version": 1})


@pytest.mark.parametrize("owners", [8, "01", [0.5, 1], [True, 0], [[0, 0, 9]], [None], {"a": 1}])
def test_an_invalid_list_of_owners_is_refused_in_one_sentence(owners: object) -> None:
    with pytest.raises(CheckpointError, match="expected a map of buckets to owners"):
        BucketMap.from_plain({"owners": owners, "num_owners": 3, "version": 1})
    with pytest.raises(ConfigError, match=r"an owner of 0\.\.2 for every bucket, got shape \(1, 3\)"):
        BucketMap(np.array([[0, 0, 9]], np.int32), 3)


def test_the_number_of_buckets_cannot_change() -> None:
    with pytest.raises(ConfigError, match="expected 64 buckets, got 32"):
        moved(BucketMap.modulo(64, 2), BucketMap.modulo(32, 2))
