"""The past of a log through the stack's own archiver: it lies in a warehouse before anybody has trained it.

1 the log's records before a time go into the topics; the joiner, archivers and the compactor run, and no trainer does
2 wait until every sample that came of them is in the warehouse, and nothing there is due to be sealed
3 the trainer's programs begin: a fresh model is trained from that version of the warehouse alone
4 wait for the commit that hands over to the stream; what comes from then on is live
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roostream.cli.replay.stage import PastAtRest
from roostream.errors import ConfigError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.wire.records import Record

BEFORE = ("kafka", "flink", "joiner", "archiver", "compactor")
"""Programs that run while the past is archived."""
_STILL_S = 5.0  # without a new sample, though everything that was sent has been read: the joiner waits for later events


def overrides(warehouse: Path) -> dict[str, dict[str, Any]]:
    """What the programs are told beside the replay's own settings."""
    return {
        "archiver": {"flush_interval_ms": 2000},
        "compactor": {"interval_ms": 1000},
        "controller": {"warehouse": str(warehouse)},
    }


class Parted:
    """A log's records in two: those before a time, then the others."""

    def __init__(self, records: Iterable[Record], until_ms: int) -> None:
        self.until_ms, self._records = until_ms, iter(records)
        self._next: list[Record] = []

    def before(self) -> Iterator[Record]:
        """To its end before `others` begins."""
        for record in self._records:
            if record.timestamp_ms >= self.until_ms:
                self._next = [record]
                return
            yield record

    def others(self) -> Iterator[Record]:
        return itertools.chain(self._next, self._records)


class Past:
    """The warehouse of a stack that is being filled, then trained from. Nothing is read before the first question."""

    def __init__(self, place: Path, store: CheckpointStore, clock: Clock) -> None:
        """`store`: of the stack's commits. Raises ConfigError: the packages that read a warehouse aren't there."""
        try:
            from roostream.warehouse.compact import Compactor
            from roostream.warehouse.config import CompactorConfig
            from roostream.warehouse.warehouse import Warehouse
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"expected {error.name} to read a warehouse; pip install 'roostream[warehouse]'"
            ) from None
        self.store, self.clock = store, clock
        self._warehouse = Warehouse(place)
        self._compactor = Compactor(self._warehouse, CompactorConfig(warehouse=str(place)), clock)
        self._began_s = self._seen_s = clock.monotonic_s()
        self._seen: dict[int, int] = {}

    def is_archived(self, sample_ends: Mapping[int, int]) -> bool:
        """Step 2; `sample_ends`: partition → offset behind its last sample. UnavailableError: it can't be read now."""
        if sample_ends != self._seen:
            self._seen, self._seen_s = dict(sample_ends), self.clock.monotonic_s()
        if (
            not self._seen
            or self.clock.monotonic_s() - self._seen_s < _STILL_S
            or not self._warehouse.samples.exists()
        ):
            return False
        behind: dict[int, int] = {}
        for file in self._warehouse.samples.snapshot().files:
            behind[file.partition] = max(behind.get(file.partition, 0), file.last_offset + 1)
        return (
            all(behind.get(number, 0) >= end for number, end in self._seen.items())
            and not self._compactor.due()
        )

    def archived(self) -> PastAtRest:
        """What a fresh model will be trained from; its training is timed from here on."""
        files = self._warehouse.samples.snapshot().files
        archive_s, self._began_s = self.clock.monotonic_s() - self._began_s, self.clock.monotonic_s()
        return PastAtRest(
            samples=sum(file.rows for file in files),
            days=len({file.day for file in files}),
            files=len(files),
            sealed=sum(file.sealed for file in files),
            bytes=sum(file.bytes for file in files),
            archive_s=archive_s,
        )

    def is_handed_over(self) -> bool:
        """Step 4."""
        newest = manifests.newest(self.store)
        return newest is not None and newest.manifest.input is None

    def trained(self, archived: PastAtRest) -> PastAtRest:
        """The same with what a fresh model has trained of it, once that is handed over."""
        newest = manifests.newest(self.store)
        assert newest is not None, "it is handed over"
        requests = sum(part.metrics["requests"] for part in newest.manifest.workers.values())
        return dataclasses.replace(
            archived, trained=requests, train_s=self.clock.monotonic_s() - self._began_s
        )
