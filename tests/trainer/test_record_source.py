"""Chunks are full, or late, or what is left; and say where they end."""

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


class Case:
    def __init__(self, records: list[Record]) -> None:
        self.clock, self.reader = FakeClock(samples.T0), MemoryConsumer(PARTITIONS, records)
        self.source = RecordSource(
            self.reader, Decoder(samples.schema(), {}.get), self.clock, max_wait_ms=500
        )


def ids(chunk: Chunk | None) -> list[int]:
    assert chunk is not None
    return chunk.batch.sample_id_R.tolist()


def test_a_full_chunk_is_returned_at_once_oldest_first() -> None:
    source = Case(samples.records([1, 2, 3, 4, 5])).source
    chunk = source.poll(3, 0.0)
    assert ids(chunk) == [1, 2, 3] and chunk is not None
    assert chunk.after == {EVEN: 1, ODD: 2} and chunk.read_ms == samples.T0
    assert source.positions() == {EVEN: 1, ODD: 2}


def test_a_partial_chunk_is_returned_after_the_maximum_wait() -> None:
    case = Case(samples.records([1, 2]))
    assert case.source.poll(3, 0.0) is None and case.source.positions() == {EVEN: 0, ODD: 0}, (
        "read, not given"
    )
    case.clock.advance(0.4)
    assert case.source.poll(3, 0.0) is None
    case.clock.advance(0.1)
    assert ids(case.source.poll(3, 0.0)) == [1, 2]
    assert case.source.poll(3, 0.0) is None


def test_a_requested_partition_gives_only_full_chunks() -> None:
    case = Case(samples.records([1, 2, 3, 4]))
    assert ids(case.source.poll(2, 0.0, ODD)) == [1, 3]
    assert case.source.poll(3, 0.0, EVEN) is None
    case.clock.advance(60)
    assert case.source.poll(3, 0.0, EVEN) is None
    case.reader.append(samples.records([1, 2, 3, 4, 6])[4:])
    assert ids(case.source.poll(3, 0.0, EVEN)) == [2, 4, 6]


def test_a_seek_drops_what_was_read() -> None:
    source = Case(samples.records([1, 2, 3])).source
    assert source.poll(4, 0.0) is None
    source.seek({EVEN: 0, ODD: 1})
    assert source.poll_remaining(4) is None and source.positions() == {EVEN: 0, ODD: 1}
    assert ids(source.poll(2, 0.0)) == [2, 3]


class LosingConsumer(MemoryConsumer):
    """Its broker loses the records from `cut` on, and gives their offsets to `instead`."""

    epoch = 3

    def lose(self, partition: Partition, cut: int, instead: list[Record]) -> None:
        others = [r for p in self.partitions if p != partition for r in self._logs[p]]
        kept = self._logs[partition][:cut]
        positions, lost = {**self.positions(), partition: cut}, self.positions()[partition] - cut
        super().__init__(self.partitions, [*others, *kept, *instead])
        self.seek(positions)
        self._lost[partition] += lost
        self.epoch += 1

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        return dict.fromkeys(at, self.epoch)


