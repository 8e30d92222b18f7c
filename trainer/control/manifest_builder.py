"""The manifest of a commit, from what its members answered to CUT and WRITE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roostream.runtime.kafka.topics import flat
from roostream.runtime.manifest import Manifest, Restorable, StoredFile, WorkerPart
from trainer.control.types import CommitInProgress, CoordinatorConfig

Written = Sequence[Mapping[str, Any]]
"""What each member answered to WRITE, in the order of their indices."""


def draft(
    facts: CoordinatorConfig,
    incarnation: int,
    last: Restorable | None,
    commit: CommitInProgress,
    shards: Written,
    workers: Written,
) -> Manifest:
    """What the commit states, once it is linked. The first worker wrote the shared part."""
    rows_end: dict[int, int] = {}
    for shard in shards:  # the smallest: a restore that reads more republishes more, which harms nobody
        for partition, offset in shard.get("rows_end", {}).items():
            rows_end[int(partition)] = min(int(offset), rows_end.get(int(partition), int(offset)))
    return Manifest(
        seq=commit.seq,
        incarnation=incarnation,
        previous={"seq": last.manifest.seq, "checksum": last.checksum}
        if last
        else {"seq": 0, "checksum": ""},
        step=max(int(c["step"]) for c in commit.cuts),
        watermark_ms=watermark_of(commit),
        schema=facts.schema,
        seed=facts.seed,
        num_shards=facts.num_shards,
        num_buckets=facts.num_buckets,
        num_partitions=facts.num_partitions,
        kafka=dict(facts.kafka),
        rows_end=rows_end,
        shards={i: {k: v for k, v in shard.items() if k != "rows_end"} for i, shard in enumerate(shards)},
        dense=StoredFile(**workers[0]["dense"]),
        model=dict(commit.cuts[0]["model"]),
        bucket_map=last.manifest.bucket_map if last else None,
        workers={
            i: _part(cut, written) for i, (cut, written) in enumerate(zip(commit.cuts, workers, strict=True))
        },
        time_ms=max(int(c["time_ms"]) for c in commit.cuts),
    )


def watermark_of(commit: CommitInProgress) -> int:
    """That of the slowest worker; one that has never had a record (0) doesn't hold the others back."""
    return min((ms for cut in commit.cuts if (ms := int(cut["watermark_ms"]))), default=0)


def cut_twice(commit: CommitInProgress) -> bool:
    """Two workers cut the same partition."""
    cut = [partition for answer in commit.cuts for partition in flat(answer["offsets"])]
    return len(cut) != len(set(cut))


def _part(cut: Mapping[str, Any], written: Mapping[str, Any]) -> WorkerPart:
    return WorkerPart(
        offsets=flat(cut["offsets"]),
        file=StoredFile(**written["own"]),
        dedupe=int(written["dedupe"]),
        metrics=dict(written["metrics"]),
    )
