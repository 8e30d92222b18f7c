"""The state's bytes: versioned, and damage is refused."""

from __future__ import annotations

import pytest

from joiner.state import NEVER, VERSION, State, decode, encode
from roo.errors import CheckpointError
from tests.joiner.cases import Driver, engagement, impression, rules


def test_no_bytes_are_a_new_state_that_wants_no_timer() -> None:
    assert decode(None) == State() and State().due_ms == NEVER


def test_state_of_every_phase_comes_back_equal() -> None:
    driver = Driver(rules(correction_horizon_ms=50))
    driver.send(engagement(900, event=9, request="w"), impression(1_000), engagement(1_005, event=1), engagement(1_500, event=2))
    for watermark_ms in (950, 1_100, 1_150, 2_100):
        driver.at(watermark_ms)
        assert decode(encode(driver.state)) == driver.state


@pytest.mark.parametrize("data", [b"", bytes((VERSION + 1,)) + encode(State())[1:]])
def test_another_version_is_refused_with_what_to_do(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=f"expected joiner state of version {VERSION}.*restore an older build"):
        decode(data)


def test_damaged_bytes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        decode(bytes((VERSION,)) + b"\xc1")
