"""What a message may hold."""

from __future__ import annotations

import pytest

from roostream.errors import ConfigError, UnavailableError, describe_error, mask_secrets


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("redis://:s3cret@h:1/0", "redis://***@h:1/0"),
        ("at 'rediss://me:s3cret@h:1/0', trying", "at 'rediss://***@h:1/0', trying"),
        ("http://me:s3/cr#et?@h", "http://***@h"),
        ("redis://h:1/0?password=s3cret&db=1", "redis://h:1/0?password=***&db=1"),
        ("a://x:s3cret@h and b://y:s3cret@h", "a://***@h and b://***@h"),
        ("http://h:1/x, mail a@b", "http://h:1/x, mail a@b"),
    ],
)
def test_what_proves_who_one_is_is_not_shown(text: str, said: str) -> None:
    assert mask_secrets(text) == said
    assert str(ConfigError(text)) == said


def test_an_error_is_told_with_what_was_noted_about_it() -> None:
    error = UnavailableError("shard 1 is away")
    assert describe_error(error) == "shard 1 is away"
    error.add_note("in the push of samples-0 3..5")
    assert describe_error(error) == "shard 1 is away; in the push of samples-0 3..5"
    assert describe_error(ValueError()) == ""
