"""Collective operations of W workers within one incarnation: gradient sums and, for workers that hold rows,
the group of TorchRec's exchange.

All workers give buffers of the same size in the same order, and all get the same sum, bit for bit. The
controller alone decides who belongs to a group: RESTORE lists the workers, and the group's name is its
incarnation.

    RESTORE (workers, address) ──► ProcessGroup ──► first sum: all connect ──► sum, sum, … ──► leave

torch's process groups are used directly. The global default group is avoided for sums, because its set-up
imports half of torch, and so are object collectives, which use pickle. TorchRec needs the default group.

Letters: N numbers of a bucket.
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import OutOfMemoryError, Tensor
from torch._C import _distributed_c10d as c10d

from roostream.errors import UnavailableError
from roostream.runtime.address import parse_address

_POLL_S = 0.05  # a wait checks this often whether it was interrupted
_STORE_S = 5.0  # time limit of one call of the rendezvous store
_CONNECT_S = 1.0  # time limit of one attempt to connect, which cannot be interrupted
# torch reports a lost peer by one of these; all of them were RuntimeErrors so far.
GROUP_ERRORS = (RuntimeError, OSError, ValueError, TimeoutError)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or a device is out of memory, so that the same batch fails after every restart. torch
    reports it by a RuntimeError, as a lost peer."""
    return isinstance(error, MemoryError | OutOfMemoryError) or "can't allocate memory" in str(error)


class GroupSpec(NamedTuple):
    """The members of a group, as RESTORE lists them."""

    incarnation: int
    worker: int  # index of this worker
    workers: int
    address: str  # rendezvous address of worker 0; "" for a single worker
    purpose: str = ""  # distinguishes several groups of one incarnation


class ProcessGroup(Protocol):
    """A group of one incarnation. The loop's thread calls it, except `interrupt`."""

    index: int
    workers: int

    def sum(self, bucket_N: Tensor) -> None:
        """Add up float64 [N] over all workers, in place. Waits for all of them. Raises UnavailableError: a
        worker is gone or too late, or this was interrupted; all members must be restored."""

    def interrupt(self) -> None:
        """Make every current and later wait raise UnavailableError. Any thread; idempotent."""

    def leave(self) -> None:
        """End the group; the other workers notice at once. Idempotent."""


class SingleWorkerGroup:
    """A `ProcessGroup` of one worker. Nothing is sent."""

    index, workers = 0, 1

    def sum(self, bucket_N: Tensor) -> None: ...

    def interrupt(self) -> None: ...

    def leave(self) -> None: ...


class Rendezvous(Protocol):
    """How a worker's process joins a group."""

    address: str  # where other workers connect; "" if they cannot

    def join(self, spec: GroupSpec) -> ProcessGroup:
        """Create the group without waiting for other workers. Raises UnavailableError: this process cannot
        join any group."""


class SingleWorkerRendezvous:
    """A `Rendezvous` of a process that always trains alone."""

    address = ""

    def join(self, spec: GroupSpec) -> ProcessGroup:
        if spec.workers != 1:
            raise UnavailableError(f"expected to train alone, got {spec.workers} workers")
        return SingleWorkerGroup()


SINGLE_WORKER = SingleWorkerRendezvous()


class TorchRendezvous:
    """A `Rendezvous` for torch's process groups. Worker 0 listens on a port that is bound before it is
    announced and that stays the same over all incarnations."""

    def __init__(self, listen: str, *, device: str, timeout_s: float) -> None:
        """Raises UnavailableError: the port is in use."""
        host, port = parse_address(listen)
        self.host, self.device, self.timeout_s = host.strip("[]"), device, timeout_s
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._listener = socket.create_server((self.host, port), family=family, backlog=128)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {listen}: {error}; choose another address, or port 0"
            ) from None
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.address = f"{name}:{self._listener.getsockname()[1]}"
        self._store: c10d.TCPStore | None = None

    def join(self, spec: GroupSpec) -> SingleWorkerGroup | TorchProcessGroup:
        return SingleWorkerGroup() if spec.workers == 1 else TorchProcessGroup(spec, self)

    def store(self) -> c10d.TCPStore:
        """The key-value store behind the port, started by the first call."""
        if self._store is None:
            port = self._listener.getsockname()[1]
            fd = self._listener.detach()
            self._store = _open_store(self.host, port, is_master=True, master_listen_fd=fd)
        return self._store

    def close(self) -> None:
        """Idempotent. Groups may outlive it."""
        self._listener.close()
        self._store = None


