"""Field numbers are said once, in roo.proto; everyone else takes them from there."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import (
    BLOCK,
    BYTES,
    FIXED32,
    FIXED64,
    HEADER,
    IMPRESSION,
    PART,
    REPEATED,
    SAMPLE,
    TEXT,
    VARINT,
    field_formats,
)

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


def test_field_formats_follow_the_descriptor() -> None:
    form = field_formats(pb.Sample.DESCRIPTOR)
    assert len(form) == max(SAMPLE) + 1 and form[0].tolist() == [-1, -1, -1]
    assert form[SAMPLE.header].tolist() == [BYTES, 1, 0]
    assert form[SAMPLE.sample_id].tolist() == [FIXED64, 1, 0]
    assert form[SAMPLE.close_reason].tolist() == [VARINT, 1, 0]
    assert form[SAMPLE.weight].tolist() == [FIXED32, 1, 0]
    assert form[SAMPLE.item_ids].tolist() == [BYTES, 8, 0]
    assert form[SAMPLE.labels].tolist() == [BYTES, 4, 0]
    assert form[SAMPLE.parts].tolist() == [BYTES, 1, REPEATED]
    assert form[SAMPLE.actions].tolist() == [BYTES, 1, REPEATED | TEXT]
    assert np.flatnonzero(form[:, 0] < 0).tolist() == [0]


def test_a_packed_column_needs_a_fixed_width() -> None:
    from google.protobuf import descriptor_pb2

    with pytest.raises(AssertionError, match="use fixed32 or fixed64"):
        field_formats(descriptor_pb2.SourceCodeInfo.Location.DESCRIPTOR)
