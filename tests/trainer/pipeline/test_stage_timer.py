"""The seconds of each stage add up to those of its thread."""

from __future__ import annotations

import threading

from roostream.runtime.clock import FakeClock
from trainer.pipeline.stage_timer import BESIDE, LOOP, STAGES, StageTimer


def test_a_stage_within_another_interrupts_it() -> None:
    clock = FakeClock()
    stages = StageTimer(clock)
    with stages("wait_data"):
        clock.advance(1)
        with stages("decode"):
            clock.advance(10)
        clock.advance(2)
    clock.advance(100)
    assert (stages.of_loop("wait_data"), stages.of_loop("decode"), stages.of_loop(*STAGES)) == (3, 10, 13)


def test_the_loop_s_thread_is_timed_separately_from_others() -> None:
    clock = FakeClock()
    stages = StageTimer(clock)

    def push() -> None:
        with stages("push"):
            clock.advance(5)

    with stages("forward"):
        thread = threading.Thread(target=push)
        thread.start()
        thread.join()
    assert stages.seconds()["push", BESIDE] == 5 and stages.seconds()["push", LOOP] == 0
    assert stages.of_loop("forward") == 5, "both at once"