def test_chunks_carry_leader_epochs_and_never_records_that_a_broker_lost() -> None:
    case = Case(samples.records([1, 3, 5]))
    reader = LosingConsumer(PARTITIONS, samples.records([1, 3, 5]))
    source = RecordSource(reader, Decoder(samples.schema(), {}.get), case.clock, max_wait_ms=500)
    chunk = source.poll(1, 0.0)
    assert chunk is not None and (chunk.after, chunk.leader_epochs) == ({ODD: 1}, {ODD: 3})
    assert source.poll(3, 0.0) is None, "3 and 5 wait for one more"
    polled = reader.poll

    def poll(max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        reader.lose(ODD, 1, samples.records([1, 7, 9])[1:])
        return polled(max_records, timeout_s, partition)

    reader.poll = poll  # type: ignore[method-assign]
    assert source.poll(3, 0.0) is None, "7 has the offset of 3"
    case.clock.advance(1)
    reader.poll = polled  # type: ignore[method-assign]
    chunk = source.poll(3, 0.0)
    assert ids(chunk) == [7, 9] and chunk is not None
    assert (chunk.after, chunk.leader_epochs) == ({ODD: 3}, {ODD: 4})


def test_a_reject_keeps_what_its_dead_letter_needs() -> None:
    bad = Record("samples", 0, 0, samples.T0, None, b"\x03\x01\xff")
    chunk = Case([bad]).source.poll(1, 0.0)
    assert chunk is not None and chunk.batch.num_requests == 0 and chunk.after == {EVEN: 1}
    (reject,) = chunk.rejects
    assert (reject.partition, reject.offset) == (EVEN, 0)
    assert (reject.reason, reject.raw) == ("undecodable", b"\x03\x01\xff")


def test_chunks_end_at_bounds() -> None:
    case = Case(samples.records([1, 2, 3, 4, 5, 6]))
    case.source.bound({EVEN: 2, ODD: 1})
    assert ids(case.source.poll(2, 0.0)) == [1, 2]
    assert ids(case.source.poll(2, 0.0)) == [4] and not case.source.ended, "at once, not late"
    assert case.source.poll(2, 0.0) is None and case.source.ended
    case.source.bound({EVEN: 3, ODD: 3})
    assert not case.source.ended
    assert [ids(case.source.poll(2, 0.0)) for _ in range(2)] == [[3, 5], [6]]
    case.source.bound({})
    assert not case.source.ended and case.source.poll(2, 0.0) is None


def test_missing_records_before_a_bound_are_waited_for() -> None:
    case = Case(samples.records([1, 2]))
    case.source.bound({EVEN: 2, ODD: 1})
    assert case.source.poll(4, 0.0) is None and not case.source.ended
    case.reader.append(samples.records([1, 2, 4])[2:])
    assert ids(case.source.poll(4, 0.0)) == [1, 2, 4]


def test_a_partition_at_its_bound_gives_an_empty_chunk() -> None:
    case = Case(samples.records([1, 2, 3, 4, 5]))
    case.source.bound({EVEN: 0, ODD: 3})
    chunk = case.source.poll(2, 0.0, EVEN)
    assert chunk is not None and chunk.batch.num_requests == 0 and chunk.after == {EVEN: 0}
    assert ids(case.source.poll(2, 0.0, ODD)) == [1, 3]
    assert ids(case.source.poll(2, 0.0, ODD)) == [5], "cut short: nothing that comes later makes it longer"
    assert case.source.poll(2, 0.0, EVEN) is None and case.source.ended, "nobody has anything: no turn passes"
    case.source.seek({})
    assert ids(case.source.poll(1, 0.0, ODD)) == [1]


BOTH = (*PARTITIONS, *((CORRECTIONS, number) for _, number in PARTITIONS))


class CorrectionCase:
    """Corrections of samples 1, 3 and 2 can be read; the samples come later."""

    def __init__(self) -> None:
        self.clock = FakeClock(samples.T0)
        early = [samples.corrected(number, 0) for number in (1, 3, 2)]
        self.reader = MemoryConsumer(BOTH, [early[0], early[1]._replace(offset=1), early[2]])
        self.source = RecordSource(
            self.reader, Decoder(samples.schema(), {}.get), self.clock, max_wait_ms=500
        )

    def poll(self, max_requests: int = 4) -> list[tuple[bool, int]]:
        """(whether it is a correction, close in s) of each request of the chunk that is due."""
        for _ in range(2):
            if (chunk := self.source.poll(max_requests, 0.0)) is not None:
                seconds_R = (chunk.batch.close_ms_R - samples.T0) // 1000
                return list(zip(chunk.batch.correction_R.tolist(), seconds_R.tolist(), strict=True))
            self.clock.advance(0.5)
        return []


def test_corrections_wait_until_their_samples_were_read() -> None:
    """Of each partition; the gradient of a correction does not shrink as the logit grows."""
    case = CorrectionCase()
    closes = {n: (samples.records([n])[0].timestamp_ms - samples.T0) // 1000 for n in (1, 2, 3)}
    assert case.poll() == []
    assert case.source.positions() == dict.fromkeys(BOTH, 0), "nothing is passed over"
    case.reader.append(samples.records([1, 2]))
    assert case.poll() == [(False, closes[1]), (False, closes[2]), (True, closes[1]), (True, closes[2])]
    assert case.source.positions() == {
        ("samples", 0): 1,
        ("samples", 1): 1,
        (CORRECTIONS, 0): 1,
        (CORRECTIONS, 1): 1,
    }
    case.reader.append(samples.records([1, 3])[1:])
    assert case.poll() == [(False, closes[3]), (True, closes[3])]


def test_a_correction_does_not_wait_for_ever() -> None:
    """Its sample may have been read before this process started."""
    case = CorrectionCase()
    assert case.poll() == []
    case.clock.advance(CorrectionsBeforeTheirSamples.MAX_WAIT_S)
    assert [is_correction for is_correction, _ in case.poll(2)] == [True, True]
    assert [is_correction for is_correction, _ in case.poll(2)] == [True]


def test_waiting_corrections_are_what_is_left_at_a_bound_and_are_read_again_after_a_seek() -> None:
    case = CorrectionCase()
    case.source.bound({(CORRECTIONS, 0): 1, (CORRECTIONS, 1): 2})
    assert len(case.poll()) == 3 and case.poll() == [] and case.source.ended
    case.source.bound({})
    case.source.seek({})
    assert case.poll() == []
    rest = case.source.poll_remaining(4)
    assert rest is not None and rest.batch.num_requests == 3
