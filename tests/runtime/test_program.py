"""How programs end. Each test uses a process of its own, because signal handlers and logging belong to a
process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "import sys; from roostream.runtime.program import run; from roostream.errors import *\n"


def start_program(
    body: str, run_arguments: str = "", limits: tuple[int, int] | None = None, **env: str
) -> subprocess.Popen[str]:
    """`limits`: of open files, soft and hard."""
    head = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n" * (limits is not None)
    code = f"{head}{HEAD}def body(stop):\n    {body}\nsys.exit(run('prog', body, {run_arguments}))"
    environ = {**os.environ, "ROOSTREAM_LOG": "", **env}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("pass", 0, "prog stopped"),
        ("raise ConfigError('expected a, got b')", 2, "prog: expected a, got b"),
        (
            "stop.set(); raise UnavailableError('stopped while waiting for Kafka')",
            0,
            "prog stopped: stopped while waiting",
        ),
        ("raise UnavailableError('Kafka does not answer')", 69, "prog: Kafka does not answer"),
        ("stop.set(); raise CheckpointError('manifest is damaged')", 69, "prog: manifest is damaged"),
        ("raise HeldError('training is held: out of memory')", 75, "prog: training is held"),
        ("raise OSError(28, 'No space left', '/tmp/x')", 69, "prog: /tmp/x: No space left; free some space"),
        ("raise OSError(24, 'Too many open files')", 69, "raise the limit of open files"),
        ("raise OSError(9, 'Bad file descriptor')", 1, "this is a defect of Roostream"),
        ("raise ValueError('oops')", 1, "this is a defect of Roostream, not of your settings"),
    ],
)
def test_how_a_body_ends_is_the_exit_code_and_one_line(body: str, code: int, message: str) -> None:
    process = start_program(body)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and message in stderr, stderr
    assert ("Traceback" in stderr) == (code == 1)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("pass", 0, ""),
        ("raise ConfigError('expected a, got b')", 2, "error: expected a, got b; `roostream prog --help`"),
        ("raise UnavailableError('Kafka is away; start it')", 2, "error: Kafka is away; start it\n"),
        ("raise HeldError('training is held')", 75, "error: training is held; "),
    ],
)
def test_a_command_that_fails_says_what_to_do_in_one_line(body: str, code: int, message: str) -> None:
    process = start_program(body, "is_command=True")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and stderr.startswith(message) and stderr.count("\n") == bool(message)


def test_a_command_that_was_stopped_before_its_end_did_not_succeed() -> None:
    process = start_program("stop.set(); raise UnavailableError('stopped before the end')", "is_command=True")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "stopped before the end" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_program_in_order(number: signal.Signals) -> None:
    process = start_program("print('up', flush=True); stop.wait(30); print('down', flush=True)")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "down\n") and "prog stopped" in stderr


def test_a_signal_that_interrupts_a_method_of_the_stop_event_stops_the_program() -> None:
    """The main thread holds the event's lock at that moment; the handler must not wait for it."""
    body = """import os, signal, threading
    def interrupt(frame, event, argument):
        if frame.f_code is threading.Condition.wait.__code__:
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGTERM)
    sys.settrace(interrupt)
    while not stop.wait(0.1):
        pass"""
    process = start_program(body)
    try:
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_that_waits_in_a_library_does_not_change_the_exit_code(waits: bool) -> None:
    """While such a thread runs, the process skips the interpreter's finalization, which could crash. Without
    such a thread, finalization and exit handlers run as usual."""
    code = (
        "import atexit, threading; from roostream.runtime.thread_group import ThreadGroup; from "
        "roostream.runtime.program import leave\n"
        "atexit.register(print, 'taken apart')\n"
        "threads, gone = ThreadGroup(threading.Event()), threading.Event()\n"
        f"threads.start('rows', gone.wait, {300 if waits else 0})\n"
        "print(threads.join(0.2)); leave(3)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 3, completed.stderr
    assert completed.stdout.splitlines() == (["['rows']"] if waits else ["[]", "taken apart"])


@pytest.mark.parametrize("client", ["confluent_kafka", "json"])
def test_a_program_exits_without_tearing_down_the_kafka_client(client: str) -> None:
    """The client's threads call back as long as they run, so the interpreter is not shut down under them.
    Exit handlers run all the same."""
    code = (
        f"import atexit, threading, {client}; from roostream.runtime.program import leave\n"
        "atexit.register(print, 'registered')\n"
        "class Last:\n"
        "    def __del__(self): print('taken apart')\n"
        "last = Last(); leave(3)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 3, completed.stderr
    assert completed.stdout.splitlines() == (
        ["registered"] if client == "confluent_kafka" else ["registered", "taken apart"]
    )


@pytest.mark.parametrize("hard", [512, 4096])
def test_a_program_raises_its_limit_of_open_files(hard: int) -> None:
    process = start_program(
        "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])", limits=(256, hard)
    )
    assert int(process.communicate(timeout=60)[0]) == hard


def test_an_unknown_log_level_is_refused() -> None:
    process = start_program("pass", ROOSTREAM_LOG="debgu")
    _, stderr = process.communicate(timeout=60)
    assert (
        process.returncode == 2
        and "environment ROOSTREAM_LOG: expected one of" in stderr
        and "did you mean 'DEBUG'?" in stderr
    )


URL = "redis://:s3cret@127.0.0.1:1/0"
LEAKS = [
    f"raise ValueError('{URL}')",
    f"raise UnavailableError('{URL} is away')",
    f"import logging; logging.getLogger('any').warning('at %s', '{URL}')",
    f"from roostream.runtime.backoff import Backoff; Backoff(what='Redis at {URL}', timeout_s=0.2).until("
    "lambda: 1 // 0, (ZeroDivisionError,))",
]


@pytest.mark.parametrize("body", LEAKS)
def test_a_password_in_an_address_reaches_no_log(body: str) -> None:
    process = start_program(body)
    _, stderr = process.communicate(timeout=60)
    assert "s3cret" not in stderr and "redis://***@127.0.0.1:1/0" in stderr


def test_compiling_kernels_is_logged_once() -> None:
    """Kernels from the cache are not compiled and not logged."""
    head = "from numba import njit; f = njit(lambda x: x + 1); g = njit(lambda x: x + 2)"
    process = start_program(f"{head}; f(1); g(1)", PYTHONSTARTUP="")
    _, stderr = process.communicate(timeout=60)
    assert "compiling" not in stderr, "compilation outside a program's body must not be logged"
    code = f"{HEAD}{head}\ndef body(stop): f(1); g(1)\nsys.exit(run('prog', body))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("compiling kernels once") == 1


def lines_of(body: str, form: str) -> list[str]:
    imports = "import logging\nfrom roostream.runtime.program import *\n"
    code = f"{HEAD}{imports}def body(stop):\n    {body}\nsys.exit(run('prog', body, {form!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stderr.splitlines()


def test_lines_may_be_json_one_object_a_line() -> None:
    lines = [
        json.loads(line)
        for line in lines_of(f"logging.getLogger('any').warning('at %s\\n', '{URL}'); 1 / 0", "json")
    ]
    assert [line["level"] for line in lines] == ["WARNING", "ERROR"] and lines[0][
        "message"
    ] == "at redis://***@127.0.0.1:1/0\n"
    assert lines[0]["logger"] == "any" and re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"]
    )
    assert "ZeroDivisionError" in lines[1]["error"] and "error" not in lines[0]


def test_a_log_line_names_its_call() -> None:
    begin = "CURRENT_CALL.set(CallContext('c-1', 'aa', 'bb'))"
    body = f"{begin}; logging.getLogger('any').warning('slow'); CURRENT_CALL.set(None)"
    assert lines_of(body, "text")[0].endswith("any slow [call_id=c-1 trace_id=aa span_id=bb]")
    logged = json.loads(lines_of(body, "json")[0])
    assert (logged["call_id"], logged["trace_id"], logged["span_id"]) == ("c-1", "aa", "bb")
    assert "call_id" not in lines_of(body, "text")[-1], "a later line must not name the call"


def test_the_libraries_of_torchrec_are_not_logged_one_by_one() -> None:
    lines = lines_of("import fbgemm_gpu; logging.info('of a custom model'); logging.warning('w')", "text")
    assert not [line for line in lines if "fbgemm" in line]
    assert [line.split()[-1] for line in lines if "root" in line] == ["model", "w"]
