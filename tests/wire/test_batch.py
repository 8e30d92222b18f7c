"""Taking, expanding, concatenating and re-batching requests keeps all data of each request together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.rebatch import Rebatcher, concatenate
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.jagged import Jagged
from roostream.wire.records import Record
from tests.trainer import samples


@pytest.fixture(scope="module")
def batch(
    schema: Schema, samples: Callable[[int], list[pb.Sample]], to_record: Callable[..., Record]
) -> Batch:
    decoder = Decoder(schema, lambda _: None)
    return decoder.decode([to_record(s, i) for i, s in enumerate(samples(30))])[0]


def rows_of(lists: Jagged, n: int) -> list[object]:
    """Return all values, weights and columns of row n."""
    out: list[object] = []
    for k, key in enumerate(lists.keys):
        start, end = lists.offsets_of(key)[n : n + 2]
        weights = lists.weights_of(key)
        columns = [c[start:end].tolist() for name, c in lists.columns.items() if name.split(".")[0] == key]
        out.append([lists.values_of(key)[start:end].tolist(), bool(lists.present_KN[k, n]), columns])
        out.append(None if weights is None else weights[start:end].tolist())
    return out


def request_contents(batch: Batch, r: int) -> list[object]:
    """Return all data of request r and of its candidates."""
    at = np.flatnonzero(batch.request_index_B == r)
    out: list[object] = [rows_of(batch.ro_lists, r), [rows_of(batch.nro_lists, int(b)) for b in at]]
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray) and field.name != "request_index_B":
            out.append(value[r].tobytes() if field.name.endswith(("_R", "_RF")) else value[at].tobytes())
    return out


def test_taken_requests_are_the_same_requests_with_repeats_and_in_any_order(batch: Batch) -> None:
    rows = np.array([7, 3, 3, 29, 0])
    taken = batch.take_requests(rows)
    assert [request_contents(taken, i) for i in range(5)] == [request_contents(batch, int(r)) for r in rows]


@pytest.mark.parametrize(("start", "end"), [(0, 30), (0, 4), (7, 8), (5, 5), (12, 30), (30, 30), (0, 0)])
def test_a_range_of_requests_equals_the_taken_requests(batch: Batch, start: int, end: int) -> None:
    cut, taken = batch.requests_between(start, end), batch.take_requests(np.arange(start, end))
    cut_arrays, taken_arrays = arrays_of(cut), arrays_of(taken)
    for name, expected in taken_arrays.items():
        found = cut_arrays[name]
        if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
            assert (found.dtype, found.shape, found.tobytes()) == (
                expected.dtype,
                expected.shape,
                expected.tobytes(),
            ), name
        elif isinstance(expected, dict) and isinstance(found, dict):
            assert {k: v.tobytes() for k, v in found.items()} == {
                k: v.tobytes() for k, v in expected.items()
            }, name
        else:
            assert found == expected or found is expected, name
    assert not any(
        np.shares_memory(value, batch.nro_float_BF)
        for value in cut_arrays.values()
        if isinstance(value, np.ndarray)
    )


def test_expansion_makes_every_candidate_a_request_with_the_same_features(batch: Batch) -> None:
    expanded = batch.expand()
    assert expanded.num_requests == expanded.num_candidates == batch.num_candidates
    for b in range(batch.num_candidates):
        r = int(batch.request_index_B[b])
        assert rows_of(expanded.ro_lists, b) == rows_of(batch.ro_lists, r)
        assert rows_of(expanded.nro_lists, b) == rows_of(batch.nro_lists, b)
        assert expanded.ro_float_RF[b].tobytes() == batch.ro_float_RF[r].tobytes()
        assert expanded.label_BT[b].tobytes() == batch.label_BT[b].tobytes()
    assert expanded.sample_id_R.tolist() == batch.sample_id_R[batch.request_index_B].tolist()


@settings(max_examples=20)
@given(size=st.integers(1, 90), cut=st.integers(0, 30))
def test_rebatching_keeps_all_impressions_in_order(batch: Batch, size: int, cut: int) -> None:
    rebatcher = Rebatcher(size)
    out = [
        b
        for part in (np.arange(0, cut), np.arange(cut, 30))
        for b in rebatcher.add(batch.take_requests(part))
    ]
    assert all(b.num_candidates == size for b in out)
    rest = rebatcher.flush()
    assert (rest is None or rest.num_candidates < size) and rebatcher.flush() is None
    whole = concatenate([*out, *([rest] if rest else [])])
    assert whole.item_B.tolist() == batch.item_B.tolist()
    assert whole.nro_lists.values_of("item").tolist() == batch.nro_lists.values_of("item").tolist()


def empty_lists(keys: tuple[str, ...], num_rows: int) -> Jagged:
    shape = (len(keys), num_rows)
    none = np.zeros(0, dtype=np.int64)
    return Jagged(
        keys=keys, lengths_KN=np.zeros(shape, np.int32), values=none, present_KN=np.zeros(shape, np.bool_)
    )


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 4), st.integers(1, 6))
def test_taken_rows_keep_values_weights_and_columns(seed: int, num_keys: int, num_rows: int) -> None:
    random = np.random.default_rng(seed)
    keys = tuple("abcd"[:num_keys])
    lengths_KN = random.integers(0, 3, (num_keys, num_rows)).astype(np.int32)
    totals = lengths_KN.sum(axis=1)
    values = random.integers(0, 99, int(totals.sum())).astype(np.int64)
    columns = {
        f"{key}.when": random.integers(0, 99, int(total))
        for key, total in zip(keys[1::2], totals[1::2], strict=True)
    }
    weights = random.random(len(values)).astype(np.float32) if seed % 2 else None
    lists = Jagged(
        keys=keys,
        lengths_KN=lengths_KN,
        values=values,
        present_KN=lengths_KN > 0,
        weights=weights,
        columns=columns,
    )
    rows_M = random.integers(0, num_rows, int(random.integers(0, 9)))
    taken = lists.take_rows(rows_M)
    assert taken.num_rows == len(rows_M) and sorted(taken.columns) == sorted(columns)
    assert [rows_of(taken, m) for m in range(len(rows_M))] == [rows_of(lists, n) for n in rows_M.tolist()]
    assert taken.values.dtype == np.int64 and taken.present_KN.flags.c_contiguous


def arrays_of(instance: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        found |= (
            {f"{field.name}.{k}": v for k, v in arrays_of(value).items()}
            if isinstance(value, Jagged)
            else {field.name: value}
        )
    return found


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_concatenated_parts_equal_the_batch(sizes: list[int]) -> None:
    whole, _ = Decoder(samples.schema(), {}.get).decode(samples.records(list(range(1, 1 + sum(sizes)))))
    ends = np.cumsum(sizes)
    parts = [whole.take_requests(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    got, expected = arrays_of(Batch.concat(parts)), arrays_of(whole)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert got[name].dtype == value.dtype
            assert np.array_equal(got[name], value, equal_nan=value.dtype.kind == "f"), name  # type: ignore[union-attr, arg-type]
