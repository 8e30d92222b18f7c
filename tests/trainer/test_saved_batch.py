"""Saved batches: they are read as they were written, and other files are refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime import tensor_file
from roostream.wire.records import Record
from tests.trainer import samples
from trainer.saved_batch import MAX_FILES, SavedBatch, SavedBatches, decode, encode, fitting

RECORDS = tuple(samples.records([1, 2, 3]))
SAVED = SavedBatch(
    reason="nothing is finite",
    findings=("dense weight x: 3 of 9 numbers are not finite",),
    manifest="manifests/00000003",
    checksum="00ff",
    incarnation=4,
    worker=1,
    step=17,
    time_ms=1_700_000_000_000,
    schema="[tables]",
    left_out=2,
    records=RECORDS,
)


@given(
    st.lists(
        st.builds(
            Record,
            st.sampled_from(["samples", "corrections"]),
            st.integers(0, 9),
            st.integers(0, 1 << 60),
            st.integers(0, 1 << 60),
            st.none() | st.binary(max_size=9),
            st.binary(max_size=99),
        ),
        max_size=9,
    )
)
def test_saved_records_round_trip(records: list[Record]) -> None:
    batch = dataclasses.replace(SAVED, records=tuple(records))
    assert decode(encode(batch), "x") == batch


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x.batch: expected a batch"),
        (b"# a TOML file", "expected a batch"),
        (encode(SAVED)[:-1], "expected a batch"),
        (tensor_file.encode({"a": np.zeros(3)}, {}), "got another safetensors file"),
        (encode(SAVED)[:-1] + b"!", "damaged"),
        (
            encode(SAVED).replace(b"nothing is finite", b"nothing is Finite"),
            "damaged",
        ),
    ],
)
def test_damaged_or_foreign_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.batch: expected ") as caught:
        decode(data, "x.batch")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_large_batch_is_saved_partly() -> None:
    size = len(RECORDS[0].value) + len(RECORDS[0].key or b"")
    assert fitting(RECORDS, 10 * size) == RECORDS and fitting(RECORDS, size) == RECORDS[:1]
    assert fitting(RECORDS, size - 1) == ()
    assert fitting([]) == ()


def test_a_folder_keeps_only_the_newest_batches(tmp_path: Path) -> None:
    batches = SavedBatches(tmp_path / "worker")
    assert batches.newest() == ""
    unfinished = tmp_path / "worker" / "batches" / ".roostream-unfinished.x"  # left by a killed process
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (0, 0))
    for n in range(MAX_FILES + 3):
        path = batches.save(SavedBatch(reason=str(n), time_ms=n))
    assert batches.newest() == str(path) and decode(path.read_bytes(), "x").reason == str(MAX_FILES + 2)
    assert len(list(path.parent.iterdir())) == MAX_FILES


def test_a_batch_is_kept_when_the_clock_was_set_back(tmp_path: Path) -> None:
    batches = SavedBatches(tmp_path)
    for n in range(MAX_FILES):
        batches.save(SavedBatch(reason="", time_ms=100 + n))
    path = batches.save(SavedBatch(reason="now", time_ms=5))
    assert decode(path.read_bytes(), "x").reason == "now"
    assert len(list(path.parent.iterdir())) == MAX_FILES


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "worker").write_text("a file")
    with pytest.raises(UnavailableError, match="can't be written"):
        SavedBatches(tmp_path / "worker").save(SAVED)