class TorchProcessGroup:
    """A `ProcessGroup` over gloo, or over NCCL if the buckets are on CUDA."""

    def __init__(self, spec: GroupSpec, rendezvous: TorchRendezvous) -> None:
        """`rendezvous`: of this process."""
        self.spec, self.rendezvous, self.timeout_s = spec, rendezvous, rendezvous.timeout_s
        self.index, self.workers = spec.worker, spec.workers
        self._interrupted = threading.Event()
        self._group: Any = None
        self._left = ""
        self._options = c10d.AllreduceOptions()
        self._options.reduceOp = c10d.ReduceOp.SUM
        self._options.timeout = _timedelta(self.timeout_s)

    def sum(self, bucket_N: Tensor) -> None:
        self._collective(lambda group: self._wait(group.allreduce([bucket_N], self._options)))

    def interrupt(self) -> None:
        self._interrupted.set()

    def leave(self) -> None:
        self._leave("asked to")

    def _collective(self, run: Callable[[Any], Any]) -> Any:
        if self._left:
            raise UnavailableError(f"this worker has left the group ({self._left}); waiting for RESTORE")
        try:
            if self._group is None:
                self._group = self._connect()
            return run(self._group)
        except GROUP_ERRORS as error:
            if is_out_of_memory(error):
                raise
            why = str(error).split("\n")[0][:200]
            message = f"the collective operation with the other workers failed: {why}"
        except UnavailableError as error:
            why = message = str(error)
        # Outside the handlers: an error's frames hold the group, and the thread that drops the last reference
        # waits for it.
        self._leave(why)
        raise UnavailableError(message)

    def _wait(self, work: Any) -> None:
        """Wait until `work` is done. It polls for an interrupt, because another thread cannot end a wait of
        gloo."""

        def done() -> bool:
            try:
                return bool(work.wait(_timedelta(_POLL_S)))
            except RuntimeError:
                return bool(work.is_completed() and work.wait(_timedelta(_POLL_S)))  # raises its own error

        self._until(done, "the other workers' part of a step")

    def _until(self, done: Callable[[], bool], what: str, pause_s: float = 0.0) -> None:
        ends_s = time.monotonic() + self.timeout_s
        while not done():
            if self._interrupted.is_set():
                raise UnavailableError(f"interrupted while waiting for {what}")
            if time.monotonic() >= ends_s:
                raise UnavailableError(f"{what} did not come for {self.timeout_s:g} s")
            time.sleep(pause_s)

    def _connect(self) -> Any:
        """Create the group after all workers have arrived, because its creation cannot be interrupted."""
        store = c10d.PrefixStore(f"{self.spec.incarnation}{self.spec.purpose}", self._open())
        store.set(f"here {self.index}", "")
        everyone = [f"here {index}" for index in range(self.workers)]
        self._until(
            lambda: bool(store.check(everyone)), f"{self.workers} workers at {self.spec.address}", 0.02
        )
        return self._create(store)

    def _create(self, store: c10d.Store) -> Any:
        if self.rendezvous.device.startswith("cuda"):
            nccl: Any = c10d.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = _timedelta(self.timeout_s)  # noqa: SLF001 (torch has no public name)
            return nccl(store, self.index, self.workers, options)
        gloo: Any = c10d.ProcessGroupGloo
        # torch has no public names for these options.
        options = gloo._Options()  # noqa: SLF001
        options._timeout = _timedelta(self.timeout_s)  # noqa: SLF001
        device = gloo.create_device(hostname=self.rendezvous.host, lazy_init=False)
        options._devices = [device]  # noqa: SLF001
        return gloo(store, self.index, self.workers, options)

    def _open(self) -> c10d.TCPStore:
        if self.index == 0:
            return self.rendezvous.store()
        opened: list[c10d.TCPStore] = []

        def connect() -> bool:
            try:
                opened.append(_open_store(*parse_address(self.spec.address), is_master=False))
            except RuntimeError:
                return False
            return True

        self._until(connect, f"worker 0 at {self.spec.address}", 0.1)
        return opened[0]

    def _leave(self, why: str) -> None:
        """Close the group in a thread: with an operation under way this takes until the operation's time
        limit."""
        self._left = self._left or why
        last, self._group = [self._group], None
        if last != [None]:
            threading.Thread(target=last.clear, name="reduction-close", daemon=True).start()


