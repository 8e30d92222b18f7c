"""Ids: hashing into buckets, signed and unsigned form, Kafka keys and sample ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.schema import ids

U64 = st.integers(0, (1 << 64) - 1)


@given(
    values=st.lists(U64, min_size=1, max_size=30),
    table=st.integers(0, (1 << 32) - 1),
    buckets=st.integers(1, 4096),
)
def test_buckets_of_arrays_equal_buckets_of_single_ids(values: list[int], table: int, buckets: int) -> None:
    array = np.array(values, dtype=np.uint64).view(np.int64)
    expected = [ids.bucket_of(v, table, buckets) for v in values]
    assert ids.buckets_of(array, table, buckets).tolist() == expected
    assert ids.buckets_of(array, np.full(len(values), table, dtype=np.uint32), buckets).tolist() == expected


@given(value=U64)
def test_signed_and_unsigned_are_inverse(value: int) -> None:
    assert ids.unsigned(ids.signed(value)) == value
    assert ids.signed(value) == int(np.uint64(value).view(np.int64))


@given(user=U64, session=U64, request=st.text(max_size=9))
def test_a_key_is_eight_bytes_and_the_user_if_there_is_one(user: int, session: int, request: str) -> None:
    key = ids.key_bytes(user, session, request)
    assert len(key) == 8 and (not user or key == user.to_bytes(8, "little"))


def test_the_parts_of_a_sample_id_are_delimited() -> None:
    event = int.from_bytes(b"abcdefgh", "little")
    assert ids.sample_id(ids.NO_KEY, "r", event) != ids.sample_id(ids.NO_KEY, "rabcdefgh")
    assert ids.sample_id(ids.NO_KEY, "r", event) != ids.sample_id(
        ids.NO_KEY, "rabc", int.from_bytes(b"defgh", "little")
    )


@pytest.mark.parametrize("value", ["", 1 << 64, -(1 << 63) - 1, 10**30])
def test_an_empty_text_or_an_integer_beyond_64_bits_is_rejected(value: int | str) -> None:
    with pytest.raises(ValueError, match="expected"):
        ids.item_id(value)


def test_a_hint_names_the_text_or_integer_form_of_an_id_that_was_shown() -> None:
    text = ids.hash64("5")
    assert 'text "5"' in ids.other_id_form(5, [text, 9])
    assert "integer 5" in ids.other_id_form(text, [5, 9])
    assert "integer -3" in ids.other_id_form(ids.hash64("-3"), [ids.unsigned(-3)])
    assert 'text "5.0"' in ids.other_id_form(5, [ids.hash64("5.0"), 9])
    assert 'text "5.0"' in ids.other_id_form(ids.hash64("5.0"), [5, 9])
    assert ids.other_id_form(6, [text, 5]) == "" == ids.other_id_form(5, [])
