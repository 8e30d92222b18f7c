"""What the Java operators decide before Python sees a record, compared with Python's reading of the same
bytes."""

from __future__ import annotations

import functools
import random
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra.jars import COMPILER_JARS, CONNECTOR_JARS, find_java
from infra.prepare import JAVA_SOURCES, compile_java
from joiner.local_engine import PartitionTime
from joiner.outputs import Output
from joiner.state import Engagement, Impression
from roostream.runtime.event_time import START
from roostream.runtime.flink_rest import pyflink_home
from roostream.wire import roo_pb2 as pb
from roostream.wire.event_checks import MAX_PRODUCER_BYTES, MAX_TIME_MS
from roostream.wire.records import Record
from tests.joiner.cases import engagement, impression, make_decoder, record

MAX_MS, SILENT_MS = 1_000, 5_000
NOTHING, EVENT, HEARTBEAT, END_MARKER = range(4)
T = 1_000

pytestmark = pytest.mark.skipif(
    not any(COMPILER_JARS.glob("*.jar")), reason="the Java compiler is missing; run `make setup`"
)

JavaReading = tuple[bool, int, int, int]
"""(kept for Python, kind, time, event time that the partition has reached)."""


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiled operators and test programs, with their libraries."""
    classes = tmp_path_factory.mktemp("classes")
    libraries = [*(pyflink_home() / "lib").glob("*.jar"), *CONNECTOR_JARS.glob("*.jar")]
    test_sources = Path(__file__).parent / "java"
    compile_java([*JAVA_SOURCES.rglob("*.java"), *test_sources.rglob("*.java")], libraries, classes)
    return ":".join(map(str, [classes, *libraries]))


def readings(class_path: str, records: Sequence[Record], *options: str) -> list[JavaReading]:
    """Java's reading of these records of one partition."""
    limits = (str(MAX_MS), str(SILENT_MS))
    command = (str(find_java()), "-Xmx256m", "-cp", class_path, "roostream.Differential", *limits, *options)
    input_bytes = b"".join(struct.pack(">qi", r.timestamp_ms, len(r.value)) + r.value for r in records)
    completed = subprocess.run(command, input=input_bytes, capture_output=True, check=False)
    assert completed.returncode == 0, completed.stderr.decode()
    return [
        (bool(keep), kind, ms, reached)
        for keep, kind, ms, reached in struct.iter_unpack(">bbqq", completed.stdout)
    ]


@pytest.fixture(scope="module")
def java(class_path: str) -> Callable[[Sequence[Record]], list[JavaReading]]:
    return functools.partial(readings, class_path)


def record_with_value(value: bytes, time_ms: int = T) -> Record:
    return Record("impressions", 0, 0, time_ms, None, value)


def python_reading(r: Record) -> tuple[int, int]:
    """(kind, time) as the local engine reads the record. An event counts only under its own key."""
    found = make_decoder().decode(r)
    if isinstance(found, (Impression, Engagement)):
        return EVENT, found.time_ms
    if isinstance(found, Output) or found.time_ms != r.timestamp_ms or not 1 <= found.time_ms <= MAX_TIME_MS:
        return NOTHING, START
    return HEARTBEAT if isinstance(found, pb.Heartbeat) else END_MARKER, found.time_ms


Run = Callable[[Sequence[Record]], list[JavaReading]]
BODIES = (
    b"",
    b"\xff\xff",
    pb.Heartbeat(time_ms=T, producer="p").SerializeToString(),
    pb.EndMarker(time_ms=T).SerializeToString(),
)


def test_java_drops_nothing_that_python_would_turn_into_a_dead_letter(java: Run) -> None:
    """Covers all first bytes with versions 0 to 3."""
    records = [record_with_value(struct.pack("<H", n) + body) for body in BODIES for n in range(1 << 10)]
    records += [record_with_value(b""), record_with_value(b"\x06"), record_with_value(b"\x07")]
    dropped = [r for r, reading in zip(records, java(records), strict=True) if not reading[0]]
    assert {r.value for r in dropped} == {
        b"\x06\x01" + BODIES[2],
        b"\x06\x01" + BODIES[3],
        b"\x07\x01" + BODIES[3],
    }
    assert not [r for r in dropped if isinstance(make_decoder().decode(r), Output)]


def damaged(rng: random.Random, r: Record) -> Record:
    value = bytearray(r.value)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(value))
        edit = rng.choice(["flip", "cut", "insert"])
        if edit == "flip":
            value[at] ^= 1 << rng.randrange(8)
        elif edit == "cut" and len(value) > 1:
            del value[at:]
        else:
            value[at:at] = rng.randbytes(rng.randrange(4))
        value = value or bytearray(b"\x06")
    return r._replace(value=bytes(value))


