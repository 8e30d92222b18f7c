"""A broker that lost the newest records of its topics, as after a power failure before its disk had them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.stack import Stack
from roostream.runtime.kafka.topics import TOPICS
from tests.chaos.readings import bad_readings, monitor_of, status_of
from tests.e2e.loop_stack import applied, quick_options, rank, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

_LOST_SHARE = 0.3
_CUT = (*TOPICS, "__transaction_state", "__consumer_offsets")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("unclean"), quick_options()) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(running) > 150, 240)
        yield running


def lose_newest_records(stack: Stack) -> None:
    """While no broker runs: cut the end off each partition's log. Without the marker of a clean shutdown the
    broker looks for the last whole batch."""
    data = stack.home.root / "kafka"
    (data / ".kafka_cleanshutdown").unlink()
    (data / "recovery-point-offset-checkpoint").unlink()
    for topic in _CUT:
        for folder in data.glob(f"{topic}-[0-9]*"):
            log = max(folder.glob("*.log"))
            size = log.stat().st_size
            with log.open("r+b") as file:
                file.truncate(int(size * (1 - _LOST_SHARE)))
            for derived in (*folder.glob("*.index"), *folder.glob("*.timeindex"), *folder.glob("*.snapshot")):
                derived.unlink()


def test_lost_records_are_counted_and_every_program_goes_on(stack: Stack) -> None:
    """Producers whose records the broker has forgotten are replaced; no program ends for it."""
    monitor = monitor_of(stack)

    def bad() -> list[str]:
        return bad_readings(stack, monitor)

    try:
        before = applied(stack)
        stack.stop_program("kafka")
        lose_newest_records(stack)
        stack.start(["kafka"])
        stack.wait_ready("kafka", timeout_s=180)
        wait_until("a commit of new samples", lambda: applied(stack) > before + 50, 180, bad)
        wait_until("good readings", lambda: not bad(), 60, bad)
        lost = status_of(stack, monitor)["lost_records"]
        assert min(lost["worker"], lost["features"], lost["archiver"]) > 0, lost
        assert rank(stack, [1, 2, 3])["model_version"]
        restarts = {name: n for name in stack.programs if (n := stack.restarts(name))}
        assert not restarts
        logs = {name: stack.log_path(name).read_text() for name in stack.programs}
        assert not [name for name, text in logs.items() if "a defect of Roostream" in text]
    finally:
        monitor.close()
