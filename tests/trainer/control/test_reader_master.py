"""The controller's part of reading: leases by incarnation, and how many readers it wishes for."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.errors import FencedError, RoostreamError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import to_toml
from roostream.warehouse.readers.config import ReaderCountConfig
from roostream.warehouse.readers.leases import read_log
from tests.trainer import samples
from tests.trainer.memory_store import MemoryStore
from tests.trainer.sessions.reading_fleet import session_of
from tests.warehouse.memory_table import table_of
from trainer.control.reader_master import LEASES_FILE, SAVE_S, SILENT_S, LeaseRecorder, ReaderMaster

TOLD, _ = session_of(table_of(samples.records(list(range(1, 20)))))


class Case:
    def __init__(self, least: int = 1, most: int = 1) -> None:
        self.incarnation, self.session, self.clock = 4, TOLD, FakeClock()
        count = ReaderCountConfig(min_readers=least, max_readers=most)
        self.it = ReaderMaster(self._trained, samples.schema(), self.clock, count, long_poll_s=0)

    def _trained(self) -> tuple[int, TableInput | None]:
        return self.incarnation, self.session

    def lease(self, reader: str = "a", free: int = 2, **more: Any) -> dict[str, Any]:
        header = {"reader": reader, "at": f"{reader}:1", "incarnation": 4, "session": TOLD.digest}
        return dict(self.it.handle("lease", {**header, "free": free, **more}, ())[0])

    def want(self, *wanted: tuple[int, int], **more: Any) -> dict[str, Any]:
        header = {"worker": 0, "incarnation": 4, "session": TOLD.digest, "wanted": wanted, "voided": []}
        header |= {"in_flight": len(wanted), "fullness": 0.5, "stalled_s": 1.0, **more}
        return dict(self.it.handle("want", header, ())[0])


def test_a_reader_gets_the_session_and_then_leases_of_wanted_splits() -> None:
    case = Case()
    case.want((3, 8), (4, 12))
    told = case.lease(incarnation=0, session="")
    assert TableInput.of(told["input"]) == TOLD and told["schema"] == to_toml(samples.schema())
    assert (told["incarnation"], told["session"], told["leases"]) == (4, TOLD.digest, [])
    got = case.lease()
    assert got["leases"] == [(3, 8, 1, "a"), (4, 12, 2, "a")] and "input" not in got
    assert case.want((3, 8)) == {"holders": [(3, 8, 1, "a")], "readers": {"a": "a:1"}}


@pytest.mark.timeout(20)
def test_a_reader_with_unlimited_capacity_gets_all_wanted_splits() -> None:
    case = Case()
    case.want((3, 8), (4, 12))
    assert len(case.lease(free=10**12)["leases"]) == 2


def test_a_new_incarnation_voids_all_leases_and_rejects_old_workers() -> None:
    case = Case()
    case.want((3, 8))
    case.lease()
    case.incarnation = 5
    with pytest.raises(FencedError, match="expected a worker of incarnation 5"):
        case.want((3, 8))
    assert case.lease()["leases"] == [] and case.lease()["incarnation"] == 5
    assert case.want((3, 9), incarnation=5)["holders"] == []


def test_after_the_session_no_reader_is_wanted() -> None:
    case = Case()
    case.want((3, 8))
    case.lease()
    assert case.it.status()["wanted"] == 1
    case.session = None  # type: ignore[assignment]
    assert case.lease() == {"incarnation": 4, "session": "", "leases": []}
    assert case.it.status()["wanted"] == 1, "one less in ten seconds"
    case.clock.advance(11)
    assert case.it.status()["wanted"] == 0


def test_a_leaving_or_silent_reader_is_removed() -> None:
    case = Case()
    case.want((3, 8))
    case.lease("a")
    case.lease("b")
    case.lease("a", leaving=True)
    assert case.it.status()["there"] == 1 and case.lease("b")["leases"] == [(3, 8, 2, "b")]
    case.clock.advance(SILENT_S + 1)
    assert case.it.status()["there"] == 0


def test_a_reader_that_a_worker_cannot_reach_loses_the_split() -> None:
    case = Case()
    case.want((3, 8))
    case.lease("a")
    assert case.want((3, 8), voided=[(3, 1)])["holders"] == []
    assert case.lease("b")["leases"] == [(3, 8, 2, "b")]


@pytest.mark.parametrize(("in_flight", "wanted"), [(1, 1), (3, 2), (40, 5)])
def test_the_wanted_number_of_readers_follows_units_in_flight_within_limits(
    in_flight: int, wanted: int
) -> None:
    case = Case(least=1, most=5)
    case.want(*((n, 0) for n in range(in_flight)))
    assert case.it.status()["wanted"] == wanted
    told = {"fullness": 0.5, "in_flight": in_flight, "stalled_s": 1.0, "stall_share": None, "pieces": None}
    assert case.it.status()["buffers"] == {"0": told}


def test_status_lists_the_current_leases() -> None:
    case = Case()
    case.want((3, 8), (4, 12))
    case.lease("a", free=1)
    case.lease("b", free=1)
    case.clock.advance(1.5)
    case.lease("a", free=0)
    case.lease("b", free=0)
    assert case.it.status()["leases"] == [
        {"split": 3, "worker": 0, "position": 8, "reader": "a", "for_s": 1.5},
        {"split": 4, "worker": 0, "position": 12, "reader": "b", "for_s": 1.5},
    ]
    assert case.it.status()["readers"]["a"]["silent_s"] == 0.0


class Store(MemoryStore):
    """Counts, and may be away."""

    num_puts, is_away = 0, False

    def put(self, key: str, data: bytes) -> None:
        if self.is_away:
            raise UnavailableError("the store is away")
        super().put(key, data)
        self.num_puts += 1


def test_the_lease_log_is_saved() -> None:
    case, store = Case(), Store()
    kept = LeaseRecorder(case.it, store, case.clock)
    kept.save_if_due()
    assert store.num_puts == 0, "nobody read anything"
    case.want((3, 8), (4, 12))
    case.lease("a", free=2)
    case.want((4, 12))
    kept.save_if_due()
    case.want((4, 12), voided=[(4, 2)])
    kept.save_if_due()
    assert store.num_puts == 1, "not each time"
    case.lease("b", free=1)
    case.incarnation = 5
    kept.save_if_due(last=True)
    found = read_log(store.get(LEASES_FILE))
    assert found["readers"] == {"a": {"granted": 2, "done": 1, "voided": 1}, "b": {"granted": 1, "over": 1}}
    events = [f"{event.what} {event.split} {event.reader}" for event in found["events"]]
    assert events == ["granted 3 a", "granted 4 a", "done 3 a", "voided 4 a", "granted 4 b", "over 4 b"]
    assert found["session"]["digest"] == TOLD.digest and (found["incarnation"], found["trained"]) == (5, True)
    case.session = None  # type: ignore[assignment]
    assert case.it.lease_log()["session"]["digest"] == TOLD.digest and not case.it.lease_log()["trained"], (
        "it was the last"
    )


def test_saving_the_lease_log_is_retried_when_the_store_is_unavailable() -> None:
    case, store = Case(), Store()
    store.is_away = True
    kept = LeaseRecorder(case.it, store, case.clock)
    case.want((3, 8))
    case.lease()
    kept.save_if_due()
    store.is_away = False
    kept.save_if_due()
    assert store.num_puts == 0, "not each time"
    case.clock.advance(SAVE_S)
    kept.save_if_due()
    assert store.num_puts == 1


def test_other_calls_go_to_the_controller_or_are_refused() -> None:
    case = Case()
    with pytest.raises(RoostreamError, match="expected a call of lease or want, got 'beat'"):
        case.it.handle("beat", {}, ())
    beside = case.it.extend(lambda method, header, arrays: ({"method": method}, ()))
    assert beside("beat", {}, [])[0] == {"method": "beat"}
    header = {"reader": "a", "at": "a:1", "incarnation": 0, "session": "", "free": 0}
    assert beside("lease", header, [])[0]["incarnation"] == 4
