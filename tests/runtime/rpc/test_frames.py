"""The frame codec of RPCs: round trips, damaged frames, and sizes that are refused before memory is
allocated."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from roostream.errors import WireError
from roostream.runtime.rpc import frames

GOLDEN = (
    "524f4f320100000023000000010000000800000000000000c12de65e79ea0f35"
    "83a66d6574686f64a16da668656164657281a17801a66172726179739192a2753491010700000000000000"
)
DTYPE = st.sampled_from(sorted(frames.DTYPES)).map(np.dtype)
ARRAY = DTYPE.flatmap(
    lambda d: npst.arrays(d, npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
)


def parse(data: bytes, limit: int = frames.MAX_FRAME_BYTES) -> tuple[int, frames.Body, list[np.ndarray]]:
    prefix = frames.parse_prefix(data[: frames.PREFIX_BYTES], limit)
    at = frames.PREFIX_BYTES + prefix.header_bytes
    body = frames.parse_header(prefix, data[frames.PREFIX_BYTES : at])
    payload = np.frombuffer(data[at:], np.uint8)
    assert len(payload) == prefix.payload_bytes
    frames.check(prefix, data[: frames.PREFIX_BYTES], data[frames.PREFIX_BYTES : at], payload.data)
    return prefix.kind, body, frames.views(body, payload)


def frame(*arrays: np.ndarray, **header: object) -> bytes:
    return b"".join(frames.encode(frames.CALL, {"method": "m", "header": header}, arrays))


@given(arrays=st.lists(ARRAY, max_size=5))
def test_frames_carry_arrays_of_every_type_and_shape(arrays: list[np.ndarray]) -> None:
    kind, body, decoded = parse(frame(*arrays, x=1))
    assert kind == frames.CALL and body["method"] == "m" and body["header"] == {"x": 1}
    assert [(a.dtype, a.shape, a.tobytes()) for a in decoded] == [
        (a.dtype, a.shape, a.tobytes()) for a in arrays
    ]


def test_frames_carry_numpy_scalars_and_nested_headers() -> None:
    header = {"n": np.int64(3), "f": np.float32(0.5), "map": {1: [None, True, "x", b"y"]}}
    assert parse(frame(**header))[1]["header"] == {"n": 3, "f": 0.5, "map": {1: [None, True, "x", b"y"]}}


def test_frames_carry_views_that_are_not_contiguous() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert (parse(frame(array.T[1:]))[2][0] == array.T[1:]).all()


def test_the_bytes_of_a_frame_equal_the_golden_bytes() -> None:
    assert frame(np.array([7], np.uint32), x=1).hex() == GOLDEN


@given(st.data())
def test_every_flipped_bit_is_detected(data: st.DataObject) -> None:
    good = bytearray(frame(np.arange(3, dtype=np.float32), np.arange(2), x="text"))
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    good[bit // 8] ^= 1 << bit % 8
    with pytest.raises(
        (WireError, AssertionError)
    ):  # a flipped size fails the assertion in `parse`: the payload has another length
        parse(bytes(good))


def prefix(
    kind: int = 1,
    header: int = 0,
    arrays: int = 0,
    payload: int = 0,
    magic: bytes = b"ROO2",
    zero: bytes = b"\0\0\0",
) -> bytes:
    return magic + bytes([kind]) + zero + struct.pack("<IIQQ", header, arrays, payload, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (prefix(magic=b"GET "), "undecodable"),
        (prefix(magic=b"ROO1"), "undecodable"),
        (prefix(kind=0), "undecodable"),
        (prefix(kind=4), "undecodable"),
        (prefix(zero=b"\0\1\0"), "undecodable"),
        (prefix(header=(16 << 20) + 1), "oversized"),
        (prefix(arrays=4097), "oversized"),
        (prefix(payload=2**64 - 1), "oversized"),
    ],
)
def test_a_prefix_with_a_wrong_field_or_size_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        frames.parse_prefix(data, 1024)
    assert caught.value.reason == reason


def test_a_client_without_a_valid_token_cannot_reserve_much_memory() -> None:
    data = prefix(header=frames.MAX_HEADER_BYTES)
    assert frames.parse_prefix(data, 1024).header_bytes == frames.MAX_HEADER_BYTES
    with pytest.raises(WireError, match="a header of at most 1048576"):
        frames.parse_prefix(data, 0)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x80",
        b"\x81\xa6arrays\x01",
        b"\x81\xa6arrays\x91\x01",
        b"\x82\xa6arrays\x90\xa6header\x01",
        pytest.param(b"\x91" * 100_000, id="nested deeply"),
    ],
)
def test_a_header_that_isn_t_a_map_with_arrays_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        frames.parse_header(frames.Prefix(1, len(header), 0, 0), header)


@pytest.mark.parametrize(
    ("described", "num_arrays", "payload_bytes"),
    [
        ([["f4", [2]]], 2, 8),
        ([["f4", [3]]], 1, 8),
        ([["O", [1]]], 1, 8),
        ([["f2", [4]]], 1, 8),
        ([["f4", [-1]]], 1, 8),
        ([["f4", [2**40]]], 1, 2**42),
        ([["f4", [1, 1, 1, 1, 2]]], 1, 8),
        ([["f4", [True]]], 1, 8),
        ([["f4", 2]], 1, 8),
        ([["f4"]], 1, 8),
        ([[["f4"], [2]]], 1, 8),
    ],
)
def test_shapes_that_disagree_with_the_payload_are_refused(
    described: list, num_arrays: int, payload_bytes: int
) -> None:
    import msgspec

    header = msgspec.msgpack.encode({"arrays": described})
    with pytest.raises(WireError) as caught:
        frames.parse_header(frames.Prefix(1, len(header), num_arrays, payload_bytes), header)
    assert caught.value.reason == "bad_shape"


@pytest.mark.parametrize(
    "array",
    [np.zeros(1, np.float16), np.zeros(1, bool), np.array(["x"]), np.zeros((1, 1, 1, 1, 1), np.float32)],
)
def test_arrays_that_frames_don_t_carry_are_refused_before_anything_is_sent(array: np.ndarray) -> None:
    with pytest.raises(WireError, match="a frame carries"):
        frame(array)


def test_a_payload_beyond_the_limit_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(WireError, match="at most 64, got 72"):
        frames.encode(frames.CALL, {}, [np.zeros(9)], 64)


def test_a_header_of_objects_is_refused() -> None:
    with pytest.raises(TypeError, match="plain values"):
        frame(x=object())


@given(data=st.binary(max_size=64))
def test_garbage_is_refused_by_a_wire_error_and_nothing_else(data: bytes) -> None:
    good = frame(np.arange(4, dtype=np.float32), x=1)
    mixed = (data + good[len(data) :])[: len(good)]
    try:
        kind, _, arrays = parse(mixed)
    except (WireError, AssertionError):
        return
    assert isinstance(kind, int) and all(array.nbytes <= len(good) for array in arrays)