def _open_store(host: str, port: int, *, is_master: bool, **more: Any) -> c10d.TCPStore:
    store = c10d.TCPStore(
        host.strip("[]"),
        port,
        is_master=is_master,
        timeout=_timedelta(_CONNECT_S),
        wait_for_workers=False,
        multi_tenant=False,
        **more,
    )
    store.set_timeout(_timedelta(_STORE_S))
    return store


def _timedelta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


class RowGroup(TorchProcessGroup):
    """The workers that hold rows: torch's default group in this process, which TorchRec exchanges rows by.

    TorchRec waits inside its own code, so an interrupt closes the connections of the group."""

    def connect(self) -> Any:
        """The `torch.distributed.ProcessGroup`. The first call waits for all workers. Raises as `sum`."""
        return self._collective(lambda group: group)

    def interrupt(self) -> None:
        super().interrupt()
        self._abort()

    def _leave(self, why: str) -> None:
        self._abort()
        super()._leave(why)

    def _abort(self) -> None:
        """Close the connections, also while the collection still has the group."""
        if (group := self._group) is not None:
            group.abort()

    def _create(self, store: c10d.Store) -> Any:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group(
            "nccl" if self.rendezvous.device.startswith("cuda") else "gloo",
            store=store,
            rank=self.index,
            world_size=self.workers,
            timeout=_timedelta(self.timeout_s),
        )
        return distributed.group.WORLD


class RowHolder(Protocol):
    """Rows that the workers hold themselves: `trainer.torchrec_rows.TorchRecRows`."""

    def meet(self, group: RowGroup) -> None:
        """Set the workers of the next incarnation."""


class DualRendezvous:
    """A `Rendezvous` of workers that hold rows: each incarnation has one group for sums and one for `rows`.
    There are two groups, because a push may run in its own thread beside the sum of the next turn."""

    def __init__(self, rendezvous: TorchRendezvous, rows: RowHolder) -> None:
        self.rendezvous, self.rows, self.address = rendezvous, rows, rendezvous.address

    def join(self, spec: GroupSpec) -> ProcessGroup:
        exchange = RowGroup(spec._replace(purpose=" rows"), self.rendezvous)
        self.rows.meet(exchange)
        return DualProcessGroup(self.rendezvous.join(spec), exchange)


class DualProcessGroup:
    """A `ProcessGroup` that sums by one group; whatever ends one of its two groups ends both."""

    def __init__(self, sums: ProcessGroup, exchange: ProcessGroup) -> None:
        self.sums, self.exchange = sums, exchange
        self.index, self.workers = sums.index, sums.workers

    def sum(self, bucket_N: Tensor) -> None:
        self.sums.sum(bucket_N)

    def interrupt(self) -> None:
        self.sums.interrupt()
        self.exchange.interrupt()

    def leave(self) -> None:
        self.sums.leave()
        self.exchange.leave()
