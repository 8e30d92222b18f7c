"""The auditor's state between two runs: sums, open ids and offsets of one moment, in one file that is
replaced atomically.

8 bytes xxh3-64 of the rest, then a tensor file (roostream/runtime/tensor_file.py). If the file is damaged or
of an unknown format, the topics are read again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from infra.auditor.accounts import ALL, Share
from roostream.errors import CheckpointError
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka.topics import Partition, Progress, flat, nested

log = logging.getLogger("roostream.auditor")
FORMAT = 3  # 1 had no recent times, 2 had no dispositions
SHARE_FORMAT = 4  # of one of several auditors; programs that know of one auditor do not read it
_READABLE_FORMATS = ("1", "2", "3", "4")
NAME = "sums"
_SUM_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """The auditor's state. `numbers` and `arrays`: of `Accounts.dump`. `topics`: full name → the broker's
    topic id. `leader_epochs`: see RecordConsumer; old files have none. `share`: the partitions of this
    auditor."""

    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]
    progress: Progress
    topics: dict[str, str]
    leader_epochs: dict[Partition, int] = dataclasses.field(default_factory=dict)
    share: Share = ALL


def write(home: Path, saved: Saved) -> None:
    """Replace the file. Raises OSError or UnavailableError: the old file stays."""
    metadata = {
        "numbers": saved.numbers,
        "progress": nested(saved.progress),
        "leader_epochs": nested(saved.leader_epochs),
        "topics": saved.topics,
        "share": saved.share,
    }
    number = FORMAT if saved.share == ALL else SHARE_FORMAT
    data = tensor_file.encode(
        saved.arrays, {"format": str(number), **{k: json.dumps(v) for k, v in metadata.items()}}
    )
    FileStore(home).put(NAME, _checksum(data) + data)


def read(home: Path, topics: Mapping[str, str], share: Share = ALL) -> Saved | None:
    """The saved state; None, with a log line, if it is missing, damaged, of other topics than `topics`, or of
    another share of the partitions."""
    try:
        saved = _decode(FileStore(home).get(NAME))
    except (CheckpointError, OSError, KeyError, ValueError, TypeError) as error:
        if (home / NAME).exists():
            log.warning("%s can't be used (%s); reading the topics again", home / NAME, error)
        return None
    if saved.topics != topics:
        log.warning(
            "%s belongs to topics that were deleted since; reading the present topics from the start",
            home / NAME,
        )
        return None
    if saved.share != share:
        log.warning(
            "%s is the state of auditor %d of %d; as auditor %d of %d, reading the topics again",
            home / NAME,
            *saved.share,
            *share,
        )
        return None
    return saved


def _decode(data: bytes) -> Saved:
    if data[:_SUM_BYTES] != _checksum(data[_SUM_BYTES:]):
        raise CheckpointError(
            f"expected the checksum of its {len(data)} bytes, got another: the file is damaged"
        )
    arrays, metadata = tensor_file.decode(data[_SUM_BYTES:])
    if metadata.get("format") not in _READABLE_FORMATS:
        raise CheckpointError(f"expected format {FORMAT}, got {metadata.get('format')!r}")
    numbers, progress, topics = (json.loads(metadata[k]) for k in ("numbers", "progress", "topics"))
    epochs = flat(json.loads(metadata.get("leader_epochs", "{}")))
    share = Share(*json.loads(metadata.get("share", "[0, 1]")))
    return Saved(
        numbers=numbers,
        arrays=arrays,
        progress=flat(progress),
        topics=topics,
        leader_epochs=epochs,
        share=share,
    )


def _checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64(data).digest()
