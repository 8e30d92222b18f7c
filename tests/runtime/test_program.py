"""How programs end, each in a process of its own: signal handlers and logging are the process'."""

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


def started(body: str, how: str = "", **env: str) -> subprocess.Popen[str]:
    code = f"{HEAD}def body(stop):\n    {body}\nsys.exit(run('prog', body, {how}))"
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
    ("body", "code", "says"),
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
        ("raise ValueError('oops')", 1, "this is a defect of Roostream, not of your settings"),
    ],
)
def test_how_a_body_ends_is_the_exit_code_and_one_line(body: str, code: int, says: str) -> None:
    process = started(body)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and says in stderr, stderr
    assert ("Traceback" in stderr) == (code == 1)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("pass", 0, ""),
        ("raise ConfigError('expected a, got b')", 2, "error: expected a, got b; `roostream prog --help`"),
        ("raise UnavailableError('Kafka is away; start it')", 2, "error: Kafka is away; start it\n"),
        ("raise HeldError('training is held')", 75, "error: training is held; "),
    ],
)
def test_a_command_that_fails_says_what_to_do_in_one_line(body: str, code: int, says: str) -> None:
    process = started(body, "is_command=True")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and stderr.startswith(says) and stderr.count("\n") == bool(says)


def test_a_command_that_was_stopped_before_its_end_did_not_succeed() -> None:
    process = started("stop.set(); raise UnavailableError('stopped before the end')", "is_command=True")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "stopped before the end" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_program_in_order(number: signal.Signals) -> None:
    process = started("print('up', flush=True); stop.wait(30); print('down', flush=True)")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "down\n") and "prog stopped" in stderr


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_that_waits_in_a_library_does_not_change_the_exit_code(waits: bool) -> None:
    """The interpreter is not taken apart beneath it; without such a thread it is, and what was registered for
    then runs."""
    code = (
        "import atexit, threading; from roostream.runtime.thread_group import ThreadGroup; from "
        "roostream.runtime.program import leave\n"
        "atexit.register(print, 'taken apart')\n"
        "threads, gone = ThreadGroup(threading.Event()), threading.Event()\n"
        f"threads.start('rows', gone.wait, {300 if waits else 0})\n"
        "print(threads.join(0.2)); leave(3)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.splitlines() == (["['rows']"] if waits else ["[]", "taken apart"])


@pytest.mark.parametrize("client", ["confluent_kafka", "json"])
def test_a_program_exits_without_tearing_down_the_kafka_client(client: str) -> None:
    """Its threads call back for as long as there are any. What was registered for the end runs all the
    same."""
    code = (
        f"import atexit, threading, {client}; from roostream.runtime.program import leave\n"
        "atexit.register(print, 'registered')\n"
        "class Last:\n"
        "    def __del__(self): print('taken apart')\n"
        "last = Last(); leave(3)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.splitlines() == (
        ["registered"] if client == "confluent_kafka" else ["registered", "taken apart"]
    )


def test_an_unknown_log_level_is_refused() -> None:
    process = started("pass", ROOSTREAM_LOG="debgu")
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
    process = started(body)
    _, stderr = process.communicate(timeout=60)
    assert "s3cret" not in stderr and "redis://***@127.0.0.1:1/0" in stderr


def test_compiling_kernels_is_logged_once() -> None:
    """Those that are in the cache are not compiled, so nothing is said of them."""
    head = "from numba import njit; f = njit(lambda x: x + 1); g = njit(lambda x: x + 2)"
    process = started(f"{head}; f(1); g(1)", PYTHONSTARTUP="")
    _, stderr = process.communicate(timeout=60)
    assert "compiling" not in stderr, "a body that brings numba itself is no program of ours"
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
    told = [
        json.loads(line)
        for line in lines_of(f"logging.getLogger('any').warning('at %s\\n', '{URL}'); 1 / 0", "json")
    ]
    assert [t["level"] for t in told] == ["WARNING", "ERROR"] and told[0][
        "message"
    ] == "at redis://***@127.0.0.1:1/0\n"
    assert told[0]["logger"] == "any" and re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told[0]["time"]
    )
    assert "ZeroDivisionError" in told[1]["error"] and "error" not in told[0]


def test_a_log_line_names_its_call() -> None:
    begin = "CURRENT_CALL.set(CallContext('c-1', 'aa', 'bb'))"
    body = f"{begin}; logging.getLogger('any').warning('slow'); CURRENT_CALL.set(None)"
    assert lines_of(body, "text")[0].endswith("any slow [call_id=c-1 trace_id=aa span_id=bb]")
    told = json.loads(lines_of(body, "json")[0])
    assert (told["call_id"], told["trace_id"], told["span_id"]) == ("c-1", "aa", "bb")
    assert "call_id" not in lines_of(body, "text")[-1], "whatever comes after it isn't about it"


def test_the_libraries_of_torchrec_are_not_logged_one_by_one() -> None:
    lines = lines_of("import fbgemm_gpu; logging.info('of a custom model'); logging.warning('w')", "text")
    assert not [line for line in lines if "fbgemm" in line]
    assert [line.split()[-1] for line in lines if "root" in line] == ["model", "w"]
