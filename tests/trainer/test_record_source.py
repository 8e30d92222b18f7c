"""The chunks of a record source: when a chunk is returned, and the offsets after it."""

from __future__ import annotations

from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import CORRECTIONS, Partition, Progress
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS
from trainer.chunks import Chunk
from trainer.record_source import CorrectionsBeforeTheirSamples, RecordSource

EVEN, ODD = PARTITIONS


class SourceHarness:
    def __init__(self, records: list[Record]) -> None:
        self.clock, self.reader = FakeClock(samples.T0), MemoryConsumer(PARTITIONS, records)
        self.source = RecordSource(
            self.reader, Decoder(samples.schema(), {}.get), self.clock, max_wait_ms=500
        )


def ids(chunk: Chunk | None) -> list[int]:
    assert chunk is not None
    return chunk.batch.sample_id_R.tolist()


def test_a_full_chunk_is_returned_at_once_oldest_first() -> None:
    source = SourceHarness(samples.records([1, 2, 3, 4, 5])).source
    chunk = source.poll(3, 0.0)
    assert ids(chunk) == [1, 2, 3] and chunk is not None
    assert chunk.after == {EVEN: 1, ODD: 2} and chunk.read_ms == samples.T0
    assert source.positions() == {EVEN: 1, ODD: 2}


def test_a_partial_chunk_is_returned_after_the_maximum_wait() -> None:
    harness = SourceHarness(samples.records([1, 2]))
    assert harness.source.poll(3, 0.0) is None and harness.source.positions() == {EVEN: 0, ODD: 0}, (
        "positions do not count records that were read but not returned"
    )
    harness.clock.advance(0.4)
    assert harness.source.poll(3, 0.0) is None
    harness.clock.advance(0.1)
    assert ids(harness.source.poll(3, 0.0)) == [1, 2]
    assert harness.source.poll(3, 0.0) is None


def test_a_requested_partition_gives_only_full_chunks() -> None:
    harness = SourceHarness(samples.records([1, 2, 3, 4]))
    assert ids(harness.source.poll(2, 0.0, ODD)) == [1, 3]
    assert harness.source.poll(3, 0.0, EVEN) is None
    harness.clock.advance(60)
    assert harness.source.poll(3, 0.0, EVEN) is None
    harness.reader.append(samples.records([1, 2, 3, 4, 6])[4:])
    assert ids(harness.source.poll(3, 0.0, EVEN)) == [2, 4, 6]


def test_a_seek_drops_what_was_read() -> None:
    source = SourceHarness(samples.records([1, 2, 3])).source
    assert source.poll(4, 0.0) is None
    source.seek({EVEN: 0, ODD: 1})
    assert source.poll_remaining(4) is None and source.positions() == {EVEN: 0, ODD: 1}
    assert ids(source.poll(2, 0.0)) == [2, 3]


class LosingConsumer(MemoryConsumer):
    """A consumer whose broker loses the records from offset `cut` on, and reuses their offsets for others."""

    epoch = 3

    def lose(self, partition: Partition, cut: int, replacements: list[Record]) -> None:
        others = [r for p in self.partitions if p != partition for r in self._logs[p]]
        kept = self._logs[partition][:cut]
        positions, lost = {**self.positions(), partition: cut}, self.positions()[partition] - cut
        super().__init__(self.partitions, [*others, *kept, *replacements])
        self.seek(positions)
        self._lost[partition] += lost
        self.epoch += 1

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        return dict.fromkeys(at, self.epoch)


