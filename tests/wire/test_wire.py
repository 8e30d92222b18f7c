from __future__ import annotations

import pytest

from roostream.errors import (
    ConfigError,
    RoostreamError,
    SchemaError,
    TransportError,
    UnavailableError,
    WireError,
    nearest,
)
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


def test_the_type_of_a_record_is_read_without_decoding() -> None:
    assert wire.kind_of(wire.encode(wire.HEARTBEAT, pb.Heartbeat(time_ms=1))) == wire.HEARTBEAT
    assert wire.kind_of(b"\x06") == 0


@pytest.mark.parametrize("kind", wire.CHECKED)
def test_a_checksum_detects_every_changed_byte(kind: int) -> None:
    record = wire.encode(kind, pb.Barrier(stack="s", bucket=3, incarnation=7))
    assert wire.decode(record)[0] == kind
    for at in range(2, len(record)):
        with pytest.raises(WireError, match="checksum"):
            wire.decode(record[:at] + bytes((record[at] ^ 1,)) + record[at + 1 :])


def test_equal_messages_have_equal_bytes() -> None:
    first, second = (pb.Engagement(header=pb.Header(user_id=1), action="a") for _ in range(2))
    assert wire.encode(wire.ENGAGEMENT, first) == wire.encode(wire.ENGAGEMENT, second)


def test_errors_form_one_tree() -> None:
    assert issubclass(SchemaError, ConfigError) and issubclass(TransportError, UnavailableError)
    assert issubclass(WireError, RoostreamError) and WireError("bad_shape", "text").reason == "bad_shape"


def test_the_nearest_name_is_offered_only_if_near() -> None:
    assert nearest("clik", ["click", "view"]) == "; did you mean 'click'?"
    assert nearest("zzz", ["click"]) == ""
