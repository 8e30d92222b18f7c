"""Field numbers are said once, in roo.proto; everyone else takes them from there."""

from __future__ import annotations

import pytest

from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import BLOCK, HEADER, IMPRESSION, PART, SAMPLE

NAMED = [
    (HEADER, pb.Header),
    (BLOCK, pb.Block),
    (PART, pb.Part),
    (IMPRESSION, pb.Impression),
    (SAMPLE, pb.Sample),
]


@pytest.mark.parametrize(("numbers", "message"), NAMED, ids=[m.DESCRIPTOR.name for _, m in NAMED])
def test_every_field_of_a_message_has_its_name_and_number(numbers: tuple[int, ...], message: type) -> None:
    """A new field is written in roo.proto and here; with a reader of it, those are the three places that it
    touches."""
    fields = message.DESCRIPTOR.fields  # type: ignore[attr-defined]
    assert numbers._asdict() == {f.name: f.number for f in fields}  # type: ignore[attr-defined]


def test_columns_are_packed_in_the_order_of_their_numbers() -> None:
    assert tuple(BLOCK) == (1, 2, 3, 4, 5, 6), "roostream/wire/block.py writes and reads them in this order"
