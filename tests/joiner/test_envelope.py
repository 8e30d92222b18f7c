"""The byte layouts that cross between Java and Python. joiner/java/Envelope.java describes the same
layouts."""

from __future__ import annotations

import struct

import pytest

from joiner.envelope import NOW, pack, unpack
from joiner.outputs import Output
from roostream.wire.records import Record


@pytest.mark.parametrize(
    ("key", "value"), [(b"12345678", b"value"), (None, b"v"), (b"", b""), (b"k", None), (None, None)]
)
def test_a_record_is_read_as_the_deserializer_lays_it_out(key: bytes | None, value: bytes | None) -> None:
    sizes = (-1 if key is None else len(key), -1 if value is None else len(value))
    data = struct.pack("<Biqqii", 1, 3, 1 << 40, 1_700_000_000_000, *sizes) + (key or b"") + (value or b"")
    assert unpack(data) == Record("engagements", 3, 1 << 40, 1_700_000_000_000, key, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("time", "stamp"), [(5, 5), (None, NOW)])
def test_an_output_is_laid_out_as_the_serializer_reads_it(time: int | None, stamp: int) -> None:
    data = pack(Output("dead_letters", b"12345678", b"value", time, "overflow"))
    assert data == struct.pack("<Bqi", 2, stamp, 8) + b"12345678" + b"value"