def test_chunks_carry_leader_epochs_and_never_records_that_a_broker_lost() -> None:
    harness = SourceHarness(samples.records([1, 3, 5]))
    reader = LosingConsumer(PARTITIONS, samples.records([1, 3, 5]))
    source = RecordSource(reader, Decoder(samples.schema(), {}.get), harness.clock, max_wait_ms=500)
    chunk = source.poll(1, 0.0)
    assert chunk is not None and (chunk.after, chunk.leader_epochs) == ({ODD: 1}, {ODD: 3})
    assert source.poll(3, 0.0) is None, "3 and 5 wait for a third record"
    original_poll = reader.poll

    def poll(max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        reader.lose(ODD, 1, samples.records([1, 7, 9])[1:])
        return original_poll(max_records, timeout_s, partition)

    reader.poll = poll  # type: ignore[method-assign]
    assert source.poll(3, 0.0) is None, "7 has the offset that 3 had"
    harness.clock.advance(1)
    reader.poll = original_poll  # type: ignore[method-assign]
    chunk = source.poll(3, 0.0)
    assert ids(chunk) == [7, 9] and chunk is not None
    assert (chunk.after, chunk.leader_epochs) == ({ODD: 3}, {ODD: 4})


def test_a_reject_keeps_what_its_dead_letter_needs() -> None:
    bad = Record("samples", 0, 0, samples.T0, None, b"\x03\x01\xff")
    chunk = SourceHarness([bad]).source.poll(1, 0.0)
    assert chunk is not None and chunk.batch.num_requests == 0 and chunk.after == {EVEN: 1}
    (reject,) = chunk.rejects
    assert (reject.partition, reject.offset) == (EVEN, 0)
    assert (reject.reason, reject.raw) == ("undecodable", b"\x03\x01\xff")


def test_chunks_end_at_bounds() -> None:
    harness = SourceHarness(samples.records([1, 2, 3, 4, 5, 6]))
    harness.source.bound({EVEN: 2, ODD: 1})
    assert ids(harness.source.poll(2, 0.0)) == [1, 2]
    assert ids(harness.source.poll(2, 0.0)) == [4] and not harness.source.ended, (
        "the last chunk before a bound is returned at once"
    )
    assert harness.source.poll(2, 0.0) is None and harness.source.ended
    harness.source.bound({EVEN: 3, ODD: 3})
    assert not harness.source.ended
    assert [ids(harness.source.poll(2, 0.0)) for _ in range(2)] == [[3, 5], [6]]
    harness.source.bound({})
    assert not harness.source.ended and harness.source.poll(2, 0.0) is None


def test_missing_records_before_a_bound_are_waited_for() -> None:
    harness = SourceHarness(samples.records([1, 2]))
    harness.source.bound({EVEN: 2, ODD: 1})
    assert harness.source.poll(4, 0.0) is None and not harness.source.ended
    harness.reader.append(samples.records([1, 2, 4])[2:])
    assert ids(harness.source.poll(4, 0.0)) == [1, 2, 4]


def test_a_partition_at_its_bound_gives_an_empty_chunk() -> None:
    harness = SourceHarness(samples.records([1, 2, 3, 4, 5]))
    harness.source.bound({EVEN: 0, ODD: 3})
    chunk = harness.source.poll(2, 0.0, EVEN)
    assert chunk is not None and chunk.batch.num_requests == 0 and chunk.after == {EVEN: 0}
    assert ids(harness.source.poll(2, 0.0, ODD)) == [1, 3]
    assert ids(harness.source.poll(2, 0.0, ODD)) == [5], "no later record can fill the chunk"
    assert harness.source.poll(2, 0.0, EVEN) is None and harness.source.ended, (
        "all partitions are at their bounds"
    )
    harness.source.seek({})
    assert ids(harness.source.poll(1, 0.0, ODD)) == [1]


BOTH = (*PARTITIONS, *((CORRECTIONS, number) for _, number in PARTITIONS))


class CorrectionHarness:
    """A source that can read corrections of samples 1, 3 and 2 before these samples."""

    def __init__(self) -> None:
        self.clock = FakeClock(samples.T0)
        early = [samples.correction(number, 0) for number in (1, 3, 2)]
        self.reader = MemoryConsumer(BOTH, [early[0], early[1]._replace(offset=1), early[2]])
        self.source = RecordSource(
            self.reader, Decoder(samples.schema(), {}.get), self.clock, max_wait_ms=500
        )

    def poll(self, max_requests: int = 4) -> list[tuple[bool, int]]:
        """Return (is a correction, close time in s) for each request of the next chunk."""
        for _ in range(2):
            if (chunk := self.source.poll(max_requests, 0.0)) is not None:
                seconds_R = (chunk.batch.close_ms_R - samples.T0) // 1000
                return list(zip(chunk.batch.correction_R.tolist(), seconds_R.tolist(), strict=True))
            self.clock.advance(0.5)
        return []


def test_corrections_wait_until_their_samples_were_read() -> None:
    """A correction trained before its sample would do harm: its gradient does not shrink as the logit grows.
    Each partition waits on its own."""
    harness = CorrectionHarness()
    closes = {n: (samples.records([n])[0].timestamp_ms - samples.T0) // 1000 for n in (1, 2, 3)}
    assert harness.poll() == []
    assert harness.source.positions() == dict.fromkeys(BOTH, 0), "waiting corrections must not be skipped"
    harness.reader.append(samples.records([1, 2]))
    assert harness.poll() == [(False, closes[1]), (False, closes[2]), (True, closes[1]), (True, closes[2])]
    assert harness.source.positions() == {
        ("samples", 0): 1,
        ("samples", 1): 1,
        (CORRECTIONS, 0): 1,
        (CORRECTIONS, 1): 1,
    }
    harness.reader.append(samples.records([1, 3])[1:])
    assert harness.poll() == [(False, closes[3]), (True, closes[3])]


def test_corrections_still_wait_after_a_record_with_a_wrong_time() -> None:
    harness = CorrectionHarness()
    first, third = samples.records([1, 3])
    assert harness.poll() == []
    wrong = first._replace(offset=1, timestamp_ms=samples.T0 + 366 * 86_400_000)
    harness.reader.append([first, wrong])
    assert [is_correction for is_correction, _ in harness.poll()] == [False, True]
    harness.reader.append([third._replace(offset=2)])
    assert [is_correction for is_correction, _ in harness.poll()] == [False, True]


def test_a_correction_does_not_wait_forever() -> None:
    """The sample may have been read before this process started."""
    harness = CorrectionHarness()
    assert harness.poll() == []
    harness.clock.advance(CorrectionsBeforeTheirSamples.MAX_WAIT_S)
    assert [is_correction for is_correction, _ in harness.poll(2)] == [True, True]
    assert [is_correction for is_correction, _ in harness.poll(2)] == [True]


def test_waiting_corrections_are_returned_at_a_bound_and_read_again_after_a_seek() -> None:
    harness = CorrectionHarness()
    harness.source.bound({(CORRECTIONS, 0): 1, (CORRECTIONS, 1): 2})
    assert len(harness.poll()) == 3 and harness.poll() == [] and harness.source.ended
    harness.source.bound({})
    harness.source.seek({})
    assert harness.poll() == []
    rest = harness.source.poll_remaining(4)
    assert rest is not None and rest.batch.num_requests == 3
