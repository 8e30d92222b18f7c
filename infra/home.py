"""The home folder of a stack: its sub-folders, its lock, and `stack.json`, which tells other commands what
runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from roostream.errors import SetupError
from roostream.runtime.store_identity import IDENTITY_NAME, IdentifiedStore, init_store, open_checkpoint_store

FORMAT = 1
FOLDERS = ("conf", "logs", "run", "store", "tmp")
_UNUSABLE = re.compile(r"""[:,|"\\\x00-\x1f\x7f\udc80-\udcff]|\$\{""")
_LOCK_TRIES, _LOCK_WAIT_S = 5, 0.05
_STORE_FOLDERS = ("manifests", "incarnations", "schemas")
"""Each store that was ever used has one of these."""


class Home:
    """Paths of a home folder. `make` creates the sub-folders, `open_store` the checkpoint store."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(os.path.expanduser(root)))  # unlike Path's, these raise nothing
        self.conf, self.logs, self.run, self.store, self.tmp = (self.root / f for f in FOLDERS)
        self.stack_json = self.root / "stack.json"
        self._lock: IO[str] | None = None

    @property
    def option(self) -> str:
        """`--home …` as a shell needs it, for messages."""
        return f"--home {shlex.quote(str(self.root))}"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def check_path(self) -> None:
        """Raise SetupError if a program of a stack would misread the path of this home."""
        if found := _UNUSABLE.search(str(self.root)):
            raise SetupError(
                f"expected a home without {found[0]!r} in its path, which Java, Flink, Kafka or Redis would "
                f"misread, got {str(self.root)!r}; choose another --home"
            )

    def make(self) -> None:
        """Create the folders except `store`. Raises SetupError if that fails."""
        try:
            for folder in (self.conf, self.logs, self.run, self.tmp):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"home {self.root} can't be created: {error.strerror}; choose another --home"
            ) from None

    def open_store(self) -> IdentifiedStore:
        """Open the checkpoint store, and create it at the first use of this home.

        Raises:
            SetupError: the home has rows of shards but no store, for example because the store's volume is
                not mounted. Nothing was created.
            UnavailableError: the store cannot be read or written.
        """
        is_used = any((self.store / folder).is_dir() for folder in _STORE_FOLDERS)
        if (
            not is_used
            and not (self.store / IDENTITY_NAME).exists()
            and any(self.root.glob("shard-*/segments"))
        ):
            raise SetupError(
                f"expected the checkpoint store of the rows in {self.root} in {self.store}, got an empty or "
                "missing folder; mount its volume or put it back from a backup, or start over with "
                "`roostream reset`"
            )
        init_store(self.store)
        return open_checkpoint_store(self.store)

    def lock(self) -> None:
        """Lock this home for one supervisor until `unlock` or the end of the process.

        Raises:
            SetupError: another supervisor has locked it.
        """
        for _ in range(_LOCK_TRIES):
            self.run.mkdir(parents=True, exist_ok=True)
            file = (self.run / "lock").open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_lock(file):
                    break
                file.close()  # a `reset` has deleted it meanwhile
            except BlockingIOError:  # perhaps `is_locked` of a `status`, which holds it for microseconds
                file.close()
                time.sleep(_LOCK_WAIT_S)
        else:
            raise SetupError(
                f"a stack already runs in {self.root} (process {self._holder() or '?'}); "
                f"`roostream down {self.option}` stops it, another --home starts a second one"
            )
        with contextlib.suppress(OSError):  # `reset` must be able to clear a full disk
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        self._lock = file

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock during the block, so that no stack starts meanwhile. Raises SetupError as `lock`."""
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def unlock(self) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock.fileno(), 0)
            self._lock.close()
            self._lock = None

    def is_locked(self) -> bool:
        """Whether a supervisor has locked this home. Raises SetupError: that cannot be seen."""
        try:
            file = (self.run / "lock").open("rb")  # also on a read-only mount
        except FileNotFoundError:
            return False
        except OSError as error:
            raise SetupError(
                f"{self.run / 'lock'} can't be opened ({error.strerror}), so a stack may run there; use the "
                "account of the stack, or another --home"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _is_lock(self, file: IO[str]) -> bool:
        """Whether other processes find this file at the path of the lock."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.run / "lock"))
        except FileNotFoundError:
            return False

    def _holder(self) -> int | None:
        """The process that has locked this home; None = it has not said so yet."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.run / "lock").read_text(encoding="utf-8"))
        return None

    def clear_tmp(self) -> None:
        """Delete the temporary files of the stack's programs. Call with the lock held and no program
        running."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir(mode=0o700, exist_ok=True)

    def write_stack(self, stack: dict[str, Any]) -> None:
        temporary = self.stack_json.with_suffix(".json.new")
        temporary.write_text(json.dumps({"format": FORMAT, **stack}, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.stack_json)

    def read_stack(self) -> dict[str, Any] | None:
        """The content of `stack.json`; None if it is missing, or is not one. Raises SetupError: it cannot be
        read, so a stack may be there."""
        try:
            stack = json.loads(self.stack_json.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise SetupError(
                f"{self.stack_json} can't be read ({error.strerror}), so a stack may run there; use the "
                "account of the stack, or another --home"
            ) from None
        return stack if isinstance(stack, dict) and stack.get("format") == FORMAT else None

    def running_stack(self) -> dict[str, Any]:
        """`stack.json` of a running stack.

        Raises:
            SetupError: the home does not exist, or no stack runs in it.
        """
        if not self.root.is_dir():
            raise SetupError(f"home {self.root} does not exist; `roostream up {self.option}` creates it")
        stack = self.read_stack()
        if stack is None or not self.is_locked():
            raise SetupError(f"no stack runs in {self.root}; start one with `roostream up {self.option}`")
        holder = self._holder()
        if holder != stack.get("supervisor_pid"):  # that of an earlier stack: another program may have it now
            raise SetupError(
                f"process {holder or '?'} uses {self.root}, and no stack runs there; wait until it has "
                "ended, or until its stack has started"
            )
        return stack

    def end_leftovers(self, timeout_s: float = 8.0) -> list[int]:
        """Stop the children that a killed supervisor left behind; returns their pids. Call with the lock
        held.

        Only processes whose command line contains a path of this home are stopped.
        """
        stack = self.read_stack() or {}
        pids = [int(p["pid"]) for p in stack.get("programs", {}).values() if p.get("pid")]
        pids_here = [p for p in pids if self._belongs_here(p)]
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 2.0)):
            left = [p for p in pids_here if self._belongs_here(p)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline_s = time.monotonic() + wait_s
            while any(self._belongs_here(p) for p in left) and time.monotonic() < deadline_s:
                time.sleep(0.1)
        return pids_here

    def _belongs_here(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return f"{self.root}/".encode() in command
