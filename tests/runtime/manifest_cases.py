"""Builders of valid manifests and of manifests with arbitrary bodies, for tests of the commit format."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from roostream.runtime import manifest as manifests
from roostream.runtime.kafka.topics import Progress
from roostream.runtime.manifest import Manifest, StoredFile, WorkerPart
from roostream.runtime.work_unit import TableInput


def a_file(name: str, data: bytes = b"abc") -> StoredFile:
    return StoredFile(name=name, bytes=len(data), checksum=manifests.checksum_of(data))


def a_part(offsets: Progress, seq: int = 1, index: int = 0, **changes: Any) -> WorkerPart:
    name = manifests.worker_name(seq, 1, index)
    return dataclasses.replace(
        WorkerPart(offsets=offsets, file=a_file(name), dedupe=0, metrics={}), **changes
    )


def a_manifest(seq: int = 1, **changes: Any) -> Manifest:
    """A manifest of two shards and of one worker with twelve partitions. `changes` replaces fields; the files
    that the manifest names contain `abc`."""
    base = Manifest(
        seq=seq,
        incarnation=1,
        previous={"seq": seq - 1, "checksum": ""},
        step=10 * seq,
        watermark_ms=1_700_000_000_000,
        schema="00000000000000ff",
        seed=0,
        num_shards=2,
        num_buckets=64,
        num_partitions=4,
        kafka={"cluster_id": "c", "topics": {"samples": "id"}},
        rows_end={0: 5, 11: 6},
        shards={0: {"segments": [{"name": "a"}]}, 1: {"segments": []}},
        dense=a_file(manifests.dense_name(seq, 1)),
        model={"width": 8},
        workers={0: a_part({("samples", p): 10 * p for p in range(12)}, seq)},
    )
    return dataclasses.replace(base, **changes)


def encoded(body: dict[str, Any]) -> bytes:
    """Encode an arbitrary body as a manifest with a valid checksum."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"checksum": manifests.checksum_of(canonical), "body": body}).encode()


def an_input(**changes: Any) -> TableInput:
    """A training session over a table of two partitions; a stream offset was committed for one of them before
    the session."""
    base = TableInput(
        table="warehouse",
        version=7,
        digest="00000000000000aa",
        spec={"labels": "latest"},
        rows={0: 100, 1: 8},
        begins={("samples", 0): 5},
        ends={("samples", 0): 105, ("samples", 1): 9, ("corrections", 0): 3},
        topics={"samples": "id"},
        last_close_ms=1_700_000_000_000,
    )
    return dataclasses.replace(base, **changes)
