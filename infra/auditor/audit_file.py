"""What the auditor keeps between two runs: sums, open ids and positions of one moment, as one file that is whole or not there.

8 bytes xxh3-64 of the rest, then a tensor file (roostream/runtime/tensor_file.py). A file of another format, or a damaged one, is no loss:
the topics are read anew.
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

from roostream.errors import CheckpointError
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka.topics import Progress, flat, nested

log = logging.getLogger("roostream.auditor")
FORMAT = 3  # 1 had no recent times, 2 no dispositions
_READ = ("1", "2", "3")
NAME = "sums"
_SUM_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """`numbers` and `arrays` are those of `Accounts.dump`; `topics`: full name → the broker's id of it."""

    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]
    progress: Progress
    topics: dict[str, str]


def write(home: Path, saved: Saved) -> None:
    """Replace what was written before. OSError: the old file stays."""
    words = {"numbers": saved.numbers, "progress": nested(saved.progress), "topics": saved.topics}
    data = tensor_file.encode(
        saved.arrays, {"format": str(FORMAT), **{k: json.dumps(v) for k, v in words.items()}}
    )
    FileStore(home).put(NAME, _checksum(data) + data)


def read(home: Path, topics: Mapping[str, str]) -> Saved | None:
    """What was written last; None, with a word why, if there is none, it is damaged, or it is of other topics than `topics`."""
    try:
        saved = _decode(FileStore(home).get(NAME))
    except (CheckpointError, OSError, KeyError, ValueError, TypeError) as error:
        if (home / NAME).exists():
            log.warning("%s can't be used (%s): the topics are read anew", home / NAME, error)
        return None
    if saved.topics != topics:
        log.warning(
            "%s is of topics that were deleted since: those that are there are read anew", home / NAME
        )
        return None
    return saved


def _decode(data: bytes) -> Saved:
    if data[:_SUM_BYTES] != _checksum(data[_SUM_BYTES:]):
        raise CheckpointError(f"expected the checksum of its {len(data)} bytes, got another: it is damaged")
    arrays, words = tensor_file.decode(data[_SUM_BYTES:])
    if words.get("format") not in _READ:
        raise CheckpointError(f"expected format {FORMAT}, got {words.get('format')!r}")
    numbers, progress, topics = (json.loads(words[k]) for k in ("numbers", "progress", "topics"))
    return Saved(numbers=numbers, arrays=arrays, progress=flat(progress), topics=topics)


def _checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64(data).digest()
