"""`build_lookup` assigns each id of a batch to a row, and each (table, id) has one row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup, precompile, sources_of
from roostream.wire.records import Record


def test_every_entry_has_its_row_and_rows_are_unique(
    schema: Schema, samples: Callable[[int], list[pb.Sample]], to_record: Callable[..., Record]
) -> None:
    batch, _ = Decoder(schema, lambda _: None).decode([to_record(s) for s in samples(40)])
    lookup = build_lookup(batch)
    assert list(lookup.stacks) == ["d8-adagrad", "d4-adagrad"]
    assert {stack: [s.key for s in stack_sources] for stack, stack_sources in sources_of(schema).items()} == {
        "d8-adagrad": ["history", "item", "seen"],
        "d4-adagrad": ["history.action", "tags", "topics"],
    }
    sources = {s.key: s for stack_sources in sources_of(schema).values() for s in stack_sources}
    for key, (_, table, side, is_column) in sources.items():
        stack = lookup.stacks[table.stack]
        lists = batch.ro_lists if side == "ro" else batch.nro_lists
        ids = lists.columns[key] if is_column else lists.values_of(key)
        assert stack.id_U[stack.index[key]].tolist() == ids.tolist() and len(ids)
        assert (stack.table_U[stack.index[key]] == table.id).all()
    for stack in lookup.stacks.values():
        assert len(set(zip(stack.table_U.tolist(), stack.id_U.tolist(), strict=True))) == len(stack.id_U)


def test_rows_are_in_order_of_first_occurrence(schema: Schema) -> None:
    from roostream.wire.block import encode_nro

    nro = encode_nro(schema, {"item": [[5, 3], [3, 9]], "topics": [{"ids": [5], "weights": [1.0]}, None]}, 2)
    batch = Decoder(schema, lambda _: None).decode_request(None, nro, np.array([1, 2]), 0)
    stack = build_lookup(batch).stacks["d8-adagrad"]
    assert stack.id_U.tolist() == [5, 3, 9] and stack.index["item"].tolist() == [0, 1, 1, 2]
    assert stack.index["history"].tolist() == []


def test_an_empty_batch_needs_no_rows(schema: Schema) -> None:
    precompile()
    lookup = build_lookup(Decoder(schema, lambda _: None).decode([])[0])
    assert all(len(s.id_U) == 0 and s.index for s in lookup.stacks.values())
