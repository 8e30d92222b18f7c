"""Rows in shared memory: whole in every reader, whatever happens to the owner, the files and the other readers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path

import numpy as np
import pytest

from param_server.initial import initial_rows
from param_server.replica.shared_rows import SharedOwner
from roostream.errors import SetupError, UnavailableError
from roostream.runtime.clock import FakeClock
from tests.param_server.replica.shared_support import (
    folder_at,
    keys_of,
    owner_at,
    put,
    read,
    reader_at,
    rows_of,
    whole,
)
from tests.param_server.shard_support import ADAGRAD, ITEM, lookup_of, small_schema, table_id


def published(path: Path, clock: FakeClock | None = None) -> SharedOwner:
    owner = owner_at(path, clock)
    owner.publish()
    return owner


def initial(*ids: int) -> np.ndarray:
    return initial_rows(0, keys_of(*ids).table_U, keys_of(*ids).id_U, 4, 0.05)


def test_what_the_owner_puts_and_removes_is_what_readers_get(tmp_path: Path) -> None:
    owner = published(tmp_path)
    reader = reader_at(tmp_path)
    ids = list(range(5000))  # the file grows on the way
    put(owner, ids, 1)
    assert read(reader, *ids).tobytes() == rows_of(np.array(ids), 1).tobytes()
    put(owner, [7, 9], 2)
    owner.stores[ADAGRAD].remove(keys_of(8, 123_456))
    got = read(reader, 7, 8, 9, 10)
    assert got[0].tolist() == [7, 2, 9, 5] and got[2, 1] == 2 and got[3, 1] == 1
    assert got[1].tobytes() == initial(8)[0].tobytes()
    assert owner.stores[ADAGRAD].num_rows == 4999
    owner.show(None)
    assert reader.num_rows == 4999 and reader.num_again == 0


def test_readers_get_what_the_owner_itself_and_a_private_store_give(tmp_path: Path) -> None:
    owner, reader = published(tmp_path), reader_at(tmp_path)
    generator = np.random.default_rng(0)
    held: dict[int, int] = {}
    for version in range(1, 120):
        some = generator.choice(400, 40, replace=False).tolist()
        put(owner, some[:25], version)
        owner.stores[ADAGRAD].remove(keys_of(*some[25:]))
        held |= dict.fromkeys(some[:25], version)
        held = {i: v for i, v in held.items() if i not in some[25:]}
    got = read(reader, *range(400))
    expected = initial(*range(400))
    for i, version in held.items():
        expected[i] = rows_of(np.array([i]), version)[0]
    assert got.tobytes() == expected.tobytes() == owner.stores[ADAGRAD].gather(keys_of(*range(400))).tobytes()
    assert owner.stores[ADAGRAD].num_rows == len(held)


def test_an_equal_row_takes_no_slot(tmp_path: Path) -> None:
    owner = published(tmp_path, FakeClock())
    put(owner, list(range(1000)), 1)
    generation = owner.stores[ADAGRAD].map.generation
    for _ in range(20):
        put(owner, list(range(1000)), 1)
    assert owner.stores[ADAGRAD].map.generation == generation
    zero = np.zeros((1, 4), np.float32)
    owner.stores[ADAGRAD].put(keys_of(1), zero)
    owner.stores[ADAGRAD].put(keys_of(1), -zero)
    assert np.signbit(read(reader_at(tmp_path), 1)).all(), "a row is equal to the bit or it isn't"


def test_a_replaced_bucket_keeps_what_stays_and_loses_what_goes(tmp_path: Path) -> None:
    owner, reader = published(tmp_path), reader_at(tmp_path)
    store = owner.stores[ADAGRAD]
    put(owner, list(range(300)), 1)
    bucket = int(store._bucket_N[np.flatnonzero(store._bucket_N >= 0)[0]])
    inside = [i for i in range(300) if bucket_of_item(i) == bucket]
    stay = inside[::2]
    store.replace(bucket, keys_of(*stay), rows_of(np.array(stay), 2))
    got = read(reader, *range(300))
    for i in range(300):
        expected = (
            rows_of(np.array([i]), 2 if i in stay else 1) if i in stay or i not in inside else initial(i)
        )
        assert got[i].tobytes() == expected[0].tobytes()
    assert len(stay) < len(inside) and store.num_rows == 300 - len(inside) + len(stay)


def bucket_of_item(i: int) -> int:
    from roostream.schema.ids import bucket_of

    return bucket_of(i, table_id(ITEM), 64)


def test_removed_keys_leave_an_index_that_does_not_fill_up(tmp_path: Path) -> None:
    owner, clock = owner_at(tmp_path, clock := FakeClock()), clock
    owner.publish()
    for start in range(0, 40_000, 500):
        put(owner, list(range(start, start + 500)), 1)
        owner.stores[ADAGRAD].remove(keys_of(*range(start, start + 500)))
        clock.advance(1.0)
    assert owner.stores[ADAGRAD].num_rows == 0
    assert len(owner.stores[ADAGRAD].map.index_C) <= 4096
    assert read(reader_at(tmp_path), 39_999).tobytes() == initial(39_999).tobytes()


def test_readers_go_on_with_the_rows_of_an_owner_that_died_and_take_those_of_the_next_when_they_are_complete(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    owner = published(tmp_path, clock)
    put(owner, [1, 2], 1)
    clock.advance(5)
    owner.show(clock.monotonic_s())
    reader = reader_at(tmp_path, clock)
    assert reader.ready and reader.age_s() == 0
    owner.close()  # as its end does
    clock.advance(60)
    assert read(reader, 1)[0, 1] == 1 and reader.age_s() == pytest.approx(60, abs=0.01)
    again = owner_at(tmp_path, clock)
    put(again, [1], 2)
    reader.look()
    assert read(reader, 1)[0, 1] == 1 and reader.ready, "the new rows aren't complete"
    again.publish()
    assert read(reader, 1)[0, 1] == 2 and read(reader, 2).tobytes() == initial(2).tobytes()
    assert reader.age_s() == pytest.approx(60, abs=0.01), "nobody knows yet how current they are"
    again.show(clock.monotonic_s())
    assert reader.age_s() == 0
    assert len(list(tmp_path.glob("*-*"))) == len(small_schema().stacks), "what nobody names is gone"


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    owner = owner_at(tmp_path)
    with pytest.raises(SetupError, match="is written by another program"):
        owner_at(tmp_path)
    owner.close()
    owner_at(tmp_path).close()


def test_rows_of_another_schema_or_seed_are_not_taken_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from param_server.replica.shared_reader import SharedReader
    from roostream.runtime.clock import SystemClock

    published(tmp_path)
    other = SharedReader(folder_at(tmp_path, seed=5), small_schema(), 5, SystemClock())
    other.look()
    other.look()
    assert not other.ready and caplog.text.count("give serving and serving-rows the same") == 1
    assert other.gather(lookup_of({ITEM: [1]}))[ADAGRAD].shape == (1, 4)


def test_an_owner_of_another_seed_begins_anew_and_readers_keep_what_they_have(tmp_path: Path) -> None:
    owner = published(tmp_path)
    put(owner, [1], 1)
    reader = reader_at(tmp_path)
    assert read(reader, 1)[0, 1] == 1
    owner.close()
    other = SharedOwner(folder_at(tmp_path, seed=5), small_schema(), 5, 64, FakeClock()).open()
    other.publish()
    reader.look()
    assert read(reader, 1)[0, 1] == 1 and reader.ready
    assert not reader_at(tmp_path).ready


@pytest.mark.parametrize("spoiled", [b"", b"x" * 4096, bytes(4096)], ids=["empty", "other", "zeros"])
def test_a_damaged_head_is_no_rows_until_the_owner_makes_another(tmp_path: Path, spoiled: bytes) -> None:
    tmp_path.joinpath("head").write_bytes(spoiled)
    reader = reader_at(tmp_path)
    assert not reader.ready and reader.age_s() is None and reader.num_rows == 0
    assert read(reader, 3).tobytes() == initial(3).tobytes()
    put(published(tmp_path), [3], 1)
    reader.look()
    assert reader.ready and read(reader, 3)[0, 1] == 1


def test_a_stack_s_file_that_is_gone_or_cut_leaves_the_rows_that_are_mapped(tmp_path: Path) -> None:
    owner = published(tmp_path)
    put(owner, [3], 1)
    reader = reader_at(tmp_path)
    assert read(reader, 3)[0, 1] == 1
    store = owner.stores[ADAGRAD]
    owner.name(store.number, 999)
    assert read(reader, 3)[0, 1] == 1
    tmp_path.joinpath(f"{store.number}-999").write_bytes(bytes(4096))
    assert read(reader, 3)[0, 1] == 1


def test_a_full_disk_is_an_error_and_leaves_the_rows_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = published(tmp_path)
    put(owner, [3], 1)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnavailableError, match="no room for"):
        put(owner, list(range(100_000)), 2)
    assert whole(read(reader_at(tmp_path), 3), np.array([3])).all()
    monkeypatch.undo()
    put(owner, list(range(100_000)), 2)
    assert read(reader_at(tmp_path), 3)[0, 1] == 2 and owner.stores[ADAGRAD].num_rows == 100_000


# Processes

IDS = np.arange(1, 600)


STOP, VERSIONS, GATHERS = 0, 1, 2  # places in what processes count together; each reader has its own GATHERS


def _hammer(path: str, counts: SynchronizedArray[int]) -> None:
    """Every row over and over, in slots that rest for no time at all; growth and removal in between."""
    owner = owner_at(Path(path))
    put(owner, IDS.tolist(), 1)
    owner.publish()
    generator, version = np.random.default_rng(1), 2
    while not counts[STOP]:
        owner.stores[ADAGRAD]._slots.grace_s = 0.0
        chosen = generator.choice(IDS, 64, replace=False)
        put(owner, chosen.tolist(), version)
        if version % 50 == 0:
            more = list(range(10_000 + version, 10_000 + version + 64))
            put(owner, more, 1)
            owner.stores[ADAGRAD].remove(keys_of(*more))
        counts[VERSIONS] = version
        version += 1


def _watch(
    path: str, number: int, counts: SynchronizedArray[int], told: multiprocessing.Queue[tuple[int, int]]
) -> None:
    """(torn or another's rows, rows that went back)."""
    reader = reader_at(Path(path))
    while not reader.ready:
        time.sleep(0.01)
        reader.look()
    newest, torn, back = np.zeros(len(IDS)), 0, 0
    while not counts[STOP]:
        rows = read(reader, *IDS.tolist())
        torn += int((~whole(rows, IDS)).sum())
        back += int((rows[:, 1] < newest).sum())
        newest = np.maximum(newest, rows[:, 1])
        counts[GATHERS + number] += 1
    told.put((torn, back))


def test_no_reader_ever_sees_a_torn_row_or_another_key_s_or_an_older_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    counts, told = context.Array("q", GATHERS + 3), context.Queue()
    writer = context.Process(target=_hammer, args=(str(tmp_path), counts))
    readers = [
        context.Process(target=_watch, args=(str(tmp_path), number, counts, told)) for number in range(3)
    ]
    for process in (writer, *readers):
        process.start()
    wait_for(lambda: min(counts[GATHERS:]) > 20, writer)
    os.kill(readers[2].pid, signal.SIGKILL)  # type: ignore[arg-type]  # a reader that dies hinders nobody
    versions, gathers = counts[VERSIONS], counts[GATHERS]
    wait_for(
        lambda: counts[VERSIONS] > versions + 2000 and min(counts[GATHERS : GATHERS + 2]) > gathers + 200,
        writer,
    )
    counts[STOP] = 1
    results = [told.get(timeout=30) for _ in range(2)]
    for process in (writer, *readers):
        process.join(30)
    assert results == [(0, 0), (0, 0)]


def wait_for(what: Callable[[], bool], writer: BaseProcess) -> None:
    deadline_s = time.monotonic() + 80
    while not what():
        assert writer.is_alive() and time.monotonic() < deadline_s
        time.sleep(0.05)


def _write_until_killed(path: str) -> None:
    owner = owner_at(Path(path))
    put(owner, IDS.tolist(), 1)
    owner.publish()
    version = 2
    while True:
        owner.stores[ADAGRAD]._slots.grace_s = 0.0
        put(owner, IDS.tolist(), version)
        version += 1


def test_an_owner_that_is_killed_in_the_middle_of_anything_leaves_whole_rows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        writer = context.Process(target=_write_until_killed, args=(str(tmp_path),))
        writer.start()
        while not (reader := reader_at(tmp_path)).ready and writer.is_alive():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(writer.pid, signal.SIGKILL)  # type: ignore[arg-type]
        writer.join(30)
        assert whole(read(reader, *IDS.tolist()), IDS).all()
