"""The batch at which training failed, saved to a file: its raw records, and the commit that it was trained
from. Read it with `roostream inspect batch` (docs/operations/troubleshooting.md).

The format is safetensors (roostream/runtime/tensor_file.py), so that reading it executes no code:

    place      int64 [R, 6]: topic (index in `topics`), partition, offset, time (ms), bytes of key and value;
               -1 = no key
    bytes      uint8: keys and values, concatenated
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
    """A batch, and the state in which training failed at it."""

    reason: str
    findings: tuple[str, ...] = ()  # which numbers were not finite, as far as known
    manifest: str = ""  # the last restored commit; "" = the beginning
    checksum: str = ""  # of the manifest
    incarnation: int = 0
    worker: int = 0
    step: int = 0  # of the batch
    time_ms: int = 0  # wall clock
    schema: str = ""  # TOML of the schema in use
    left_out: int = 0  # number of records that were not saved, for size
    records: tuple[Record, ...] = ()


def fitting(records: Sequence[Record], max_bytes: int = MAX_BYTES) -> tuple[Record, ...]:
    """The first records that fit into `max_bytes`."""
    sizes = np.cumsum([len(record.value) + len(record.key or b"") for record in records], dtype=np.int64)
    return tuple(records[: int((sizes <= max_bytes).sum())])


def encode(batch: SavedBatch) -> bytes:
    """The bytes of a saved batch; see the module."""
    topics = sorted({record.topic for record in batch.records})
    places = [
        (
            topics.index(r.topic),
            r.partition,
            r.offset,
            r.timestamp_ms,
            -1 if r.key is None else len(r.key),
            len(r.value),
        )
        for r in batch.records
    ]
    place_R6 = np.array(places, dtype=np.int64).reshape(-1, 6)
    data = np.frombuffer(b"".join((record.key or b"") + record.value for record in batch.records), np.uint8)
    names = [field.name for field in dataclasses.fields(batch) if field.name != "records"]
    fields = {name: getattr(batch, name) for name in names}
    text = json.dumps({"format": FORMAT, "topics": topics, **fields}, sort_keys=True)
    checksum = checksum_of(text.encode() + place_R6.tobytes() + data.tobytes())
    return tensor_file.encode({"place": place_R6, "bytes": data}, {"told": text, "checksum": checksum})


def decode(data: bytes, name: str) -> SavedBatch:
    """Read a saved batch. Raises ConfigError: not a saved batch, damaged, or of another format; the message
    contains `name`."""
    try:
        tensors, metadata = tensor_file.decode(data)
    except CheckpointError as error:
        raise ConfigError(
            f"{name}: expected a batch saved by a worker, got something else: {error}"
        ) from None
    if not {"told", "checksum"} <= metadata.keys() or tensors.keys() != {"place", "bytes"}:
        raise ConfigError(
            f"{name}: expected a batch saved by a worker, got another safetensors file; "
            "choose one in a worker's batches/"
        )
    text, place_R6 = metadata["told"], tensors["place"]
    if checksum_of(text.encode() + place_R6.tobytes() + tensors["bytes"].tobytes()) != metadata["checksum"]:
        raise ConfigError(
            f"{name}: expected the checksum {metadata['checksum']}, got another: the file is damaged"
        )
    fields = json.loads(text)
    topics, version = fields.pop("topics"), fields.pop("format")
    if version != FORMAT:
        raise ConfigError(
            f"{name}: expected a saved batch of format {FORMAT}, got {version}; "
            "use the version of Roostream that wrote it"
        )
    records = _records(place_R6, tensors["bytes"].tobytes(), topics)
    return SavedBatch(**{**fields, "findings": tuple(fields["findings"]), "records": records})


def _records(place_R6: np.ndarray, data: bytes, topics: Sequence[str]) -> tuple[Record, ...]:
    out, at = [], 0
    for topic, partition, offset, time_ms, key_bytes, value_bytes in place_R6.tolist():
        value_at = at + max(key_bytes, 0)
        key = None if key_bytes < 0 else data[at:value_at]
        at = value_at + value_bytes
        out.append(Record(topics[topic], partition, offset, time_ms, key, data[value_at:at]))
    return tuple(out)


class SavedBatches:
    """The newest MAX_FILES saved batches of a folder."""

    def __init__(self, home: Path) -> None:
        self.store = FileStore(home)

    def save(self, batch: SavedBatch) -> Path:
        """Save a batch. Returns its path. Raises UnavailableError: the folder cannot be written."""
        name = f"{_FOLDER}/{batch.time_ms:013d}-{batch.step}{_SUFFIX}"
        self.store.put(name, encode(batch))
        others = [other for other in self._names() if other != name]  # the clock may have been set back
        for old in others[: 1 - MAX_FILES]:
            self.store.delete(old)
        self.store.sweep()
        return self.store.path(name)

    def newest(self) -> str:
        """Path of the newest one; "" if there is none, or the folder cannot be read."""
        try:
            names = self._names()
        except UnavailableError:
            return ""
        return str(self.store.path(names[-1])) if names else ""

    def _names(self) -> list[str]:
        return [name for name in self.store.list(_FOLDER) if name.endswith(_SUFFIX)]
