"""Checkpoint commits of formats 1 and 4 stay readable: their manifests and their workers' files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roostream.runtime import manifest as manifests
from roostream.runtime.manifest import FORMAT
from tests.trainer import samples
from tests.trainer.memory_store import MemoryStore
from trainer.dedupe import Dedupe
from trainer.partitions import metrics_of_snapshots, read_partitions

FORMAT_1, FORMAT_4 = (Path(__file__).parent / name for name in ("format_1", "format_4"))


def golden_store() -> MemoryStore:
    """Return an in-memory store with the two files of the format-1 commit."""
    store = MemoryStore()
    store.put("manifests/00000001", (FORMAT_1 / "manifest.json").read_bytes())
    store.put("dense/00000001-1.safetensors", (FORMAT_1 / "dense.safetensors").read_bytes())
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


def test_trained_ids_of_a_format_4_commit_are_read_from_its_worker_file() -> None:
    """Format 4 keeps the trained sample ids in the worker's file; format 5 keeps them in separate files."""
    store = MemoryStore()
    store.put("manifests/00000001", (FORMAT_4 / "manifest.json").read_bytes())
    store.put("workers/00000001-1-0.safetensors", (FORMAT_4 / "worker.safetensors").read_bytes())
    (part,) = manifests.load(store, "manifests/00000001").manifest.workers.values()
    found = read_partitions(store, part)
    assert part.id_files == () and {p: at.offset for p, at in found.items()} == part.offsets
    for number, ids in enumerate(([2, 4, 6], [1, 3, 5])):
        dedupe = Dedupe(3_600_000)
        dedupe.load(found["samples", number].dedupe)
        assert dedupe.cut().recent_ms == tuple(1_700_000_000_500 + 1000 * id_ for id_ in ids)
        times = np.array(dedupe.cut().recent_ms)
        assert dedupe.claim(np.array([*ids, 99]), np.array([*times, times[-1]])).tolist() == [False] * 3 + [
            True
        ]
    assert metrics_of_snapshots(found.values(), samples.schema().labels).report()["requests"] == 6
