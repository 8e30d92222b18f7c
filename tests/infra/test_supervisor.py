"""The supervisor with small real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra import child_logs
from infra.child import Program, StopRank
from infra.supervisor import _PROBE_EVERY_S, RestartPolicy, Supervisor
from roostream.errors import SetupError, UnavailableError
from roostream.runtime.program import AWAY_CODE, HELD_CODE, REFUSED_CODE

WAIT_S = 20.0
SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(600)"
)


class SupervisorHarness:
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
        self.supervisor.start(programs)

    def state(self, name: str) -> str:
        return self.supervisor.slots[name].state

    def pid(self, name: str) -> int:
        child = self.supervisor.slots[name].child
        return child.pid if child else 0

    def wait(self, condition: Callable[[], bool]) -> None:
        assert self.supervisor.wait(condition, WAIT_S), {n: s.state for n, s in self.supervisor.slots.items()}

    def wait_state(self, name: str, state: str) -> None:
        self.wait(lambda: self.state(name) == state)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SupervisorHarness]:
    harness = SupervisorHarness(tmp_path)
    yield harness
    harness.supervisor.close()


def test_a_killed_child_is_started_again(harness: SupervisorHarness) -> None:
    harness.start(harness.program("a", SLEEP))
    harness.wait_state("a", "ready")
    before = harness.pid("a")
    os.kill(before, signal.SIGKILL)
    harness.wait(lambda: harness.state("a") == "ready" and harness.pid("a") not in (0, before))
    assert harness.supervisor.slots["a"].num_restarts == 1


def test_the_reason_why_a_program_cannot_be_started_is_stored(harness: SupervisorHarness) -> None:
    def prepare() -> None:
        raise SetupError("its folder can't be formatted")

    harness.start(harness.program("a", SLEEP, prepare=prepare))
    harness.wait(lambda: "a" in harness.supervisor.slots and harness.supervisor.slots["a"].last_error != "")
    assert harness.supervisor.slots["a"].last_error == "its folder can't be formatted"


def test_a_full_disk_ends_no_program_and_states_are_written_when_there_is_space(
    harness: SupervisorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    is_full, written = True, list[str]()

    def write_states() -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.extend(slot.state for slot in harness.supervisor.slots.values())

    harness.supervisor.changed = write_states
    harness.start(harness.program("a", SLEEP))
    harness.wait_state("a", "ready")
    assert "No space left" in caplog.text
    is_full = False
    end_s = time.monotonic() + WAIT_S
    while "ready" not in written and time.monotonic() < end_s:
        time.sleep(0.05)
    assert "ready" in written


def test_a_child_that_exits_with_0_is_restarted_without_an_error(
    harness: SupervisorHarness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    marker = tmp_path / "was here"
    ends_once = (
        f"import pathlib, time; p = pathlib.Path({str(marker)!r}); p.exists() and time.sleep(600); p.touch()"
    )
    harness.start(harness.program("a", ends_once))
    harness.wait(lambda: "a" in harness.supervisor.slots and harness.supervisor.slots["a"].num_restarts == 1)
    harness.wait_state("a", "ready")
    assert "a has ended on request" in caplog.text and "died" not in caplog.text


def test_a_child_that_dies_too_often_stays_down_and_is_logged(
    harness: SupervisorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.start(harness.program("a", "import sys; print('no such thing'); sys.exit(3)"))
    harness.wait_state("a", "failed")
    assert harness.supervisor.slots["a"].num_restarts == 3
    assert "a died (exit code 3)" in caplog.text
    assert "| no such thing" in caplog.text
    assert "stays down" in caplog.text


def test_a_program_waits_for_its_predecessors(harness: SupervisorHarness) -> None:
    is_up = False
    harness.start(harness.program("b", SLEEP, after=("a",)), harness.program("a", SLEEP, ready=lambda: is_up))
    harness.wait_state("a", "starting")
    assert harness.state("b") == "waiting"
    is_up = True
    harness.wait_state("b", "ready")


def test_waiting_for_predecessors_is_limited(harness: SupervisorHarness) -> None:
    harness.start(
        harness.program("b", SLEEP, after=("a",), max_after_wait_s=0.2),
        harness.program("c", SLEEP, after=("absent",)),
        harness.program("a", SLEEP, ready=lambda: False),
    )
    harness.wait_state("b", "ready")
    harness.wait_state("c", "ready")
    assert harness.state("a") == "starting"


def test_a_stopped_predecessor_is_not_waited_for(harness: SupervisorHarness) -> None:
    harness.start(harness.program("a", SLEEP))
    harness.wait_state("a", "ready")
    harness.supervisor.stop(["a"])
    harness.start(harness.program("b", SLEEP, after=("a",)))
    harness.wait_state("b", "ready")
    assert harness.state("a") == "stopped"


def test_on_ready_is_retried_until_it_succeeds(harness: SupervisorHarness) -> None:
    tries = []

    def fail_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise UnavailableError("not yet")

    harness.start(harness.program("a", SLEEP, on_ready=fail_once))
    harness.wait_state("a", "ready")
    assert len(tries) == 2


def test_a_probe_with_a_defect_ends_no_program(
    harness: SupervisorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel ends all programs with the supervisor's thread (die_with_parent.py)."""

    def defect() -> bool:
        raise ValueError("no such reading")

    harness.start(harness.program("a", SLEEP), harness.program("b", SLEEP, ready=defect))
    harness.wait_state("a", "ready")
    time.sleep(3 * _PROBE_EVERY_S)
    harness.start(harness.program("c", SLEEP))
    harness.wait_state("c", "ready")
    assert harness.state("a") == "ready" and harness.supervisor.slots["a"].num_restarts == 0
    assert caplog.text.count("no such reading") == 1


