"""The transport in memory: as reliable as a call until a test says otherwise. What all transports share is in
tests/contract."""

from __future__ import annotations

import pytest

from roostream.errors import TransportError
from roostream.runtime.rpc.transport import InMemoryTransport


def test_calls_reach_the_handler_unless_the_peer_is_down() -> None:
    seen: list[str] = []

    def handler(
        method: str, header: dict[str, object], arrays: object
    ) -> tuple[dict[str, object], list[object]]:
        seen.append(method)
        return {"n": len(seen)}, []

    transport = InMemoryTransport(handler)  # type: ignore[arg-type]
    assert transport.call("a", {}) == ({"n": 1}, [])
    transport.down = True
    with pytest.raises(TransportError):
        transport.call("b", {})
    transport.down = False
    assert transport.call("c", {}) == ({"n": 2}, []) and seen == ["a", "c"]


@pytest.mark.parametrize(("when", "acted"), [("before", []), ("after", ["a"])])
def test_a_fault_is_met_once_by_the_method_that_it_is_for(when: str, acted: list[str]) -> None:
    seen: list[str] = []

    def handler(
        method: str, header: dict[str, object], arrays: object
    ) -> tuple[dict[str, object], list[object]]:
        seen.append(method)
        return {}, []

    transport = InMemoryTransport(handler)  # type: ignore[arg-type]
    transport.fail_next("a", when)
    transport.call("b", {})
    with pytest.raises(TransportError, match=f"injected fault {when} the call"):
        transport.call("a", {})
    assert seen == ["b", *acted]
    transport.call("a", {})
    assert seen == ["b", *acted, "a"]
