"""Sums over all workers of a step: what makes W workers one.

Every worker gives a bucket of the same size in the same order, and all get the same sum, bit for bit. There is no other
membership than the controller's: who meets is said by RESTORE, and the meeting's name is its incarnation.

    RESTORE (workers, meet) ──► Reduction ──► first sum: all meet ──► sum, sum, … ──► left, or broken: everyone is restored

torch's process groups are used alone, without the global default group, whose set-up imports half of torch, and without objects,
which are pickled.
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from roostream.errors import UnavailableError
from roostream.runtime.address import parse_address
from trainer.all_to_all import AllToAll

_SLICE_S = 0.05  # a wait looks so often whether it was interrupted
_STORE_S = 5.0  # one call of the rendezvous
_REACH_S = 1.0  # one attempt to reach it, which nothing ends from outside
_ERRORS = (
    RuntimeError,
    OSError,
    ValueError,
    TimeoutError,
)  # as torch tells a peer that is gone: all of them RuntimeErrors so far


class GroupSpec(NamedTuple):
    """Who sums together, as RESTORE says it."""

    incarnation: int
    worker: int  # which of them this one is
    workers: int
    address: str  # where worker 0 listens; "" for a worker alone
    about: str = ""  # what the meeting is for, where a worker has several


class Reduction(Protocol):
    """Of one incarnation. The loop's thread calls it, but `interrupt`."""

    index: int
    workers: int

    def sum(self, bucket_N: Tensor) -> None:
        """In place: float64 [N], of all workers added up. Waits for all of them.

        Raises:
            UnavailableError: one is gone or too late, or this was interrupted; everyone must be restored.
        """

    def interrupt(self) -> None:
        """Whoever waits, now or later, gets UnavailableError. Any thread; idempotent."""

    def leave(self) -> None:
        """Nothing more is summed: the others are told at once. Idempotent."""


class SingleWorkerGroup:
    """See `Reduction` and `param_server.row_exchange.Peers`. Of one worker: nothing is sent anywhere."""

    index, workers = 0, 1

    def all_to_all(self, parts: Sequence[np.ndarray], about: str) -> list[np.ndarray]:
        return list(parts)

    def sum(self, bucket_N: Tensor) -> None:
        """It is its sum."""

    def interrupt(self) -> None:
        """Nobody is waited for."""

    def leave(self) -> None:
        """Nobody is told."""


class Rendezvous(Protocol):
    """How a worker's process sums with others'."""

    address: str  # where it can be met; "" nowhere

    def join(self, meeting: GroupSpec) -> Reduction:
        """Of that incarnation; nobody is waited for yet.

        Raises:
            UnavailableError: this process sums with nobody.
        """


class SingleWorkerRendezvous:
    """See `Team`: of a process that is always alone."""

    address = ""

    def join(self, meeting: GroupSpec) -> Reduction:
        if meeting.workers != 1:
            raise UnavailableError(f"expected to train alone, got {meeting.workers} workers")
        return SingleWorkerGroup()


SINGLE_WORKER = SingleWorkerRendezvous()


class TorchRendezvous:
    """See `Team`: by torch's process groups. A port, bound before anybody is told of it and kept from one incarnation to the
    next, at which worker 0 is met. Who it sums with reaches it by the same host."""

    def __init__(self, listen: str, *, device: str, timeout_s: float) -> None:
        """Raises UnavailableError: the port is taken."""
        self.host, port = parse_address(listen)
        self.device, self.timeout_s = device, timeout_s
        try:
            self._listener = socket.create_server((self.host, port), family=_family(self.host), backlog=128)
        except OSError as error:
            raise UnavailableError(
                f"{listen} can't be listened on: {error}; choose another one, or port 0"
            ) from None
        self.address = f"{self.host}:{self._listener.getsockname()[1]}"
        self._store: c10d.TCPStore | None = None

    def join(self, meeting: GroupSpec) -> SingleWorkerGroup | TorchProcessGroup:
        return SingleWorkerGroup() if meeting.workers == 1 else TorchProcessGroup(meeting, self)

    def store(self) -> c10d.TCPStore:
        """The key-value store behind the port; begun with the first call."""
        if self._store is None:
            port = self._listener.getsockname()[1]
            fd = self._listener.detach()
            self._store = _open_store(self.host, port, is_master=True, master_listen_fd=fd)
        return self._store

    def close(self) -> None:
        """Idempotent; reductions may outlive it."""
        self._listener.close()
        self._store = None


