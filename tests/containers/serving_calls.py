"""Calls of a serving that runs in containers."""

from __future__ import annotations

import subprocess
import sys
import urllib.request


def answers(url: str, path: str) -> bool:
    """Whether serving answers this path with status 200."""
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def simulate(url: str, seconds: int) -> None:
    """Send the requests of simulated users for so long. Fails the test if serving answers none of them."""
    options = ("--serving", url, "--rate", "15", "--seconds", str(seconds))
    command = (sys.executable, "-m", "roostream.cli.main", "simulate", *options)
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
