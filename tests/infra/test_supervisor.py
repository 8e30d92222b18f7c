"""The supervisor with small real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.child import Program, StopRank
from infra.restart import RestartPolicy
from infra.supervisor import Supervisor
from roostream.errors import UnavailableError
from roostream.runtime.program import AWAY_CODE, HELD_CODE, REFUSED_CODE

WAIT_S = 20.0
SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


class Bench:
    """A supervisor and programs that are snippets of Python."""

    def __init__(self, folder: Path, policy: RestartPolicy | None = None) -> None:
        self.folder = folder
        policy = policy or RestartPolicy(first_s=0.01, max_s=0.01, max_restarts=3)
        self.supervisor = Supervisor(lambda: None, policy, log_bytes=1000).open()

    def program(self, name: str, code: str, **settings: object) -> Program:
        command = (sys.executable, "-I", "-S", "-c", code)
        return Program(
            name=name,
            command=command,
            log=self.folder / f"{name}.log",
            env=dict(os.environ),
            stop_rank=StopRank.TRAFFIC,
            **settings,
        )  # type: ignore[arg-type]

    def start(self, *programs: Program) -> None:
        self.supervisor.want(programs)

    def state(self, name: str) -> str:
        return self.supervisor.slots[name].state

    def pid(self, name: str) -> int:
        child = self.supervisor.slots[name].child
        return child.pid if child else 0

    def wait(self, done: Callable[[], bool]) -> None:
        assert self.supervisor.wait(done, WAIT_S), {n: s.state for n, s in self.supervisor.slots.items()}

    def wait_state(self, name: str, state: str) -> None:
        self.wait(lambda: self.state(name) == state)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.supervisor.close()


def test_a_killed_child_is_started_again(bench: Bench) -> None:
    bench.start(bench.program("a", SLEEP))
    bench.wait_state("a", "ready")
    before = bench.pid("a")
    os.kill(before, signal.SIGKILL)
    bench.wait(lambda: bench.state("a") == "ready" and bench.pid("a") not in (0, before))
    assert bench.supervisor.slots["a"].restarts.total == 1


def test_a_child_that_left_as_it_was_asked_to_is_started_again_without_alarm(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    there = tmp_path / "was here"
    leaves_once = (
        f"import pathlib, time; p = pathlib.Path({str(there)!r}); p.exists() and time.sleep(600); p.touch()"
    )
    bench.start(bench.program("a", leaves_once))
    bench.wait(lambda: "a" in bench.supervisor.slots and bench.supervisor.slots["a"].restarts.total == 1)
    bench.wait_state("a", "ready")
    assert "a has left after" in caplog.text and "died" not in caplog.text


def test_a_child_that_dies_again_and_again_is_given_up_and_said_so(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start(bench.program("a", "import sys; print('no such thing'); sys.exit(3)"))
    bench.wait_state("a", "failed")
    assert bench.supervisor.slots["a"].restarts.total == 3
    assert "a died (exit code 3)" in caplog.text
    assert "| no such thing" in caplog.text
    assert "it stays down" in caplog.text


def test_a_program_given_up_starts_when_it_is_asked_for_again(bench: Bench) -> None:
    bench.start(bench.program("a", "raise SystemExit(1)"))
    bench.wait_state("a", "failed")
    bench.start(bench.program("a", SLEEP))
    bench.wait_state("a", "ready")
    assert bench.state("a") == "ready"


def test_a_program_waits_for_those_that_come_before_it(bench: Bench) -> None:
    is_up = False
    bench.start(bench.program("b", SLEEP, after=("a",)), bench.program("a", SLEEP, ready=lambda: is_up))
    bench.wait_state("a", "starting")
    assert bench.state("b") == "waiting"
    is_up = True
    bench.wait_state("b", "ready")


def test_a_program_waits_no_longer_than_it_is_told_to_and_not_for_what_nobody_wants(bench: Bench) -> None:
    bench.start(
        bench.program("b", SLEEP, after=("a",), after_s=0.2),
        bench.program("c", SLEEP, after=("absent",)),
        bench.program("a", SLEEP, ready=lambda: False),
    )
    bench.wait_state("b", "ready")
    bench.wait_state("c", "ready")
    assert bench.state("a") == "starting"


def test_a_program_is_not_kept_waiting_by_one_that_was_asked_to_stop(bench: Bench) -> None:
    bench.start(bench.program("a", SLEEP))
    bench.wait_state("a", "ready")
    bench.supervisor.stop(["a"])
    bench.start(bench.program("b", SLEEP, after=("a",)))
    bench.wait_state("b", "ready")
    assert bench.state("a") == "stopped"


def test_what_follows_readiness_is_tried_until_it_works(bench: Bench) -> None:
    tries = []

    def fail_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise UnavailableError("not yet")

    bench.start(bench.program("a", SLEEP, on_ready=fail_once))
    bench.wait_state("a", "ready")
    assert len(tries) == 2


def test_a_child_that_does_not_stop_in_time_is_killed_and_counted(bench: Bench) -> None:
    log = bench.folder / "a.log"
    bench.start(
        bench.program("a", STUBBORN, stop_timeout_s=0.3, ready=lambda: b"ready" in log.read_bytes()),
        bench.program("b", SLEEP),
    )
    bench.wait_state("a", "ready")
    bench.wait_state("b", "ready")
    assert bench.supervisor.stop(["a", "b"]) == ["a"]
    assert bench.state("a") == bench.state("b") == "stopped"


def test_a_stopped_program_stays_down_until_it_is_asked_for(bench: Bench) -> None:
    bench.start(bench.program("a", SLEEP))
    bench.wait_state("a", "ready")
    assert bench.supervisor.stop(["a"]) == []
    assert bench.state("a") == "stopped"
    bench.start(bench.program("a", SLEEP))
    bench.wait_state("a", "ready")


def test_a_program_that_ends_by_itself_is_not_restarted(bench: Bench) -> None:
    bench.start(bench.program("a", "raise SystemExit(7)", restarted=False))
    bench.wait_state("a", "ended")
    assert bench.supervisor.slots["a"].exit_code == 7


def test_a_program_that_is_held_rests_until_it_is_asked_for(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start(bench.program("a", f"import sys; sys.exit({HELD_CODE})"))
    bench.wait_state("a", "held")
    assert bench.supervisor.slots["a"].restarts.total == 0 and "a rests: training is held" in caplog.text
    bench.start(bench.program("a", SLEEP))
    bench.wait_state("a", "ready")


def refusing(code: int, after_s: float = 0.0) -> str:
    said = "10:00:00 E roostream controller: file:///w is no table; has an archiver written there?"
    return f"import sys, time; time.sleep({after_s}); print({said!r}, flush=True); sys.exit({code})"


def test_what_is_refused_what_it_was_told_is_told_once_and_not_started_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start(bench.program("a", refusing(REFUSED_CODE), refusal=REFUSED_CODE))
    bench.wait_state("a", "failed")
    slot = bench.supervisor.slots["a"]
    assert slot.restarts.total == 0 and slot.said == "file:///w is no table; has an archiver written there?"
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == [f"a can't be started as it was told to: {slot.said}; its log: {bench.folder / 'a.log'}"]


@pytest.mark.parametrize("code", [AWAY_CODE, 1])
def test_what_may_pass_is_tried_again_and_its_last_words_are_kept(bench: Bench, code: int) -> None:
    bench.start(bench.program("a", refusing(code), refusal=REFUSED_CODE))
    bench.wait_state("a", "failed")
    slot = bench.supervisor.slots["a"]
    assert slot.restarts.total == 3 and slot.said == "file:///w is no table; has an archiver written there?"


def test_the_exit_code_of_others_is_none_of_ours(bench: Bench) -> None:
    """Kafka's and Redis' 2 says nothing of that."""
    bench.start(bench.program("a", refusing(REFUSED_CODE)))
    bench.wait_state("a", "failed")
    assert bench.supervisor.slots["a"].restarts.total == 3


@pytest.mark.parametrize(
    ("is_ready", "starts", "why"),
    [
        (True, 1, "its settings may have changed since it read them"),
        (False, 0, "it waited for a peer, and then refused"),
    ],
)
def test_whoever_did_its_work_for_a_while_has_one_more_start(
    is_ready: bool, starts: int, why: str, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, RestartPolicy(first_s=0.01, max_s=0.01, max_restarts=9, stable_s=0.3))
    try:
        program = bench.program(
            "a", refusing(REFUSED_CODE, after_s=0.8), refusal=REFUSED_CODE, ready=lambda: is_ready
        )
        bench.start(program)
        bench.wait_state("a", "failed")
        assert bench.supervisor.slots["a"].restarts.total == starts, why
    finally:
        bench.supervisor.close()


def test_a_change_of_what_was_refused_is_worth_another_start(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    file.write_text("wrong")
    code = f"import sys, time; open({str(file)!r}).read() == 'wrong' and sys.exit({REFUSED_CODE}); time.sleep(600)"
    bench.start(bench.program("a", code, refusal=REFUSED_CODE, reads=(file, tmp_path / "absent")))
    bench.wait_state("a", "failed")
    time.sleep(0.3)
    assert bench.state("a") == "failed", "it is as it was"
    file.write_text("right")
    bench.wait_state("a", "ready")
    assert bench.supervisor.slots["a"].said == ""


def test_what_was_refused_and_then_stopped_stays_down(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    file.write_text("wrong")
    bench.start(bench.program("a", refusing(REFUSED_CODE), refusal=REFUSED_CODE, reads=(file,)))
    bench.wait_state("a", "failed")
    bench.supervisor.stop(["a"])
    file.write_text("right")
    time.sleep(0.4)
    assert bench.state("a") == "failed" and bench.supervisor.slots["a"].restarts.total == 0


def test_a_program_that_is_killed_has_said_nothing_of_it(bench: Bench) -> None:
    bench.start(
        bench.program(
            "a", "print('10:00:00 E roostream a: no disk', flush=True); import os; os.kill(os.getpid(), 9)"
        )
    )
    bench.wait_state("a", "failed")
    assert bench.supervisor.slots["a"].said == "killed by signal 9"


def test_a_program_that_cannot_be_started_is_told_and_tried_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> None:
        raise OSError(28, "No space left on device")

    bench.start(bench.program("a", SLEEP, prepare=prepare))
    bench.wait_state("a", "failed")
    assert "No space left on device" in caplog.text


def test_a_log_does_not_grow_without_bound(bench: Bench) -> None:
    code = "import time\nwhile True: print('x' * 500, flush=True); time.sleep(0.01)"
    bench.start(bench.program("a", code))
    older = bench.folder / "a.log.1"
    deadline_s = time.monotonic() + WAIT_S
    while not older.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert older.exists()


def test_closing_leaves_nothing_running(bench: Bench) -> None:
    bench.start(bench.program("a", STUBBORN), bench.program("b", SLEEP))
    bench.wait_state("a", "ready")
    bench.wait_state("b", "ready")
    pids = [bench.pid("a"), bench.pid("b")]
    bench.supervisor.close()
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(UnavailableError, match="has been stopped"):
        bench.start(bench.program("c", SLEEP))


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from infra.child import Program, StopRank, start
log = Path({str(tmp_path)!r}) / "a.log"
program = Program(name="a", command=("sleep", "600"), log=log, env=dict(os.environ), stop_rank=StopRank.TRAFFIC)
child = start(program, 0.0)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen((sys.executable, "-c", code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        time.sleep(0.3)  # the child asks for its end within its first lines
        parent.kill()
    deadline_s = time.monotonic() + WAIT_S
    while _runs(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False