class TorchProcessGroup:
    """See `Reduction`. A process group of torch: gloo, or NCCL where the buckets are on CUDA. Where it is gloo, also `Peers` of
    `param_server.row_exchange`: which of the two a meeting is for, all of it is."""

    def __init__(self, meeting: GroupSpec, place: TorchRendezvous) -> None:
        """`place`: of this process."""
        self.meeting, self.place, self.timeout_s = meeting, place, place.timeout_s
        self.index, self.workers = meeting.worker, meeting.workers
        self._swaps = AllToAll(self.index, self.workers, self._exchange)
        self._interrupted = threading.Event()
        self._group: Any = None
        self._left = ""
        self._options = c10d.AllreduceOptions()
        self._options.reduceOp = c10d.ReduceOp.SUM
        self._options.timeout = _span(self.timeout_s)

    def sum(self, bucket_N: Tensor) -> None:
        self._together(lambda group: self._wait(group.allreduce([bucket_N], self._options)))

    def all_to_all(self, parts: Sequence[np.ndarray], about: str) -> list[np.ndarray]:
        """See `trainer.all_to_all.Swaps`. Raises as `sum`."""
        return self._swaps.swap(parts, about)

    def _exchange(
        self, got: np.ndarray, sent: np.ndarray, sizes_got: list[int], sizes_sent: list[int]
    ) -> None:
        into, of = torch.from_numpy(got), torch.from_numpy(sent)
        self._together(lambda group: self._wait(group.alltoall_base(into, of, sizes_got, sizes_sent)))

    def _together(self, do: Callable[[Any], None]) -> None:
        if self._left:
            raise UnavailableError(f"this worker has left the others ({self._left}); waiting for RESTORE")
        try:
            if self._group is None:
                self._group = self._meet()
            return do(self._group)
        except _ERRORS as error:
            why = str(error).split("\n")[0][:200]
            told = f"the other workers can't be summed with: {why}"
        except UnavailableError as error:
            why = told = str(error)
        self._leave(
            why
        )  # behind the handlers: an error's frames hold the group, and whoever lets go of it last waits for it
        raise UnavailableError(told)

    def interrupt(self) -> None:
        self._interrupted.set()

    def leave(self) -> None:
        self._leave("asked to")

    def _wait(self, work: Any) -> None:
        """Woken when it is done; looked at in between, since nothing ends a wait of gloo from outside."""

        def done() -> bool:
            try:
                return bool(work.wait(_span(_SLICE_S)))
            except RuntimeError:
                return bool(work.is_completed() and work.wait(_span(_SLICE_S)))  # raises its own error

        self._until(done, "the other workers' part of a step")

    def _until(self, done: Callable[[], bool], what: str, pause_s: float = 0.0) -> None:
        ends_s = time.monotonic() + self.timeout_s
        while not done():
            if self._interrupted.is_set():
                raise UnavailableError(f"interrupted while waiting for {what}")
            if time.monotonic() >= ends_s:
                raise UnavailableError(f"{what} did not come for {self.timeout_s:g} s")
            time.sleep(pause_s)

    def _meet(self) -> Any:
        """All must have come before a group is made, whose making can't be interrupted."""
        store = c10d.PrefixStore(f"{self.meeting.incarnation}{self.meeting.about}", self._open())
        store.set(f"here {self.index}", "")
        everyone = [f"here {index}" for index in range(self.workers)]
        self._until(
            lambda: bool(store.check(everyone)), f"{self.workers} workers at {self.meeting.address}", 0.02
        )
        if self.place.device.startswith("cuda"):
            nccl: Any = c10d.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = _span(self.timeout_s)
            return nccl(store, self.index, self.workers, options)
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _span(self.timeout_s)
        options._devices = [gloo.create_device(hostname=self.place.host, lazy_init=False)]
        return gloo(store, self.index, self.workers, options)

    def _open(self) -> c10d.TCPStore:
        if self.index == 0:
            return self.place.store()
        found: list[c10d.TCPStore] = []

        def reach() -> bool:
            try:
                found.append(_open_store(*parse_address(self.meeting.address), is_master=False))
            except RuntimeError:
                return False
            return True

        self._until(reach, f"worker 0 at {self.meeting.address}", 0.1)
        return found[0]

    def _leave(self, why: str) -> None:
        """A group with an operation under way is closed by a thread: that takes until the operation's own time limit."""
        self._left = self._left or why
        last, self._group = [self._group], None
        if last != [None]:
            threading.Thread(target=last.clear, name="reduction-close", daemon=True).start()


def _open_store(host: str, port: int, *, is_master: bool, **more: Any) -> c10d.TCPStore:
    store = c10d.TCPStore(
        host.strip("[]"),
        port,
        is_master=is_master,
        timeout=_span(_REACH_S),
        wait_for_workers=False,
        multi_tenant=False,
        **more,
    )
    store.set_timeout(_span(_STORE_S))
    return store


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _span(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
