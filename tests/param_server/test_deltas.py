"""Row deltas as records: the bytes of a protobuf message, read back unchanged; invalid ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from param_server.deltas import columns_of, encode_barrier, encode_delta
from param_server.outbox import Delta
from roostream.errors import SchemaError, WireError
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from tests.golden.golden_messages import MESSAGES


def delta(num_live: int, num_gone: int, width: int = 3, more: bool = False, **times: int) -> Delta:
    rng = np.random.default_rng(num_live)
    ids = rng.integers(-(2**63), 2**63 - 1, num_live + num_gone)
    rows_LD = rng.normal(size=(num_live, width)).astype(np.float32)
    times_ms = {"oldest_engagement_ms": 0, "oldest_close_ms": 0, "oldest_trained_ms": 0} | times
    return Delta("d3-adagrad", 7, 12, 0xDEADBEEF, ids, rows_LD, more, **times_ms)


@pytest.mark.parametrize(
    "delta_",
    [
        delta(1, 0),
        delta(5, 3, more=True, oldest_engagement_ms=5, oldest_close_ms=6, oldest_trained_ms=-7),
        delta(0, 2),
        delta(0, 0),
        delta(200, 1, width=64),
    ],
    ids=["one row", "rows and tombstones", "tombstones alone", "nothing", "long"],
)
def test_a_delta_has_the_bytes_of_its_message(delta_: Delta) -> None:
    message = pb.RowDelta(
        schema=1 << 63,
        bucket=delta_.bucket,
        incarnation=4,
        sequence=delta_.sequence,
        table_id=delta_.table,
        dim=delta_.rows_LD.shape[1],
        ids=delta_.id_M.view(np.uint64).tolist(),
        rows=delta_.rows_LD.ravel().tolist(),
        num_tombstones=len(delta_.id_M) - len(delta_.rows_LD),
        oldest_engagement_ms=delta_.oldest_engagement_ms,
        oldest_close_ms=delta_.oldest_close_ms,
        oldest_trained_ms=delta_.oldest_trained_ms,
        stack=delta_.stack,
        more=delta_.more,
    )
    record = encode_delta(delta_, 1 << 63, 4)
    assert record == wire.encode(wire.ROW_DELTA, message)
    _, message_ = wire.decode(record)
    assert isinstance(message_, pb.RowDelta)
    keys, rows_LD = columns_of(message_, delta_.rows_LD.shape[1], 1e9)
    assert (
        (keys.id_U == delta_.id_M).all()
        and (keys.table_U == delta_.table).all()
        and rows_LD.tobytes() == delta_.rows_LD.tobytes()
    )


def test_deltas_and_barriers_equal_the_golden_bytes() -> None:
    rows_LD = np.array([[0.5, -0.5]], np.float32)
    golden = Delta("d2-adagrad", 5, 9, 77, np.array([1, 2]), rows_LD, False, 1, 2, 3)
    assert encode_delta(golden, 11, 2) == wire.encode(*MESSAGES["row_delta"])
    assert encode_barrier("d2-adagrad", 5, 2, True) == wire.encode(*MESSAGES["barrier"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dim": 4}, SchemaError, "width 3"),
        ({"num_tombstones": 3}, WireError, "expected -1 rows of 3, got 6 numbers"),
        ({"num_tombstones": 1}, WireError, "expected 1 rows of 3, got 6 numbers"),
    ],
)
def test_columns_that_disagree_are_refused(
    change: dict[str, int], error: type[Exception], message: str
) -> None:
    _, read = wire.decode(encode_delta(delta(2, 0), 1, 1))
    assert isinstance(read, pb.RowDelta)
    for name, value in change.items():
        setattr(read, name, value)
    with pytest.raises(error, match=message):
        columns_of(read, 3, 100.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 101.0, -1.37e37])
def test_rows_that_no_shard_publishes_are_refused(value: float) -> None:
    delta_ = delta(2, 0)
    delta_.rows_LD[1, 1] = value
    _, read = wire.decode(encode_delta(delta_, 1, 1))
    assert isinstance(read, pb.RowDelta)
    with pytest.raises(WireError, match="100") as caught:
        columns_of(read, 3, 100.0)
    assert caught.value.reason == "bad_number"


def test_g5_every_flipped_bit_of_a_delta_or_barrier_is_detected() -> None:
    for record in (encode_delta(delta(1, 1), 11, 2), encode_barrier("d2-adagrad", 5, 2, True)):
        for bit in range(8 * len(record)):
            damaged = bytearray(record)
            damaged[bit // 8] ^= 1 << bit % 8
            if damaged[:2] != bytes(
                (record[0], wire.VERSION)
            ):  # two flipped bits of the version byte can give the previous version
                with pytest.raises(WireError):
                    wire.decode(bytes(damaged))
