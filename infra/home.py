"""The home of a stack: its folders, its lock, and `stack.json`, by which other commands find what runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import IO, Any

from roostream.errors import SetupError

FORMAT = 1
FOLDERS = ("conf", "logs", "run", "store", "tmp")


class Home:
    """Paths of a home; opening it makes the folders."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()
        self.conf, self.logs, self.run, self.store, self.tmp = (self.root / f for f in FOLDERS)
        self.stack_json = self.root / "stack.json"
        self._lock: IO[str] | None = None

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def make(self) -> None:
        """Raises SetupError if the folders can't be made."""
        try:
            for folder in (self.conf, self.logs, self.run, self.store, self.tmp):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"home {self.root} can't be made: {error.strerror}; choose another --home"
            ) from None

    def lock(self) -> None:
        """Hold this home for a supervisor until `unlock` or the end of the process.

        Raises:
            SetupError: another supervisor holds it.
        """
        file = (self.run / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "?"
            file.close()
            raise SetupError(
                f"a stack runs already in {self.root} (process {holder}); `roostream down --home {self.root}` ends it, "
                "another --home starts a second one"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._lock = file

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def is_locked(self) -> bool:
        """Whether a supervisor holds this home now."""
        try:
            file = (self.run / "lock").open("r+")
        except OSError:
            return False
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def clear_tmp(self) -> None:
        """Delete all temporary files of the stack's programs. Call with the lock held and none of them running."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir(mode=0o700, exist_ok=True)

    def write_stack(self, stack: dict[str, Any]) -> None:
        temporary = self.stack_json.with_suffix(".json.new")
        temporary.write_text(json.dumps({"format": FORMAT, **stack}, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.stack_json)

    def read_stack(self) -> dict[str, Any] | None:
        """What was last written; None if there is none or it can't be read."""
        try:
            stack = json.loads(self.stack_json.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return stack if isinstance(stack, dict) and stack.get("format") == FORMAT else None

    def running_stack(self) -> dict[str, Any]:
        """`stack.json` of a stack that runs.

        Raises:
            SetupError: there is no such home, or nothing runs in it.
        """
        if not self.root.is_dir():
            raise SetupError(f"there is no home {self.root}; `roostream up --home {self.root}` makes one")
        stack = self.read_stack()
        if stack is None or not self.is_locked():
            raise SetupError(
                f"no stack runs in {self.root}; start one with `roostream up --home {self.root}`"
            )
        return stack

    def end_leftovers(self, timeout_s: float = 8.0) -> list[int]:
        """End children that a killed supervisor left behind; their pids. Call with the lock held.

        A pid counts as ours only if its command line names a path of this home.
        """
        stack = self.read_stack() or {}
        pids = [int(p["pid"]) for p in stack.get("programs", {}).values() if p.get("pid")]
        ours = [p for p in pids if self._is_ours(p)]
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 2.0)):
            left = [p for p in ours if self._is_ours(p)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline_s = time.monotonic() + wait_s
            while any(self._is_ours(p) for p in left) and time.monotonic() < deadline_s:
                time.sleep(0.1)
        return ours

    def _is_ours(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return f"{self.root}/".encode() in command
