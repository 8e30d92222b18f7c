"""The parts of segments in a shard's key-value store, each verified whenever it is read.

d/<segment>                     directory: its parts with checksums; empty while it is being written
b/<segment>/<stack>/<bucket>    one block (param_server/row_block.py); `.<number>` follows from the second
                                block of a bucket on
r/<segment>/<stack>             state of the stack's eviction policy at that commit, if it has any
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from param_server import row_block as blocks
from param_server.key_value_store import KeyValueStore
from param_server.row_block import RowBlock
from roostream.errors import CheckpointError, OtherVersionError
from roostream.runtime.manifest import StoredFile
from roostream.schema.schema import stack_shape

FORMAT, FORMAT_BLOCKS = 2, 3
"""Formats of directories: of one block a bucket, and of several. Format 1, without complete buckets, can be
read too."""

_BATCH_BYTES = 8 << 20


class Segment(NamedTuple):
    """A segment as a manifest names it."""

    name: str
    rows: int
    bytes: int
    checksum: str  # of its directory, xxh3-64 in hex; the directory has those of the blocks
    copy: StoredFile | None = None  # in the checkpoint store; None = the shard's disk has the only one

    def plain(self) -> dict[str, Any]:
        """As a manifest has it."""
        found = self._asdict()
        del found["copy"]
        return found | ({"copy": dataclasses.asdict(self.copy)} if self.copy else {})

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Segment:
        """Inverse of `plain`. Raises KeyError, TypeError: it is something else."""
        copy = plain.get("copy")
        name, rows, num_bytes, checksum = (plain[f] for f in ("name", "rows", "bytes", "checksum"))
        return cls(name, rows, num_bytes, checksum, StoredFile(**copy) if copy else None)


class BlockEntry(NamedTuple):
    """A block as a directory names it."""

    bytes: int
    checksum: str
    number: int = 0  # among the blocks of its bucket


class SegmentDirectory(NamedTuple):
    """The parts of one segment."""

    name: str
    blocks: Mapping[str, Mapping[int, Sequence[BlockEntry]]]  # stack → bucket → blocks
    complete: frozenset[int]  # buckets with all their rows: older blocks of them are obsolete
    policy_checksums: Mapping[str, str]  # stack → checksum


class SegmentBucket(NamedTuple):
    """A bucket's blocks in all segments of a commit."""

    stack: str
    bucket: int
    blocks: list[RowBlock]  # newest first


