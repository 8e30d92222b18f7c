"""Every version reads a commit of format 1: its manifest and its dense file."""

from __future__ import annotations

from pathlib import Path

from roostream.runtime import manifest as manifests
from roostream.runtime.manifest import FORMAT
from tests.trainer.memory_store import MemoryStore

FOLDER = Path(__file__).parent / "format_1"


def golden_store() -> MemoryStore:
    """A store with the two files of the commit."""
    store = MemoryStore()
    store.put("manifests/00000001", (FOLDER / "manifest.json").read_bytes())
    store.put("dense/00000001-1.safetensors", (FOLDER / "dense.safetensors").read_bytes())
    return store


def test_a_manifest_of_format_1_is_read_as_a_commit_of_one_worker_with_four_partitions() -> None:
    found = manifests.load(golden_store(), "manifests/00000001")
    manifest = found.manifest
    assert found.checksum == "ef60c380edf98237"
    assert (manifest.seq, manifest.step, manifest.watermark_ms, manifest.num_partitions) == (
        1,
        2,
        1_700_000_008_500,
        4,
    )
    assert manifest.offsets == {("samples", 0): 4, ("samples", 1): 4} and manifest.rows_end == {0: 7, 3: 9}
    (part,) = manifest.workers.values()
    assert (part.file, part.dedupe, part.metrics["requests"]) == (manifest.dense, 8, 8)
    assert manifests.read_file(golden_store(), part.file)


def test_the_golden_commit_is_written_in_the_current_format() -> None:
    manifest = manifests.load(golden_store(), "manifests/00000001").manifest
    again = manifests.decode(manifest.encode())
    assert again.manifest == manifest and f'"format":{FORMAT}'.encode() in manifest.encode()