def test_java_and_python_read_the_same_time_from_the_same_bytes(java: Run) -> None:
    """Java reads everything that Python accepts, and drops only what Python would ignore."""
    rng = random.Random(7)
    good = [
        record(impression(T)),
        record(engagement(T, event=1)),
        record(pb.Heartbeat(time_ms=T, producer="serving-1")),
        record(pb.Heartbeat(time_ms=T)),
        record(pb.EndMarker(time_ms=T)),
        record(pb.Heartbeat(time_ms=0)),
    ]
    records = [damaged(rng, rng.choice(good)) for _ in range(4_000)]
    wrong = [r._replace(timestamp_ms=T + 1) for r in good]
    kinds = set()
    for r, (keep, kind, ms, _) in zip(records + wrong, java(records + wrong), strict=True):
        expected = python_reading(r)
        kinds.add(kind)
        if expected[0] == NOTHING and kind == EVENT:
            assert ms == r.timestamp_ms, "only shapes, numbers and text, which Python alone checks"
        elif expected[0] == NOTHING and kind != NOTHING:
            assert keep and isinstance(make_decoder().decode(r), Output), "only text that is not UTF-8"
        else:
            assert (kind, ms) == expected, r
        assert keep or (kind in (HEARTBEAT, END_MARKER) and expected[0] == kind)
    assert kinds == {NOTHING, EVENT, HEARTBEAT, END_MARKER}


def test_a_partition_s_time_is_the_same_in_both_engines_also_after_restores(java: Run) -> None:
    rng, records, expected, split, now_ms = random.Random(3), [], [], PartitionTime(), 100_000
    for _ in range(3_000):
        now_ms += rng.choice([0, 1, 100, 900])
        time_ms = rng.choice([now_ms, now_ms, now_ms - rng.randrange(3_000), now_ms + rng.randrange(9_000)])
        if rng.random() < 0.3:
            name = rng.choice(["", "a", "a", "b", "c"])
            records.append(record(pb.Heartbeat(time_ms=time_ms, producer=name)))
            split.heartbeat(time_ms, name, SILENT_MS)
        elif rng.random() < 0.01:
            records.append(record(pb.EndMarker(time_ms=time_ms)))
            split.end_marker(time_ms)
        else:
            records.append(record(engagement(time_ms, event=1)))
            split.event(time_ms, MAX_MS)
        expected.append(split.reached_ms(SILENT_MS))
    assert [reading[3] for reading in java(records)] == expected


@pytest.mark.parametrize(
    ("times_ms", "reached_ms"),
    [
        # the first event comes from a client with a wrong clock
        ([T + 9_000_000, T, T + 1], [START, T, T + 1]),
        ([T, T + 9_000_000, T + 2], [START, T, T + 2]),
        ([T, T + 1], [START, T]),
    ],
)
def test_the_first_event_of_a_partition_without_a_stored_time_is_confirmed_after_a_restore(
    class_path: str, times_ms: list[int], reached_ms: list[int]
) -> None:
    """After a change of the parallelism, a task gets partitions whose time another task has stored."""
    records = [record(engagement(ms, event=1)) for ms in times_ms]
    assert [reading[3] for reading in readings(class_path, records, "restored")] == reached_ms
    assert readings(class_path, records)[0][3] == times_ms[0], (
        "a new job must accept the first event without confirmation"
    )


@pytest.mark.parametrize("num_bytes", [MAX_PRODUCER_BYTES, MAX_PRODUCER_BYTES + 1, 70_000])
def test_a_producer_with_an_endless_name_does_not_stop_checkpoints(java: Run, num_bytes: int) -> None:
    """The stored time of a partition contains the names. Differential stores it every 100 records."""
    beat = record(pb.Heartbeat(time_ms=2 * T, producer="p" * num_bytes))
    found = java([record(engagement(T, event=1)), *[beat] * 100])
    is_valid = num_bytes <= MAX_PRODUCER_BYTES
    assert found[-1] == ((False, HEARTBEAT, 2 * T, 2 * T) if is_valid else (True, NOTHING, START, T))
    assert python_reading(beat) == found[-1][1:3]


END = (1 << 63) - 1


def run_slices(class_path: str, *steps: str) -> tuple[list[int], int]:
    """The watermarks that Java emits, and the one that it stores."""
    command = (str(find_java()), "-Xmx64m", "-cp", class_path, "roostream.Slices")
    completed = subprocess.run(command, input=" ".join(steps), capture_output=True, text=True, check=True)
    *emitted, stored = completed.stdout.split("\n")[:-1]
    return [int(line) for line in emitted if line != "-"], int(stored.removeprefix("stored "))


def test_a_large_step_of_the_watermark_is_divided(class_path: str) -> None:
    emitted, stored = run_slices(class_path, "advance 1000", "next", "advance 6401000", *["next"] * 99)
    assert emitted == [1_000, *range(101_000, 6_401_001, 100_000)] and stored == 6_401_000
    emitted, _ = run_slices(class_path, "restore 5000", "advance 7500", *["next"] * 9)
    assert emitted == [6_000, 7_000, 7_500]


def test_the_stored_watermark_never_exceeds_what_the_join_has_seen(class_path: str) -> None:
    assert run_slices(class_path, "restore 1000", "advance 9000", "next") == ([2_000], 2_000)


def test_the_end_of_input_is_never_stored_as_a_watermark(class_path: str) -> None:
    assert run_slices(class_path, "advance 1000", "next", f"advance {END}", "next") == ([1_000], 1_000)
    assert run_slices(class_path, "restore 1000", f"restore {END}", "advance 1500", "next") == (
        [1_500],
        1_500,
    )
