"""Error messages contain no credentials, and they include the notes of the exception."""

from __future__ import annotations

import pytest

from roostream.errors import ConfigError, UnavailableError, describe_error, mask_secrets


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://:s3cret@h:1/0", "redis://***@h:1/0"),
        ("at 'rediss://me:s3cret@h:1/0', trying", "at 'rediss://***@h:1/0', trying"),
        ("http://me:s3/cr#et?@h", "http://***@h"),
        ("got 'redis://:s3'cret@h:1/0'; change it", "got 'redis://***@h:1/0'; change it"),
        ('got "redis://:s3\'cr\\"et@h:1/0"', 'got "redis://***@h:1/0"'),
        ("redis://h:1/0?password=s3cret&db=1", "redis://h:1/0?password=***&db=1"),
        ("a://x:s3cret@h and b://y:s3cret@h", "a://***@h and b://***@h"),
        ("http://h:1/x, mail a@b", "http://h:1/x, mail a@b"),
    ],
)
def test_credentials_of_addresses_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert str(ConfigError(text)) == masked


def test_the_description_of_an_error_includes_its_notes() -> None:
    error = UnavailableError("shard 1 is away")
    assert describe_error(error) == "shard 1 is away"
    error.add_note("in the push of samples-0 3..5")
    assert describe_error(error) == "shard 1 is away; in the push of samples-0 3..5"
    assert describe_error(ValueError()) == ""
