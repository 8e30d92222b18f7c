"""Decoding of Kafka records: invalid records are rejected with a reason, and checksums detect changed
bytes."""

from __future__ import annotations

import pytest

from roostream.errors import WireError, nearest
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "undecodable"),
        (b"", "undecodable"),
        (b"\x01", "undecodable"),
        (b"\x00\x01", "unknown_type"),
        (b"\x0b\x01", "unknown_type"),
        (b"\x01\x02", "unknown_type"),
        (b"\x01\x01\xff", "undecodable"),
        (b"\x01\x01\x0a\x05ab", "undecodable"),
        (b"\x02\x01\x22\x01\xff", "undecodable"),
    ],
)
def test_bytes_that_are_not_a_record_are_rejected_with_the_reason(record: bytes | None, reason: str) -> None:
    with pytest.raises(WireError) as error:
        wire.decode(record)
    assert error.value.reason == reason and reason in wire.REASONS


@pytest.mark.parametrize("kind", wire.CHECKED)
def test_a_checksum_detects_every_changed_byte(kind: int) -> None:
    record = wire.encode(kind, pb.Barrier(stack="s", bucket=3, incarnation=7))
    assert wire.decode(record)[0] == kind
    for at in range(2, len(record)):
        with pytest.raises(WireError, match="checksum"):
            wire.decode(record[:at] + bytes((record[at] ^ 1,)) + record[at + 1 :])


def test_the_nearest_name_is_offered_only_if_near() -> None:
    assert nearest("clik", ["click", "view"]) == "; did you mean 'click'?"
    assert nearest("zzz", ["click"]) == ""
