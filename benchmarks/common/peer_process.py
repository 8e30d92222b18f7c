"""A peer in a process of its own: started as a module, it prints its address, and serves until its stdin ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


class Peer:
    """A process that one talks to in lines. `address`: its first one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process
        self.address = self.heard()

    def tell(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def heard(self) -> str:
        """Its next line; waits for it."""
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{self._process.args[2:]!r} ended before it answered")  # type: ignore[index]
        return line


@contextlib.contextmanager
def talking(module: str, *arguments: str) -> Iterator[Peer]:
    """`python -m module`, with the Python of this process, once it has told its address."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        try:
            yield Peer(process)
        finally:
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def serving(module: str, *arguments: str) -> Iterator[str]:
    """The address of a peer that is not talked to."""
    with talking(module, *arguments) as peer:
        yield peer.address


def listen_until_told(address: str) -> None:
    """Say where this process listens, and wait for the end of stdin."""
    print(address, flush=True)
    sys.stdin.read()
