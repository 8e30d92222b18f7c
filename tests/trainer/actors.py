"""Simulated processes for deterministic tests, and an in-memory all-reduce for their workers.

Each process is an `Actor`: a thread that runs only while the test lets it. Only one thread runs at a time, so
the test decides in which order processes that wait for each other continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from roostream.errors import TransportError, UnavailableError
from roostream.runtime.clock import Clock
from trainer.process_group import GroupSpec, SingleWorkerGroup

MAX_WAIT_S = 5.0  # how long a sum or a push waits for the other workers, in simulated seconds


class Killed(BaseException):
    """Unwinds the stack of a process that was killed. Product code does not catch it."""


class _ActorThread:
    """A reusable thread that runs one action at a time. `idle` holds the threads that have no action."""

    idle: ClassVar[list[_ActorThread]] = []

    def __init__(self) -> None:
        self.actor: Actor | None = None
        self.action: Callable[[], object] = lambda: None
        self.may_run, self.has_paused = threading.Lock(), threading.Lock()
        self.may_run.acquire()
        self.has_paused.acquire()
        threading.Thread(target=self._run, daemon=True).start()

    def switch(self) -> None:
        """Let the thread run until its action ends or pauses."""
        self.may_run.release()
        self.has_paused.acquire()

    def _run(self) -> None:
        while True:
            self.may_run.acquire()
            assert self.actor is not None
            Actor.running.actor = self.actor
            self.actor.run(self.action)
            self.idle.append(self)
            self.has_paused.release()


class Actor:
    """A simulated process. `do` and `resume` return when its action has ended or paused."""

    running = threading.local()

    def __init__(self) -> None:
        self.busy = False  # an action has paused
        self.is_running = False
        self.is_dead = False
        self._error: BaseException | None = None
        self.thread: _ActorThread | None = None

    def do(self, action: Callable[[], object]) -> None:
        """Start an action. Raises the action's exceptions, except Killed."""
        assert not self.busy and not self.is_dead
        self.thread = _ActorThread.idle.pop() if _ActorThread.idle else _ActorThread()
        self.thread.actor, self.thread.action = self, action
        self._switch()

    def resume(self) -> None:
        """Continue the paused action. Raises the action's exceptions, except Killed."""
        assert self.busy
        self._switch()

    def kill(self) -> None:
        """End the process. A paused action raises Killed where it paused."""
        self.is_dead = True
        if self.busy:
            self._switch()

    @classmethod
    def pause(cls) -> None:
        """Pause the running action, so that other processes can run.

        Raises:
            Killed: this process was killed while it was paused.
            TransportError: no actor runs this code, because a delayed copy of a message is being handled.
        """
        actor: Actor | None = getattr(cls.running, "actor", None)
        if actor is None:
            raise TransportError("nobody waits for this answer")
        thread = actor.thread
        assert thread is not None
        actor.busy = True
        thread.has_paused.release()
        thread.may_run.acquire()
        actor.busy = False
        if actor.is_dead:
            raise Killed

    def run(self, action: Callable[[], object]) -> None:
        """Run an action; called in the actor's thread."""
        try:
            action()
        except Killed:
            pass
        except BaseException as error:
            self._error = error

    def _switch(self) -> None:
        thread = self.thread
        assert thread is not None
        self.is_running = True
        thread.switch()
        self.is_running = False
        error, self._error = self._error, None
        if error is not None:
            raise error


def wait_until(is_done: Callable[[], bool], clock: Clock, what: str) -> None:
    """Pause until `is_done()`. Raises UnavailableError after MAX_WAIT_S."""
    ends_s = clock.monotonic_s() + MAX_WAIT_S
    while not is_done():
        if clock.monotonic_s() >= ends_s:
            raise UnavailableError(f"{what} did not come")
        Actor.pause()


class ReductionHub:
    """The shared memory in which the workers of a simulation add up their gradients.

    `is_interrupted(worker)`: whether this worker gets an error instead of a finished sum, after another
    worker died. `can_receive(worker, other)`: whether messages of `other` arrive at `worker`.
    """

    def __init__(
        self,
        clock: Clock,
        is_interrupted: Callable[[str], bool] = lambda worker: False,
        can_receive: Callable[[int, int], bool] = lambda worker, other: True,
    ) -> None:
        self.clock, self.is_interrupted, self.can_receive = clock, is_interrupted, can_receive
        self.posted: dict[tuple[str, int], dict[int, Any]] = {}
        self.members: dict[tuple[str, int], InMemoryProcessGroup] = {}
        self.num_sums = 0

    def worker_died(self, index: int) -> None:
        """Tell the groups of this worker that its process has died."""
        for (_, worker), group in self.members.items():
            if worker == index:
                group.left = True


class InMemoryRendezvous:
    """A `trainer.process_group.Rendezvous` without sockets."""

    def __init__(self, hub: ReductionHub, index: int) -> None:
        self.hub, self.address = hub, f"127.0.0.1:{7000 + index}"

    def join(self, spec: GroupSpec) -> SingleWorkerGroup | InMemoryProcessGroup:
        return SingleWorkerGroup() if spec.workers == 1 else InMemoryProcessGroup(self.hub, spec)


class InMemoryProcessGroup:
    """A `trainer.process_group.ProcessGroup` in memory. It adds in the order of worker indices."""

    def __init__(self, hub: ReductionHub, spec: GroupSpec) -> None:
        self.hub, self.name = hub, f"{spec.incarnation}{spec.purpose}"
        self.index, self.workers = spec.worker, spec.workers
        self.left = self.interrupted = False
        self._num = 0
        hub.members[self.name, spec.worker] = self

    def sum(self, bucket_N: Tensor) -> None:
        posted = self._all_gather(bucket_N.clone())
        assert len({len(part_N) for part_N in posted.values()}) == 1, "the workers are not in step"
        bucket_N.copy_(sum(posted[index] for index in sorted(posted)))  # type: ignore[arg-type]
        self.hub.num_sums += 1

    def _all_gather(self, mine: Any) -> Mapping[int, Any]:
        """Return the value of each worker for the current collective call."""
        if self.left:
            raise UnavailableError("this worker has left the others")
        at = self.name, self._num
        self._num += 1
        posted = self.hub.posted.setdefault(at, {})
        assert self.index not in posted
        posted[self.index] = mine
        wait_until(
            lambda: self._has_all(posted) or self._is_over(), self.hub.clock, "the other workers' part"
        )
        if not self._has_all(posted) or (
            self._someone_is_gone() and self.hub.is_interrupted(f"worker {self.index}")
        ):
            self.leave()
            raise UnavailableError("interrupted" if self.interrupted else "another worker is gone")
        self.hub.posted.pop((at[0], at[1] - 2), None)
        return posted

    def interrupt(self) -> None:
        self.interrupted = True

    def leave(self) -> None:
        self.left = True

    def _has_all(self, posted: Mapping[int, Any]) -> bool:
        return len(posted) == self.workers and all(
            other == self.index or self.hub.can_receive(self.index, other) for other in posted
        )

    def _is_over(self) -> bool:
        return self.interrupted or self._someone_is_gone()

    def _someone_is_gone(self) -> bool:
        """Whether a worker of the group has left, as far as messages reach this worker."""
        left = {i for (name, i), group in self.hub.members.items() if name == self.name and group.left}
        return any(other == self.index or self.hub.can_receive(self.index, other) for other in left)
