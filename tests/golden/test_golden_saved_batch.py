"""Saved batches of format 1 stay readable."""

from __future__ import annotations

from pathlib import Path

from roostream.wire.records import Record
from trainer.saved_batch import SavedBatch, decode

FILE = Path(__file__).parent / "format_1" / "saved.batch"
BATCH = SavedBatch(
    reason="the dense weights are not finite",
    findings=("dense weight deep.0.weight: 3 of 9 numbers are not finite",),
    manifest="manifests/00000003",
    checksum="ef60c380edf98237",
    incarnation=4,
    worker=1,
    step=17,
    time_ms=1_700_000_000_000,
    schema="[tables]\n",
    left_out=2,
    records=(
        Record("samples", 1, 40, 1_700_000_000_500, b"key", b"\x03\x01value"),
        Record("corrections", 0, 7, 1_700_000_000_600, None, b"\x04\x01other"),
    ),
)


def test_a_saved_batch_of_format_1_is_read() -> None:
    assert decode(FILE.read_bytes(), str(FILE)) == BATCH