class SegmentParts:
    """`shapes`: stack → (width, state width).

    Reading raises CheckpointError if a part is absent or damaged. Every method raises UnavailableError if the
    store cannot be used now.
    """

    def __init__(self, store: KeyValueStore, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.store, self.shapes = store, dict(shapes)

    def names(self) -> list[str]:
        """All segments, including unfinished ones."""
        return [key[2:].decode() for key in self.store.keys(b"d/")]

    def write(
        self,
        name: str,
        parts: Iterable[SegmentBucket],
        complete: Iterable[int],
        policy_states: Mapping[str, bytes],
    ) -> Segment:
        """Store a segment, replacing one of the same name. Each part has one block; parts of the same bucket
        follow each other and have different keys. Durable on return."""
        self.delete([name])
        self.store.write([(_directory_key(name), b"")])
        entries: dict[str, dict[str, Any]] = {}
        total, rows, format_ = 0, 0, FORMAT

        def encoded() -> Iterator[tuple[bytes, bytes]]:
            nonlocal total, rows, format_
            for stack, bucket, (block,) in parts:
                first = entries.setdefault(stack, {}).get(str(bucket))
                more = first.setdefault("more", []) if first else []
                key = _block_key(name, stack, bucket, len(more) + 1 if first else 0)
                data = blocks.encode(block, key)
                entry = {"bytes": len(data), "checksum": data[-8:].hex()}
                if first:
                    more.append(entry)
                    format_ = FORMAT_BLOCKS
                else:
                    entries[stack][str(bucket)] = entry
                total, rows = total + len(data), rows + len(block.keys)
                yield key, data

        batch = self._write_batches(encoded())
        states = {stack: (_policy_key(name, stack), state) for stack, state in policy_states.items()}
        content: dict[str, Any] = {"format": format_, "name": name, "blocks": entries}
        content["whole"] = sorted(complete)
        if states:
            total += sum(len(state) for _, state in states.values())
            sums = {stack: f"{blocks.checksum(state, key):016x}" for stack, (key, state) in states.items()}
            content["residency"] = {stack: {"checksum": sum_} for stack, sum_ in sums.items()}
        directory = msgspec.json.encode(content)
        self.store.write([*batch, *states.values(), (_directory_key(name), directory)], sync=True)
        return Segment(name, rows, total, f"{blocks.checksum(directory):016x}")

    def directory(self, segment: Segment) -> SegmentDirectory:
        return _directory(segment, self._directory_bytes(segment))

    def has_directory(self, segment: Segment) -> bool:
        """Whether this segment is here, as far as its directory tells."""
        return _is_directory(segment, self.store.get(_directory_key(segment.name)))

    def block(self, name: str, stack: str, bucket: int, entry: BlockEntry) -> RowBlock:
        key = _block_key(name, stack, bucket, entry.number)
        data = self.store.get(key)
        if data is None or not _is_named(entry, data):
            raise _damaged(key)
        return blocks.decode(data, key, *self.shape(stack))

    def sizes(self, segment: Segment) -> Iterator[tuple[bytes, int]]:
        """Key and size of every part of a segment."""
        yield _directory_key(segment.name), len(self._directory_bytes(segment))
        directory = self.directory(segment)
        for key, entry in _block_entries(directory):
            yield key, entry.bytes
        for stack, checksum in directory.policy_checksums.items():
            yield _policy_key(segment.name, stack), len(self.policy_state(segment.name, stack, checksum))

    def read(self, segment: Segment) -> Iterator[tuple[bytes, bytes]]:
        """Key and bytes of every part of a segment, verified, the directory first."""
        yield _directory_key(segment.name), self._directory_bytes(segment)
        directory = self.directory(segment)
        for key, entry in _block_entries(directory):
            data = self.store.get(key)
            if data is None or not _is_block(key, entry, data):
                raise _damaged(key)
            yield key, data
        for stack, checksum in directory.policy_checksums.items():
            yield _policy_key(segment.name, stack), self.policy_state(segment.name, stack, checksum)

    def store_again(self, segment: Segment, parts: Iterator[tuple[bytes, bytes]]) -> None:
        """Inverse of `read`: replace the parts of a segment that is damaged or absent here by these. Durable
        on return.

        Raises:
            CheckpointError: `parts` are not those of `segment`. Parts that are in order stay; the segment
            counts as absent if its directory is absent now.
        """
        key, directory_bytes = next(parts)
        if key != _directory_key(segment.name) or not _is_directory(segment, directory_bytes):
            raise _damaged(key)
        directory = _directory(segment, directory_bytes)
        missing = dict(_block_entries(directory))
        policies = {_policy_key(segment.name, stack): s for stack, s in directory.policy_checksums.items()}
        if not self.has_directory(segment):
            self.store.write([(key, b"")])

        def verified() -> Iterator[tuple[bytes, bytes]]:
            for key, data in parts:
                entry = missing.pop(key, None)
                is_policy = key in policies and f"{blocks.checksum(data, key):016x}" == policies.pop(key)
                if not is_policy and (entry is None or not _is_block(key, entry, data)):
                    raise _damaged(key)
                yield key, data

        batch = self._write_batches(verified())
        if missing or policies:
            raise _damaged(next(iter(missing or policies)))
        self.store.write([*batch, (_directory_key(segment.name), directory_bytes)], sync=True)

    def _write_batches(self, parts: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Write parts in batches of _BATCH_BYTES; return the last batch, which is not written yet."""
        batch, waiting = list[tuple[bytes, bytes]](), 0
        for key, data in parts:
            batch.append((key, data))
            waiting += len(data)
            if waiting >= _BATCH_BYTES:
                self.store.write(batch)
                batch, waiting = [], 0
        return batch

    def _directory_bytes(self, segment: Segment) -> bytes:
        data = self.store.get(_directory_key(segment.name))
        if not data:
            raise CheckpointError(
                f"segment {segment.name} is absent; expected the data directory of the shard that wrote it"
            )
        if not _is_directory(segment, data):
            raise CheckpointError(
                f"segment {segment.name}: expected checksum {segment.checksum}, got another: it is damaged"
            )
        return data

    def shape(self, stack: str) -> tuple[int, int]:
        """(width, state width); of a former stack as its name tells."""
        shape = self.shapes.get(stack) or stack_shape(stack)
        if shape is None:
            raise OtherVersionError(
                f"expected a stack such as d16-adagrad, got {stack!r}; use the version of Roostream that "
                "wrote it"
            )
        return shape

    def policy_state(self, name: str, stack: str, checksum: str) -> bytes:
        key = _policy_key(name, stack)
        data = self.store.get(key)
        if data is None or f"{blocks.checksum(data, key):016x}" != checksum:
            raise _damaged(key)
        return data

    def delete(self, names: Iterable[str]) -> None:
        """Can be repeated after an interruption."""
        for name in names:
            keys = [key for kind in "br" for key in self.store.keys(f"{kind}/{name}/".encode())]
            keys.append(_directory_key(name))
            self.store.write((), keys)


def _directory_key(name: str) -> bytes:
    return f"d/{name}".encode()


def _policy_key(name: str, stack: str) -> bytes:
    return f"r/{name}/{stack}".encode()


def _block_key(name: str, stack: str, bucket: int, number: int) -> bytes:
    return f"b/{name}/{stack}/{bucket:05d}{f'.{number}' if number else ''}".encode()


def _entries(stored: Mapping[str, Any]) -> list[BlockEntry]:
    """A bucket's blocks, as a directory states them."""
    return [
        BlockEntry(entry["bytes"], entry["checksum"], number)
        for number, entry in enumerate([stored, *stored.get("more", ())])
    ]


def _directory(segment: Segment, data: bytes) -> SegmentDirectory:
    content = msgspec.json.decode(data)
    if content["format"] not in (1, FORMAT, FORMAT_BLOCKS):
        raise OtherVersionError(
            f"segment {segment.name}: expected format 1 to {FORMAT_BLOCKS}, got {content['format']}; "
            "use the version of Roostream that wrote it"
        )
    found = {
        stack: {int(bucket): _entries(entry) for bucket, entry in entries.items()}
        for stack, entries in content["blocks"].items()
    }
    checksums = {stack: entry["checksum"] for stack, entry in content.get("residency", {}).items()}
    return SegmentDirectory(segment.name, found, frozenset(content.get("whole", ())), checksums)


def _block_entries(directory: SegmentDirectory) -> Iterator[tuple[bytes, BlockEntry]]:
    """Key and entry of every block of a segment."""
    for stack, buckets in directory.blocks.items():
        for bucket, entries in buckets.items():
            for entry in entries:
                yield _block_key(directory.name, stack, bucket, entry.number), entry


def _is_named(entry: BlockEntry, data: bytes) -> bool:
    """Whether these bytes have the size and checksum that a directory names."""
    return len(data) == entry.bytes and data[-8:].hex() == entry.checksum


def _is_block(key: bytes, entry: BlockEntry, data: bytes) -> bool:
    """Whether a directory names these bytes, and their checksum is right."""
    checksum = int.from_bytes(data[-8:], "little")
    return _is_named(entry, data) and blocks.checksum(memoryview(data)[:-8], key) == checksum


def _is_directory(segment: Segment, data: bytes | None) -> bool:
    """Whether this is the directory that a manifest names."""
    return bool(data) and f"{blocks.checksum(data or b''):016x}" == segment.checksum


def _damaged(key: bytes) -> CheckpointError:
    return CheckpointError(
        f"segment part {key.decode(errors='replace')} is damaged: absent, or not what was committed"
    )
