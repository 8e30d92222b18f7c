"""A peer in a process of its own: started as a module, it prints its address and serves until its stdin ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def serving(module: str, *arguments: str) -> Iterator[str]:
    """The address of `python -m module`, with the Python of this process."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError(f"{module} ended before it listened")
            yield address
        finally:
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def listen_until_told(address: str) -> None:
    """Say where this process listens, and wait for the end of stdin."""
    print(address, flush=True)
    sys.stdin.read()
