"""The controller's `ReaderMaster`: leases of splits in each incarnation, and the wanted number of readers."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.errors import FencedError, RoostreamError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.manifest import claim_incarnation
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import to_toml
from roostream.warehouse.readers.config import ReaderCountConfig
from roostream.warehouse.readers.leases import read_log
from tests.trainer import samples
from tests.trainer.memory_store import MemoryStore
from tests.trainer.sessions.reading_fleet import session_of
from tests.warehouse.memory_table import table_of
from trainer.control.reader_master import LEASES_FILE, SAVE_S, SILENT_S, LeaseRecorder, ReaderMaster

SESSION_INPUT, _ = session_of(table_of(samples.records(list(range(1, 20)))))


class MasterHarness:
    def __init__(self, min_readers: int = 1, max_readers: int = 1) -> None:
        self.incarnation, self.session, self.clock = 4, SESSION_INPUT, FakeClock()
        count = ReaderCountConfig(min_readers=min_readers, max_readers=max_readers)
        self.master = ReaderMaster(self._current_session, samples.schema(), self.clock, count, long_poll_s=0)

    def _current_session(self) -> tuple[int, TableInput | None]:
        return self.incarnation, self.session

    def lease(self, reader: str = "a", free: int = 2, **more: Any) -> dict[str, Any]:
        header = {"reader": reader, "at": f"{reader}:1", "incarnation": 4, "session": SESSION_INPUT.digest}
        return dict(self.master.handle("lease", {**header, "free": free, **more}, ())[0])

    def want(self, *wanted: tuple[int, int], **more: Any) -> dict[str, Any]:
        header = {
            "worker": 0,
            "incarnation": 4,
            "session": SESSION_INPUT.digest,
            "wanted": wanted,
            "voided": [],
        }
        header |= {"in_flight": len(wanted), "fullness": 0.5, "stalled_s": 1.0, **more}
        return dict(self.master.handle("want", header, ())[0])


def test_a_reader_gets_the_session_and_then_leases_of_wanted_splits() -> None:
    harness = MasterHarness()
    harness.want((3, 8), (4, 12))
    first = harness.lease(incarnation=0, session="")
    assert TableInput.of(first["input"]) == SESSION_INPUT and first["schema"] == to_toml(samples.schema())
    assert (first["incarnation"], first["session"], first["leases"]) == (4, SESSION_INPUT.digest, [])
    second = harness.lease()
    assert second["leases"] == [(3, 8, 1, "a"), (4, 12, 2, "a")] and "input" not in second
    assert harness.want((3, 8)) == {"holders": [(3, 8, 1, "a")], "readers": {"a": "a:1"}}


@pytest.mark.timeout(20)
def test_a_reader_with_unlimited_capacity_gets_all_wanted_splits() -> None:
    harness = MasterHarness()
    harness.want((3, 8), (4, 12))
    assert len(harness.lease(free=10**12)["leases"]) == 2


def test_a_new_incarnation_voids_all_leases_and_rejects_old_workers() -> None:
    harness = MasterHarness()
    harness.want((3, 8))
    harness.lease()
    harness.incarnation = 5
    with pytest.raises(FencedError, match="expected a worker of incarnation 5"):
        harness.want((3, 8))
    assert harness.lease()["leases"] == [] and harness.lease()["incarnation"] == 5
    assert harness.want((3, 9), incarnation=5)["holders"] == []


def test_after_the_session_no_reader_is_wanted() -> None:
    harness = MasterHarness()
    harness.want((3, 8))
    harness.lease()
    assert harness.master.status()["wanted"] == 1
    harness.session = None  # type: ignore[assignment]
    assert harness.lease() == {"incarnation": 4, "session": "", "leases": []}
    assert harness.master.status()["wanted"] == 1, "the wanted number falls by one in ten seconds"
    harness.clock.advance(11)
    assert harness.master.status()["wanted"] == 0


def test_a_leaving_or_silent_reader_is_removed() -> None:
    harness = MasterHarness()
    harness.want((3, 8))
    harness.lease("a")
    harness.lease("b")
    harness.lease("a", leaving=True)
    assert harness.master.status()["there"] == 1 and harness.lease("b")["leases"] == [(3, 8, 2, "b")]
    harness.clock.advance(SILENT_S + 1)
    assert harness.master.status()["there"] == 0


def test_a_reader_that_a_worker_cannot_reach_loses_the_split() -> None:
    harness = MasterHarness()
    harness.want((3, 8))
    harness.lease("a")
    assert harness.want((3, 8), voided=[(3, 1)])["holders"] == []
    assert harness.lease("b")["leases"] == [(3, 8, 2, "b")]


@pytest.mark.parametrize(("in_flight", "wanted"), [(1, 1), (3, 2), (40, 5)])
def test_the_wanted_number_of_readers_follows_units_in_flight_within_limits(
    in_flight: int, wanted: int
) -> None:
    harness = MasterHarness(min_readers=1, max_readers=5)
    harness.want(*((n, 0) for n in range(in_flight)))
    assert harness.master.status()["wanted"] == wanted
    buffer = {"fullness": 0.5, "in_flight": in_flight, "stalled_s": 1.0, "stall_share": None, "pieces": None}
    assert harness.master.status()["buffers"] == {"0": buffer}


def test_status_lists_the_current_leases() -> None:
    harness = MasterHarness()
    harness.want((3, 8), (4, 12))
    harness.lease("a", free=1)
    harness.lease("b", free=1)
    harness.clock.advance(1.5)
    harness.lease("a", free=0)
    harness.lease("b", free=0)
    assert harness.master.status()["leases"] == [
        {"split": 3, "worker": 0, "position": 8, "reader": "a", "for_s": 1.5},
        {"split": 4, "worker": 0, "position": 12, "reader": "b", "for_s": 1.5},
    ]
    assert harness.master.status()["readers"]["a"]["silent_s"] == 0.0


class CountingStore(MemoryStore):
    """A store that counts writes, and that can be unavailable."""

    num_puts, is_away = 0, False

    def put(self, key: str, data: bytes) -> None:
        if self.is_away:
            raise UnavailableError("the store is away")
        super().put(key, data)
        self.num_puts += 1


def test_the_lease_log_is_saved() -> None:
    harness, store = MasterHarness(), CountingStore()
    recorder = LeaseRecorder(harness.master, store, harness.clock)
    recorder.save_if_due()
    assert store.num_puts == 0, "nothing was leased yet"
    harness.want((3, 8), (4, 12))
    harness.lease("a", free=2)
    harness.want((4, 12))
    recorder.save_if_due()
    harness.want((4, 12), voided=[(4, 2)])
    recorder.save_if_due()
    assert store.num_puts == 1, "a save is not due yet"
    harness.lease("b", free=1)
    harness.incarnation = 5
    recorder.save_if_due(last=True)
    found = read_log(store.get(LEASES_FILE))
    assert found["readers"] == {"a": {"granted": 2, "done": 1, "voided": 1}, "b": {"granted": 1, "over": 1}}
    events = [f"{event.what} {event.split} {event.reader}" for event in found["events"]]
    assert events == ["granted 3 a", "granted 4 a", "done 3 a", "voided 4 a", "granted 4 b", "over 4 b"]
    assert found["session"]["digest"] == SESSION_INPUT.digest and (
        found["incarnation"],
        found["trained"],
    ) == (5, True)
    harness.session = None  # type: ignore[assignment]
    assert (
        harness.master.lease_log()["session"]["digest"] == SESSION_INPUT.digest
        and not harness.master.lease_log()["trained"]
    ), "the log must name the last session"


def test_a_replaced_controller_does_not_save_its_lease_log() -> None:
    harness, store = MasterHarness(), CountingStore()
    recorder = LeaseRecorder(harness.master, store, harness.clock)
    harness.want((3, 8))
    harness.lease()
    while claim_incarnation(store, 0) <= harness.incarnation:
        pass
    store.put(LEASES_FILE, b"of the newer controller")
    recorder.save_if_due()
    recorder.save_if_due(last=True)
    assert store.get(LEASES_FILE) == b"of the newer controller"


def test_saving_the_lease_log_is_retried_when_the_store_is_unavailable() -> None:
    harness, store = MasterHarness(), CountingStore()
    store.is_away = True
    recorder = LeaseRecorder(harness.master, store, harness.clock)
    harness.want((3, 8))
    harness.lease()
    recorder.save_if_due()
    store.is_away = False
    recorder.save_if_due()
    assert store.num_puts == 0, "a save is not due yet"
    harness.clock.advance(SAVE_S)
    recorder.save_if_due()
    assert store.num_puts == 1


def test_other_calls_go_to_the_controller_or_are_refused() -> None:
    harness = MasterHarness()
    with pytest.raises(RoostreamError, match="expected a call of lease or want, got 'beat'"):
        harness.master.handle("beat", {}, ())
    handle = harness.master.extend(lambda method, header, arrays: ({"method": method}, ()))
    assert handle("beat", {}, [])[0] == {"method": "beat"}
    header = {"reader": "a", "at": "a:1", "incarnation": 0, "session": "", "free": 0}
    assert handle("lease", header, [])[0]["incarnation"] == 4
