"""Encoding of samples and corrections, compared byte by byte with protobuf's, and input from producers with
another encoding."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from joiner.outputs import Output
from joiner.state import Impression
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner.cases import Driver, engagement, impression, make_decoder, record, rules

T = 1_000


def page(draw: Any, items: list[int], time_ms: int) -> pb.Impression:
    n = len(items)
    served: dict[str, Any] = {}
    if draw(st.booleans()):
        served["scores"] = [0.5 + k for k in range(4 * n)]
    if draw(st.booleans()):
        served["positions"] = draw(st.permutations(range(n)))
    if draw(st.booleans()):
        served["propensities"] = [0.5] * n
    return impression(
        time_ms,
        items,
        ro=draw(st.sampled_from([None, 1.0])),
        weight=draw(st.sampled_from([0.0, 2.0])),
        **served,
    )


item_lists = st.lists(st.integers(1, 6), max_size=5)
page_lists = st.lists(st.tuples(item_lists, st.integers(0, 50)), min_size=1, max_size=3)


@settings(max_examples=80)
@given(
    page_lists,
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from(["click", "dwell", "é"])), max_size=4),
    st.data(),
)
def test_samples_and_corrections_are_the_bytes_that_protobuf_writes(
    pages: list[Any], actions: list[Any], data: Any
) -> None:
    driver = Driver(rules(engaged_threshold=2, correction_horizon_ms=60))
    driver.send(*(page(data.draw, items, T + after) for items, after in pages))
    driver.send(
        *(
            engagement(T + 20 + 9 * n, item, event=n + 1, action=a, value=0.1)
            for n, (item, a) in enumerate(actions)
        )
    )
    driver.end()
    written = [o for o in driver.outputs if o.topic != "dead_letters"]
    assert written
    for output in written:
        kind, message = wire.decode(output.value)
        assert wire.encode(kind, message) == output.value


def shuffled(message: pb.Impression) -> bytes:
    """The same message as another protobuf library may write it: the columns come before the header, and one
    column is in several pieces."""
    header, rest = pb.Impression(header=message.header), pb.Impression()
    rest.CopyFrom(message)
    rest.ClearField("header")
    rest.ClearField("item_ids")
    pieces = [pb.Impression(item_ids=[item]) for item in message.item_ids]
    return b"".join(m.SerializeToString() for m in (*pieces, rest, header))


def test_an_unusual_encoding_gives_the_same_sample() -> None:
    message = impression(T, (1, 2), scores=[0.5] * 8)
    usual = record(message)
    other = usual._replace(value=usual.value[:2] + shuffled(message))
    outputs = [joined(usual), joined(other)]
    assert outputs[0] == outputs[1]
    found = make_decoder().decode(other)
    assert isinstance(found, Impression) and found.raw == other.value and found.canonical == usual.value


def joined(r: Record) -> list[Output]:
    driver = Driver(rules())
    found = make_decoder().decode(r)
    assert isinstance(found, Impression)
    driver.apply(found)
    return driver.end()


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    usual = record(impression(T, (1, 2)))
    later = usual._replace(value=usual.value + b"\xa2\x06\x03new")  # field 100
    assert joined(later) == joined(usual)
