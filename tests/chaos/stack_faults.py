"""Faults of a running stack that last for a while: stopped programs, an unavailable store, a second process
of a program.

The checkpoint store of `stack_with_volume` is a separate volume (a bind mount, which needs root).
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


def unmount(mount_point: Path) -> None:
    subprocess.run(["umount", "-l", mount_point], check=True)


@contextlib.contextmanager
def stack_with_volume(root: Path, options: StackOptions) -> Iterator[Stack]:
    """A stack in `root`/home that is not started yet. Skips the test if this user may not mount a volume."""
    volume, mount_point = root / "volume", root / "home" / "store"
    volume.mkdir()
    mount_point.mkdir(parents=True)
    if not mount("--bind", volume, mount_point):
        pytest.skip("this user may not mount a volume")
    try:
        with Stack(root / "home", options) as stack:
            yield stack
    finally:
        unmount(mount_point)


@contextlib.contextmanager
def unmounted(stack: Stack) -> Iterator[None]:
    """Unmount the store during the block. Nothing may be written to the empty mount point."""
    mount_point = stack.home.store
    unmount(mount_point)
    try:
        yield
        assert not (found := sorted(mount_point.rglob("*"))), f"written where the store is mounted: {found}"
    finally:
        assert mount("--bind", stack.home.root.parent / "volume", mount_point)


@contextlib.contextmanager
def read_only(stack: Stack) -> Iterator[None]:
    """Mount the store read-only during the block."""
    mount_point = stack.home.store
    wait_until(
        "no file of the store is being written", lambda: mount("-o", "remount,bind,ro", mount_point), _MOUNT_S
    )
    try:
        yield
    finally:
        assert mount("-o", "remount,bind,rw", mount_point)


@contextlib.contextmanager
def stopped(stack: Stack, name: str) -> Iterator[None]:
    """Send SIGSTOP to a program, and SIGCONT after the block."""
    pid = stack.pid(name)
    assert pid is not None, f"{name} is {stack.state(name)}"
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def exit_of_second_process(stack: Stack, name: str, timeout_s: float) -> tuple[int, str]:
    """Start a second process of a program, as another host would, with its own home and ports. Returns its
    exit code and output."""
    with tempfile.TemporaryDirectory() as home:
        config_file = stack.home.conf / f"{name}.toml"
        table: dict[str, Any] = tomllib.loads(config_file.read_text(encoding="utf-8"))
        table |= {"home": home, "metrics_port": 0}
        if "listen" in table:
            table["listen"] = "127.0.0.1:0"
        config, program = Path(home) / "second.toml", stack.programs[name]
        config.write_text(tomli_w.dumps(table), encoding="utf-8")
        command = [str(config) if word == str(config_file) else word for word in program.command]
        assert str(config) in command, command
        try:
            completed = subprocess.run(
                command, env=dict(program.env), capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"the second process of {name} still runs after {timeout_s:.0f} s: {error.stderr!r}"
            ) from None
        return completed.returncode, completed.stdout + completed.stderr


def control_status(stack: Stack) -> Mapping[str, Any]:
    """The controller's status; {} if it does not answer."""
    transport = SocketTransport(stack.endpoints.controller)
    try:
        return transport.call("status", {}, timeout_s=5.0)[0]
    except RoostreamError:
        return {}
    finally:
        transport.close()
