"""Helper processes of benchmarks: each is started as a module, prints its address, and runs until its stdin
ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


class Peer:
    """A helper process with a line protocol. Its first line is its `address`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process
        self.address = self.read_line()

    def send_line(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read_line(self) -> str:
        """Wait for the next line of its output."""
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{self._process.args[2:]!r} ended before it answered")  # type: ignore[index]
        return line


@contextlib.contextmanager
def start_peer(module: str, *arguments: str) -> Iterator[Peer]:
    """Run `python -m module`; yields when the process has printed its address."""
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
def peer_address(module: str, *arguments: str) -> Iterator[str]:
    """The same for a peer that needs no further lines; yields its address."""
    with start_peer(module, *arguments) as peer:
        yield peer.address


def print_address_and_wait(address: str) -> None:
    """In the peer: print the address, and wait for the end of stdin."""
    print(address, flush=True)
    sys.stdin.read()
