"""What training reads: chunks of decoded samples, each with the progress that it stands for.

Kafka is one source (trainer/record_source.py over roostream/runtime/kafka/kafka_consumer.py), records in memory another, a session of the
warehouse a third (trainer/sessions/session_source.py); one that has both phases wraps two (trainer/sessions/phased_source.py).
Gathering belongs to the source: it alone knows whether more will come (a live topic waits for a while, a file never), and a
source that reads ahead can wrap another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from roostream.errors import ConfigError
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.wire.batch import Batch
from roostream.wire.records import Record


class Rejected(NamedTuple):
    """A record that can't be trained on, with what its dead letter needs."""

    partition: Partition
    offset: int
    reason: str  # one of roostream.wire.records.REASONS
    error: str
    raw: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Requests and rejects of one cut of the input. Training it whole is what moves progress to `after`."""

    batch: Batch  # R requests, in the order in which they are trained
    rejects: Sequence[Rejected]
    after: Progress  # next offset behind this chunk, of every partition that it holds something of
    read_ms: int  # wall time at which its records were there, before they were decoded
    records: Sequence[Record] = ()  # what it was decoded from, where that is known

    def raw_of(self, partition: Partition, offset: int) -> bytes:
        """The record there, empty where that is not known."""
        found = [r.value for r in self.records if (r.topic, r.partition, r.offset) == (*partition, offset)]
        return found[0] or b"" if found else b""

    @property
    def close_ms_R(self) -> np.ndarray:
        """Close times of its samples, corrections left out."""
        return self.batch.close_ms_R[~self.batch.correction_R]

    @property
    def offsets(self) -> str:
        """From where to where it goes, for errors: "samples-0 12..19, samples-1 3..3"."""
        known = [(r.topic, r.partition, r.offset) for r in self.records] or [
            (*r.partition, r.offset) for r in self.rejects
        ]
        first = {
            p: min((at for *q, at in known if tuple(q) == p), default=after - 1)
            for p, after in self.after.items()
        }
        return ", ".join(
            f"{topic}-{n} {first[topic, n]}..{after - 1}" for (topic, n), after in sorted(self.after.items())
        )


@contextlib.contextmanager
def annotate_errors(what: str, chunk: Chunk) -> Iterator[None]:
    """An error of it says, in its notes, of which offsets it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the {what} of {chunk.offsets}")
        raise


class NewestIds(NamedTuple):
    """Samples of a partition, by close time; int64 [N] both."""

    sample_id: np.ndarray
    close_ms: np.ndarray


class BatchSource(Protocol):
    """Chunks of chosen partitions. One thread, but for `lag`."""

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        """The next chunk: `max_requests` samples, or fewer where the oldest of them has waited long enough; None where none is
        due after `timeout_s`. Over all partitions the oldest samples come first.

        Of one `partition`: whole chunks only, however long they take, so that chunks don't depend on time; the same partition
        is asked for until its chunk comes. A source that is away is waited for: None.
        """

    def rest(self, max_requests: int) -> Chunk | None:
        """What waits for a full chunk, when whoever asks knows that nothing more comes. None: nothing."""

    def seek(self, at: Progress) -> None:
        """Go on from these next offsets; a partition that isn't named, from its beginning. What was read ahead is forgotten.

        Raises:
            UnavailableError: the source is away; nothing was changed.
        """

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        """Give chunks of the partitions with these numbers alone from now on, which are the worker's own: of this session of the
        warehouse, whose positions are offsets then, or (None) of the stream; `seek` must follow.

        Raises:
            UnavailableError: the session can't be read now. CheckpointError: it isn't what was committed. ConfigError: this
                source has no sessions.
        """

    def bound(self, ends: Progress) -> None:
        """Give nothing of these partitions from these offsets on, until told otherwise; {} = everything. The chunk before a bound
        is cut short there; where one partition is asked for that is at its bound while others aren't, it is empty, so that the
        turn passes. Any thread. Only a `seek` may follow where an end is lowered."""

    @property
    def ended(self) -> bool:
        """Everything before the bounds was given; False where there are none. Any thread."""

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        """Where a session is over when everything before `trained` is: of its partitions, what the stream must not train again.
        Else {}.

        Raises:
            UnavailableError: it can't be read now.
        """

    def positions(self) -> Progress:
        """Every partition of this source → offset behind the last chunk that was given, or where `seek` put it."""

    def lag(self) -> dict[Partition, PartitionLag]:
        """As of a moment ago; {} while the ends are not known. Asks nobody; any thread."""

    @property
    def num_lost(self) -> int:
        """Samples that were gone before they could be read, so far. Any thread."""

    def close(self) -> None:
        """Idempotent."""


def refuse_session(session: TableInput | None) -> None:
    """Of a source of the stream alone. Raises ConfigError: a session is to be read."""
    if session is not None:
        raise ConfigError(
            f"expected the stream, got a session of {session.table}; this program reads no warehouse"
        )
