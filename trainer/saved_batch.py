"""The batch at which training ended, as a file: its raw records, and what everyone was restored to. `roostream inspect batch`
reads it (docs/operations/holds.md).

One safetensors file (roostream/runtime/tensor_file.py), so that reading it runs nothing of it:

    place      int64 [R, 6]: topic (a position in `topics`), partition, offset, time (ms), bytes of key and value; -1 = no key
    bytes      uint8: keys and values behind each other
    metadata   told: JSON of the other fields; checksum: xxh3-64 of it and of both tensors
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.manifest import checksum_of
from roostream.wire.records import Record

FORMAT = 1
MAX_BYTES = 16 << 20  # of a batch's records
MAX_FILES = 5
_FOLDER, _SUFFIX = "batches", ".batch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """A batch, and the moment at which it ended training."""

    reason: str
    findings: tuple[str, ...] = ()  # what was not finite, as far as that is known
    manifest: str = ""  # what everyone was restored to before; "" = the beginning
    checksum: str = ""  # of its body
    incarnation: int = 0
    worker: int = 0
    step: int = 0  # of the batch
    time_ms: int = 0  # wall clock
    schema: str = ""  # TOML of the schema in use
    left_out: int = 0  # records that were too many to be saved
    records: tuple[Record, ...] = ()


def fitting(records: Sequence[Record], max_bytes: int = MAX_BYTES) -> tuple[Record, ...]:
    """The first of them that fit."""
    sizes = np.cumsum([len(record.value) + len(record.key or b"") for record in records], dtype=np.int64)
    return tuple(records[: int((sizes <= max_bytes).sum())])


def encode(batch: SavedBatch) -> bytes:
    topics = sorted({record.topic for record in batch.records})
    place_R6 = np.array(
        [
            (
                topics.index(r.topic),
                r.partition,
                r.offset,
                r.timestamp_ms,
                -1 if r.key is None else len(r.key),
                len(r.value),
            )
            for r in batch.records
        ],
        dtype=np.int64,
    ).reshape(-1, 6)
    data = np.frombuffer(b"".join((record.key or b"") + record.value for record in batch.records), np.uint8)
    told = {
        field.name: getattr(batch, field.name)
        for field in dataclasses.fields(batch)
        if field.name != "records"
    }
    text = json.dumps({"format": FORMAT, "topics": topics, **told}, sort_keys=True)
    checksum = checksum_of(text.encode() + place_R6.tobytes() + data.tobytes())
    return tensor_file.encode({"place": place_R6, "bytes": data}, {"told": text, "checksum": checksum})


def decode(data: bytes, name: str) -> SavedBatch:
    """Raises ConfigError: not a saved batch, damaged, or of another format; says `name`."""
    try:
        tensors, metadata = tensor_file.decode(data)
    except CheckpointError as error:
        raise ConfigError(
            f"{name}: expected a batch that a worker saved, got something else: {error}"
        ) from None
    if not {"told", "checksum"} <= metadata.keys() or tensors.keys() != {"place", "bytes"}:
        raise ConfigError(
            f"{name}: expected a batch that a worker saved, got another safetensors file; name one of a worker's batches/"
        )
    text, place_R6 = metadata["told"], tensors["place"]
    if checksum_of(text.encode() + place_R6.tobytes() + tensors["bytes"].tobytes()) != metadata["checksum"]:
        raise ConfigError(
            f"{name}: expected bytes with the checksum {metadata['checksum']}, got others: the file is damaged"
        )
    told = json.loads(text)
    topics, version = told.pop("topics"), told.pop("format")
    if version != FORMAT:
        raise ConfigError(
            f"{name}: expected a saved batch of format {FORMAT}, got {version}; use the Roostream that wrote it"
        )
    records = _records(place_R6, tensors["bytes"].tobytes(), topics)
    return SavedBatch(**{**told, "findings": tuple(told["findings"]), "records": records})


def _records(place_R6: np.ndarray, data: bytes, topics: Sequence[str]) -> tuple[Record, ...]:
    out, at = [], 0
    for topic, partition, offset, time_ms, key_bytes, value_bytes in place_R6.tolist():
        value_at = at + max(key_bytes, 0)
        key = None if key_bytes < 0 else data[at:value_at]
        at = value_at + value_bytes
        out.append(Record(topics[topic], partition, offset, time_ms, key, data[value_at:at]))
    return tuple(out)


class SavedBatches:
    """A folder's, the newest MAX_FILES of them."""

    def __init__(self, home: Path) -> None:
        self.store = FileStore(home)

    def save(self, batch: SavedBatch) -> Path:
        """Raises UnavailableError: the folder can't be written; nothing was changed but what was too old."""
        name = f"{_FOLDER}/{batch.time_ms:013d}-{batch.step}{_SUFFIX}"
        self.store.put(name, encode(batch))
        for old in self._names()[:-MAX_FILES]:
            self.store.delete(old)
        return self.store.path(name)

    def newest(self) -> str:
        """Its path; "" where there is none, or the folder can't be read."""
        try:
            names = self._names()
        except UnavailableError:
            return ""
        return str(self.store.path(names[-1])) if names else ""

    def _names(self) -> list[str]:
        return [name for name in self.store.list(_FOLDER) if name.endswith(_SUFFIX)]
