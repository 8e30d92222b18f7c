"""How programs end, each in a process of its own: signal handlers and logging are the process'."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "import sys; from runtime.program import run; from roo.errors import *\n"


def started(body: str, **env: str) -> subprocess.Popen[str]:
    code = f"{HEAD}def body(stop):\n    {body}\nsys.exit(run('prog', body))"
    environ = {**os.environ, "ROOSTREAM_LOG": "", **env}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("pass", 0, "prog stopped"),
        ("raise ConfigError('expected a, got b')", 2, "prog: expected a, got b"),
        ("stop.set(); raise UnavailableError('stopped while waiting for Kafka')", 0, "prog stopped: stopped while waiting"),
        ("stop.set(); raise CheckpointError('manifest is damaged')", 2, "prog: manifest is damaged"),
        ("raise HeldError('training is held: out of memory')", 75, "prog: training is held"),
        ("raise ValueError('oops')", 1, "this is a defect of Roostream, not of your settings"),
    ],
)
def test_how_a_body_ends_is_the_exit_code_and_one_line(body: str, code: int, says: str) -> None:
    process = started(body)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and says in stderr, stderr
    assert ("Traceback" in stderr) == (code == 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_body_in_its_own_order(number: signal.Signals) -> None:
    process = started("print('up', flush=True); stop.wait(30); print('down', flush=True)")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "down\n") and "prog stopped" in stderr


def test_a_log_level_that_there_is_not_is_told() -> None:
    process = started("pass", ROOSTREAM_LOG="debgu")
    _, stderr = process.communicate(timeout=60)
    assert (
        process.returncode == 2 and "environment ROOSTREAM_LOG: expected one of" in stderr and "did you mean 'DEBUG'?" in stderr
    )


URL = "redis://:s3cret@127.0.0.1:1/0"
LEAKS = [
    f"raise ValueError('{URL}')",
    f"raise UnavailableError('{URL} is away')",
    f"import logging; logging.getLogger('any').warning('at %s', '{URL}')",
    f"from runtime import redis_client as r; from runtime.backoff import Backoff; "
    f"r.wait_for_redis(r.client('{URL}', timeout_s=0.1), '{URL}', stop, backoff=Backoff(what='Redis at {URL}', timeout_s=0.2))",
]


@pytest.mark.parametrize("body", LEAKS)
def test_a_password_in_an_address_reaches_no_log(body: str) -> None:
    process = started(body)
    _, stderr = process.communicate(timeout=60)
    assert "s3cret" not in stderr and "redis://***@127.0.0.1:1/0" in stderr


def test_a_program_says_once_that_it_compiles_kernels() -> None:
    """Those that are in the cache are not compiled, so nothing is said of them."""
    head = "from numba import njit; f = njit(lambda x: x + 1); g = njit(lambda x: x + 2)"
    process = started(f"{head}; f(1); g(1)", PYTHONSTARTUP="")
    _, stderr = process.communicate(timeout=60)
    assert "compiling" not in stderr, "a body that brings numba itself is no program of ours"
    code = f"{HEAD}{head}\ndef body(stop): f(1); g(1)\nsys.exit(run('prog', body))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("compiling kernels, once: they are kept for the next start") == 1
