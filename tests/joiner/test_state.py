"""The join's state as bytes: an event touches few entries, every value has a version, damage is refused, and
names can't collide."""

from __future__ import annotations

import pytest

from joiner.state import END, VERSION, MemoryState, Request, SerializedState, decode, encode
from roostream.errors import CheckpointError
from tests.joiner.cases import DictStore, Driver, engagement, impression, rules

T = 1_000


class CountingStore(DictStore):
    """A store that records the keys read and written."""

    def __init__(self, entries: DictStore) -> None:
        super().__init__(entries)
        self.touched_keys: list[str] = []

    def get(self, key: str, default: object = None) -> bytes | None:  # type: ignore[override]
        self.touched_keys.append(key)
        return super().get(key)

    def put(self, key: str, value: bytes) -> None:
        self.touched_keys.append(key)
        super().put(key, value)


def touched_kinds(driver: Driver, message: object) -> list[str]:
    """The kinds of the entries that this event reads and writes, in order."""
    store = CountingStore(driver.store)
    driver.store = store
    driver.send(message)  # type: ignore[arg-type]
    return [name[0] for name in store.touched_keys]


@pytest.mark.parametrize("num_requests", [1, 40])
@pytest.mark.parametrize("num_events", [2, 40])
def test_an_engagement_touches_two_state_entries_only(num_requests: int, num_events: int) -> None:
    driver = Driver(rules(next_request="user"))
    for n in range(num_requests):
        driver.send(impression(T + n, request=f"r{n}"))
    driver.advance_to(T + num_requests + 100)
    driver.send(impression(T + 500), *(engagement(T + 501, event=n) for n in range(1, num_events)))
    assert touched_kinds(driver, engagement(T + 502, event=99)) == ["r", "e", "r", "e"]


def test_changes_are_discarded_or_flushed() -> None:
    store = DictStore()
    entries = SerializedState(store)
    entries.requests["r"] = Request(num_events=3)
    entries.reset()
    entries.flush()
    assert store == {} and entries.requests.get("r") is None
    entries.requests["r"] = Request(num_events=3)
    entries.flush()
    assert SerializedState(store).requests.get("r") == Request(num_events=3)
    del entries.requests["r"]
    entries.flush()
    assert store == {}


def test_request_ids_with_dots_digits_and_kinds_in_them_do_not_collide() -> None:
    driver = Driver(rules())
    names = ["1.r", "r", "e1.r", "1", ".", "1.1.r"]
    for n, name in enumerate(names, 1):
        driver.send(impression(T, request=name), engagement(T + 1, event=n, request=name))
    assert set(driver.state.requests) == set(names) and {
        r: list(e) for r, e in driver.state.engagements.items()
    } == {r: [n] for n, r in enumerate(names, 1)}


def test_state_of_every_phase_round_trips() -> None:
    driver = Driver(rules(correction_horizon_ms=50, next_request="session"), "memory")
    driver.send(
        engagement(900, event=9, request="w"),
        impression(T),
        engagement(1_005, event=1),
        engagement(1_500, event=2),
    )
    for watermark_ms in (950, 1_100, 1_150, 2_100):
        driver.advance_to(watermark_ms)
        assert decode(encode(driver.state)) == driver.state
    driver.advance_to(END)
    assert driver.state == MemoryState()


def test_every_value_begins_with_the_version() -> None:
    driver = Driver(rules(next_request="user", correction_horizon_ms=500))
    driver.send(impression(T), engagement(T + 1, event=1))
    driver.advance_to(T + 100)
    assert {name[0] for name in driver.store} == set("hriestd")
    assert {value[0] for value in driver.store.values()} == {VERSION}


@pytest.mark.parametrize("data", [b"", bytes((1,)) + encode(MemoryState())[1:], bytes((VERSION + 1,))])
def test_state_of_another_version_is_refused_with_advice(data: bytes) -> None:
    with pytest.raises(
        CheckpointError, match=f"expected joiner state of version {VERSION}, got .*; continue with the build"
    ):
        SerializedState(DictStore({"rr": data})).requests.get("r")


def test_damaged_bytes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="decoded"):
        decode(bytes((VERSION,)) + b"\xc1")


def test_a_request_is_stored_in_fewer_bytes_after_each_phase() -> None:
    driver = Driver(rules(terminal_actions=("buy",)))
    driver.send(impression(T, items=range(1, 21)), *(engagement(T + n, event=n) for n in (1, 2)))
    sizes = []
    for watermark_ms in (T + 3, T + 100, T + 1_100, T + 2_100):
        driver.advance_to(watermark_ms)
        sizes.append(sum(len(name) + len(value) for name, value in driver.store.items()))
    assert sizes[1] < 400 and sizes[2] < 90 and sizes[3] == 0, sizes