def test_a_log_that_cannot_be_rotated_ends_no_program(
    harness: SupervisorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[Path]()

    def truncate(path: Path, size: int) -> None:
        tries.append(path)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(child_logs.os, "truncate", truncate)
    harness.supervisor._next_rotation_s = 0.0  # noqa: SLF001
    harness.start(harness.program("a", f"print('x' * 2000, flush=True); {SLEEP}"))
    end_s = time.monotonic() + WAIT_S
    while not tries and time.monotonic() < end_s:
        time.sleep(0.05)
    harness.start(harness.program("b", SLEEP))
    harness.wait_state("b", "ready")
    assert tries and harness.state("a") == "ready"


def test_a_child_that_does_not_stop_in_time_is_killed_and_reported(harness: SupervisorHarness) -> None:
    log = harness.folder / "a.log"
    harness.start(
        harness.program("a", STUBBORN, stop_timeout_s=0.3, ready=lambda: b"ready" in log.read_bytes()),
        harness.program("b", SLEEP),
    )
    harness.wait_state("a", "ready")
    harness.wait_state("b", "ready")
    assert harness.supervisor.stop(["a", "b"]) == ["a"]
    assert harness.state("a") == harness.state("b") == "stopped"


def test_a_stopped_program_stays_down_until_it_is_started(harness: SupervisorHarness) -> None:
    harness.start(harness.program("a", SLEEP))
    harness.wait_state("a", "ready")
    assert harness.supervisor.stop(["a"]) == []
    assert harness.state("a") == "stopped"
    harness.start(harness.program("a", SLEEP))
    harness.wait_state("a", "ready")


def test_a_program_that_ends_by_itself_is_not_restarted(harness: SupervisorHarness) -> None:
    harness.start(harness.program("a", "raise SystemExit(7)", restart=False))
    harness.wait_state("a", "ended")
    assert harness.supervisor.slots["a"].exit_code == 7


def test_a_held_program_stays_down_until_it_is_started(
    harness: SupervisorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.start(harness.program("a", f"import sys; sys.exit({HELD_CODE})"))
    harness.wait_state("a", "held")
    assert harness.supervisor.slots["a"].num_restarts == 0 and "on hold" in caplog.text
    harness.start(harness.program("a", SLEEP))
    harness.wait_state("a", "ready")


def refusing_program(code: int, after_s: float = 0.0) -> str:
    line = "10:00:00 E roostream controller: file:///w is no table; has an archiver written there?"
    return f"import sys, time; time.sleep({after_s}); print({line!r}, flush=True); sys.exit({code})"


def test_a_refused_configuration_is_logged_once_and_not_retried(
    harness: SupervisorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.start(harness.program("a", refusing_program(REFUSED_CODE), refused_code=REFUSED_CODE))
    harness.wait_state("a", "failed")
    slot = harness.supervisor.slots["a"]
    assert (
        slot.num_restarts == 0 and slot.last_error == "file:///w is no table; has an archiver written there?"
    )
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1 and slot.last_error in errors[0]


def test_other_errors_are_retried_and_kept_as_last_error(harness: SupervisorHarness) -> None:
    harness.start(harness.program("a", refusing_program(AWAY_CODE), refused_code=REFUSED_CODE))
    harness.wait_state("a", "failed")
    slot = harness.supervisor.slots["a"]
    assert (
        slot.num_restarts == 3 and slot.last_error == "file:///w is no table; has an archiver written there?"
    )


@pytest.mark.parametrize(
    ("is_ready", "starts", "case"),
    [
        (True, 1, "the settings may have changed since the program read them"),
        (False, 0, "the program only waited for a peer before it refused"),
    ],
)
def test_a_program_that_worked_for_a_while_gets_one_more_start(
    is_ready: bool, starts: int, case: str, tmp_path: Path
) -> None:
    harness = SupervisorHarness(
        tmp_path, RestartPolicy(first_s=0.01, max_s=0.01, max_restarts=9, stable_s=0.3)
    )
    try:
        program = harness.program(
            "a",
            refusing_program(REFUSED_CODE, after_s=0.8),
            refused_code=REFUSED_CODE,
            ready=lambda: is_ready,
        )
        harness.start(program)
        harness.wait_state("a", "failed")
        assert harness.supervisor.slots["a"].num_restarts == starts, case
    finally:
        harness.supervisor.close()


def test_a_changed_file_causes_another_start(harness: SupervisorHarness, tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    file.write_text("wrong")
    code = (
        f"import sys, time; open({str(file)!r}).read() == 'wrong' and sys.exit({REFUSED_CODE}); "
        "time.sleep(600)"
    )
    harness.start(
        harness.program("a", code, refused_code=REFUSED_CODE, watched_files=(file, tmp_path / "absent"))
    )
    harness.wait_state("a", "failed")
    time.sleep(0.3)
    assert harness.state("a") == "failed", "nothing has changed yet"
    file.write_text("right")
    harness.wait_state("a", "ready")
    assert harness.supervisor.slots["a"].last_error == ""


def test_a_stopped_program_is_not_restarted_by_a_changed_file(
    harness: SupervisorHarness, tmp_path: Path
) -> None:
    file = tmp_path / "schema.toml"
    file.write_text("wrong")
    harness.start(
        harness.program("a", refusing_program(REFUSED_CODE), refused_code=REFUSED_CODE, watched_files=(file,))
    )
    harness.wait_state("a", "failed")
    harness.supervisor.stop(["a"])
    file.write_text("right")
    time.sleep(0.4)
    assert harness.state("a") == "failed" and harness.supervisor.slots["a"].num_restarts == 0


def test_a_failed_start_is_logged_and_retried(
    harness: SupervisorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> None:
        raise OSError(28, "No space left on device")

    harness.start(harness.program("a", SLEEP, prepare=prepare))
    harness.wait_state("a", "failed")
    assert "No space left on device" in caplog.text


def test_closing_leaves_nothing_running(harness: SupervisorHarness) -> None:
    harness.start(harness.program("a", STUBBORN), harness.program("b", SLEEP))
    harness.wait_state("a", "ready")
    harness.wait_state("b", "ready")
    pids = [harness.pid("a"), harness.pid("b")]
    harness.supervisor.close()
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(UnavailableError, match="has been stopped"):
        harness.start(harness.program("c", SLEEP))


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from infra.child import Program, StopRank, start_child
log = Path({str(tmp_path)!r}) / "a.log"
program = Program(name="a", command=("sleep", "600"), log=log, env=dict(os.environ))
child = start_child(program, 0.0)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen((sys.executable, "-c", code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        time.sleep(0.3)  # the child requests its death signal in its first instructions
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


def test_restart_delays_double_until_the_limit() -> None:
    policy = RestartPolicy(first_s=0.5, max_s=4.0, stable_s=60.0, max_restarts=6)
    assert [policy.delay_s(n) for n in (1, 2, 3, 5, 6, 7)] == [0.0, 0.5, 1.0, 4.0, 4.0, None]


def test_a_long_run_resets_the_count_of_restarts(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path, RestartPolicy(first_s=600.0, stable_s=0.0, max_restarts=1))
    try:
        harness.start(harness.program("a", "raise SystemExit(1)"))
        harness.wait(
            lambda: "a" in harness.supervisor.slots and harness.supervisor.slots["a"].num_restarts >= 3
        )
    finally:
        harness.supervisor.close()
