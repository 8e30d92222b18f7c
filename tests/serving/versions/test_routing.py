"""Traffic splits: a user's assignment is stable, a growing share keeps its users, and splits are
independent."""

from __future__ import annotations

import pytest

from roostream.schema.settings import SettingError
from serving.versions.routing import TrafficSplit, parse_split

KEYS = [n.to_bytes(8, "little") for n in range(2000)]


def users_in(share: float, purpose: bytes = b"canary") -> set[bytes]:
    split = TrafficSplit("newest", share)
    return {key for key in KEYS if split.takes(key, purpose)}


def test_a_share_covers_about_that_many_users() -> None:
    assert len(users_in(0.0)) == 0 and len(users_in(1.0)) == len(KEYS)
    assert 0.22 < len(users_in(0.25)) / len(KEYS) < 0.28


def test_a_growing_share_keeps_its_users() -> None:
    assert users_in(0.05) < users_in(0.1) < users_in(0.5)


def test_shares_are_independent() -> None:
    both = users_in(0.5) & users_in(0.5, b"interleave")
    assert 0.22 < len(both) / len(KEYS) < 0.28


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("", TrafficSplit()),
        ("newest@0.05", TrafficSplit("newest", 0.05)),
        ("previous@1", TrafficSplit("previous", 1.0)),
        ("3-17@.5", TrafficSplit("3-17", 0.5)),
    ],
)
def test_a_split_is_version_and_share(text: str, split: TrafficSplit) -> None:
    assert parse_split("canary", text) == split and parse_split("canary", str(split)) == split


@pytest.mark.parametrize(
    "text",
    ["newest", "newest@", "@0.5", "newest@1.5", "newest@-1", "best@0.5", "3@0.5", "newest@nan", "3-1 @1"],
)
def test_an_invalid_split_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(SettingError, match=r"key 'canary': expected VERSION@SHARE such as newest@0\.05"):
        parse_split("canary", text)
