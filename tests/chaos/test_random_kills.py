"""Random kills of one or two programs at a time, in a stack with two workers. A minute after the last kill
every reading is known again, and nothing is lost or trained twice.

KILLS=60 sets the number of kills and KILLS_SEED=3 their order. KNOWN_AGAIN_S=180 allows the readings more
time on a busy machine, where a program starts in half a minute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from pathlib import Path

import pytest

from infra.stack import Stack
from roostream.errors import RoostreamError
from tests.chaos.readings import auc, bad_readings, monitor_of, status_of
from tests.chaos.test_kill_everything import VICTIMS
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until

KILLS = int(os.environ.get("KILLS", "8"))
SEED = int(os.environ.get("KILLS_SEED", "1"))
KILL_EVERY_S = (2.0, 10.0)
KNOWN_AGAIN_S = float(os.environ.get("KNOWN_AGAIN_S", "60"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900 + 20 * KILLS)]


def kill_at_random(stack: Stack, kills: int, seed: int) -> list[str]:
    """Kill this many programs, sometimes two at once, with seconds between. Returns their names in order."""
    rng, killed = random.Random(seed), list[str]()
    programs = [*VICTIMS, "worker-1"]
    until_s = time.monotonic() + 20 * kills
    while len(killed) < kills:
        assert time.monotonic() < until_s, f"only these were running to be killed: {killed}"
        for victim in rng.sample(programs, rng.choice((1, 1, 2))):
            with contextlib.suppress(RoostreamError):  # it is already down
                stack.kill(victim)
                killed.append(victim)
        time.sleep(rng.uniform(*KILL_EVERY_S))
    return killed


def test_a_minute_after_the_last_kill_every_reading_is_known_and_nothing_is_lost(tmp_path: Path) -> None:
    print(f"KILLS={KILLS} KILLS_SEED={SEED}")
    options = dataclasses.replace(quick_options(), num_workers=2)
    with Stack(tmp_path, options) as stack:
        stack.start(["all", "simulate"])
        stack.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(stack) > 50, 240)
        monitor = monitor_of(stack)
        try:
            killed = kill_at_random(stack, KILLS, SEED)
            print(f"killed: {' '.join(killed)}")

            last_unknown_s, began_s = dict[str, int](), time.monotonic()

            def unknown() -> list[str]:
                found = [*bad_readings(stack, monitor), *(["AUC"] if auc(stack, monitor) is None else [])]
                last_unknown_s.update(dict.fromkeys(found, round(time.monotonic() - began_s)))
                return found

            wait_until("every reading known", lambda: not unknown(), KNOWN_AGAIN_S, lambda: last_unknown_s)
            print(f"every reading was known {time.monotonic() - began_s:.0f} s after the last kill")
            print(f"reading → the second after the last kill when it was last unknown: {last_unknown_s}")
            check_nothing_lost_or_twice(stack, within_s=300)

            def audited() -> dict[str, object]:
                return dict(status_of(stack, monitor)["guarantees"]["g1"])

            wait_until("the running audit says yes", lambda: audited()["state"] == "yes", 60, audited)
            audit = audited()
            print(f"audit: {audit}")
            assert not audit["unreadable"], audit
            assert auc(stack, monitor) is not None
            assert stack.failed() == []
        finally:
            monitor.close()
