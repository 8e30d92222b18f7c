"""Faults of a running stack that last for a while: stopped programs, a store that is away, a second process
of a program.

The checkpoint store of `stack_with_volume` is a volume of its own (a bind mount, which needs root).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from infra.options import StackOptions
from infra.stack import Stack
from roostream.errors import RoostreamError
from roostream.runtime.rpc.client import SocketTransport
from tests.e2e.loop_stack import wait_until

_MOUNT_S = 30.0


def mount(*arguments: str | Path) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


def unmount(at: Path) -> None:
    subprocess.run(["umount", "-l", at], check=True)


@contextlib.contextmanager
def stack_with_volume(root: Path, options: StackOptions) -> Iterator[Stack]:
    """A stack in `root`/home, which isn't started yet; skipped where this user may not mount a volume."""
    volume, at = root / "volume", root / "home" / "store"
    volume.mkdir()
    at.mkdir(parents=True)
    if not mount("--bind", volume, at):
        pytest.skip("this user may not mount a volume")
    try:
        with Stack(root / "home", options) as stack:
            yield stack
    finally:
        unmount(at)


@contextlib.contextmanager
def unmounted(stack: Stack) -> Iterator[None]:
    """The store's mount point is an empty folder. Nothing may be written there."""
    at = stack.home.store
    unmount(at)
    try:
        yield
        assert not (found := sorted(at.rglob("*"))), f"written where the store is mounted: {found}"
    finally:
        assert mount("--bind", stack.home.root.parent / "volume", at)


@contextlib.contextmanager
def read_only(stack: Stack) -> Iterator[None]:
    at = stack.home.store
    wait_until("no file of the store is being written", lambda: mount("-o", "remount,bind,ro", at), _MOUNT_S)
    try:
        yield
    finally:
        assert mount("-o", "remount,bind,rw", at)


@contextlib.contextmanager
def stopped(stack: Stack, name: str) -> Iterator[None]:
    """SIGSTOP. The same process goes on afterwards, unless something ended it meanwhile."""
    pid = stack.pid(name)
    assert pid is not None, f"{name} is {stack.state(name)}"
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def exit_of_second_process(stack: Stack, name: str, timeout_s: float) -> tuple[int, str]:
    """Start a second process of a program, as another host would: with a home and ports of its own. Returns
    its exit code and what it wrote."""
    with tempfile.TemporaryDirectory() as home:
        own = stack.home.conf / f"{name}.toml"
        table: dict[str, Any] = tomllib.loads(own.read_text(encoding="utf-8"))
        table |= {"home": home, "metrics_port": 0}
        if "listen" in table:
            table["listen"] = "127.0.0.1:0"
        config, program = Path(home) / "second.toml", stack.programs[name]
        config.write_text(tomli_w.dumps(table), encoding="utf-8")
        command = [str(config) if word == str(own) else word for word in program.command]
        assert str(config) in command, command
        try:
            done = subprocess.run(
                command, env=dict(program.env), capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"the second process of {name} still runs after {timeout_s:.0f} s: {error.stderr!r}"
            ) from None
        return done.returncode, done.stdout + done.stderr


def control_status(stack: Stack) -> Mapping[str, Any]:
    """What the controller says; {} if it does not answer."""
    transport = SocketTransport(stack.endpoints.controller)
    try:
        return transport.call("status", {}, timeout_s=5.0)[0]
    except RoostreamError:
        return {}
    finally:
        transport.close()
