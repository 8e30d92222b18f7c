"""Encoding a piece of rows into an RPC frame and decoding it changes no bit. Malformed frames are
rejected."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.errors import SchemaError, WireError
from roostream.runtime.rpc import frames
from roostream.warehouse.readers.piece_frames import decode_piece, encode_piece, schema_digest_of
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import LocalSessionRows, Piece
from tests.trainer.sessions.reading_fleet import bits
from tests.warehouse.sample_cases import rich_schema
from tests.warehouse.small_warehouse import ROWS, small_warehouse

SCHEMA = rich_schema()
DIGEST = schema_digest_of(SCHEMA)


@pytest.fixture(scope="module")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Piece:
    location = tmp_path_factory.mktemp("units")
    small_warehouse(location)
    table = SampleTable(str(location))
    table_input = table.newest(SessionSpec(table="", version=0), {})
    assert table_input is not None
    session, files = table.open_session(table_input, SCHEMA)
    split = session.order.splits[0]
    return LocalSessionRows(session, files).piece(split, split.at)


def encode_and_decode(piece: Piece) -> Piece:
    """Encode the piece into the bytes of an RPC answer and decode it."""
    header, arrays = encode_piece(piece, DIGEST)
    buffers = frames.encode(frames.ANSWER, {"header": header}, arrays)
    data = np.frombuffer(b"".join(bytes(buffer) for buffer in buffers), np.uint8)
    prefix = frames.parse_prefix(bytes(data[: frames.PREFIX_BYTES]))
    body = frames.parse_header(
        prefix, bytes(data[frames.PREFIX_BYTES : frames.PREFIX_BYTES + prefix.header_bytes])
    )
    payload = data[frames.PREFIX_BYTES + prefix.header_bytes :].copy()
    return decode_piece(body["header"], frames.views(body, payload), SCHEMA, DIGEST)


def test_a_piece_with_every_kind_of_feature_is_decoded_bit_for_bit(piece: Piece) -> None:
    got = encode_and_decode(piece)
    assert piece.num_rows == got.num_rows == ROWS and got.end == piece.end
    assert bits(got.batch) == bits(piece.batch) and (got.at_R == piece.at_R).all()


def test_a_part_and_an_empty_piece_are_decoded(piece: Piece) -> None:
    part, _ = piece.split_at(7)
    none, _ = piece.split_at(0)
    assert bits(encode_and_decode(part).batch) == bits(part.batch) and encode_and_decode(part).end == part.end
    assert encode_and_decode(none).num_rows == 0 and encode_and_decode(none).end == none.end


def test_a_piece_of_another_schema_is_rejected(piece: Piece) -> None:
    header, arrays = encode_piece(piece, "0" * 16)
    with pytest.raises(SchemaError):
        decode_piece(header, arrays, SCHEMA, DIGEST)


@pytest.mark.parametrize("damage", ["fewer", "more lists", "shape"])
def test_malformed_frames_are_rejected(piece: Piece, damage: str) -> None:
    header, arrays = encode_piece(piece, DIGEST)
    if damage == "fewer":
        arrays = arrays[:-1]
    elif damage == "more lists":
        header["lists"]["ro_lists"]["keys"].append("another")
    else:
        arrays[0] = arrays[0][:-1]
    with pytest.raises(WireError):
        decode_piece(header, arrays, SCHEMA, DIGEST)
