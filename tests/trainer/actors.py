"""Processes that wait for each other, one at a time and in a chosen order: threads of which only one ever runs, and what their
workers sum by."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from roo.errors import TransportError, UnavailableError
from runtime.clock import Clock
from trainer.reduce import Alone, Meeting, Reduction

MOST_WAIT_S = 5.0  # of a sum or a push for the other workers, in the simulation's time


class Killed(BaseException):
    """Unwinds the process that died; nothing in it catches this."""


class Actor:
    """Acts of one process, each run until it ends or pauses; whoever called `do` or `go_on` waits meanwhile."""

    _running = threading.local()

    def __init__(self) -> None:
        self.busy = False  # an act has paused
        self.is_running = False
        self._dead = False
        self._error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def do(self, act: Callable[[], object]) -> None:
        """Begin an act. Raises what it raises, but Killed."""
        assert not self.busy and not self._dead
        threading.Thread(target=self._run, args=(act,), daemon=True).start()
        self._switch()

    def go_on(self) -> None:
        """With the act that has paused. Raises as `do`."""
        assert self.busy
        self._switch()

    def kill(self) -> None:
        """Its paused act ends where it is."""
        self._dead = True
        if self.busy:
            self._switch()

    @classmethod
    def pause(cls) -> None:
        """Of the act that is running: let others run.

        Raises:
            Killed: they killed this one.
            TransportError: nobody is there who could wait (a copy of a message that came late).
        """
        actor: Actor | None = getattr(cls._running, "actor", None)
        if actor is None:
            raise TransportError("nobody waits for this answer")
        actor.busy = True
        actor._back.release()
        actor._go.acquire()
        actor.busy = False
        if actor._dead:
            raise Killed

    def _switch(self) -> None:
        self.is_running = True
        self._go.release()
        self._back.acquire()
        self.is_running = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, act: Callable[[], object]) -> None:
        self._running.actor = self
        self._go.acquire()
        try:
            act()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        self._back.release()


def wait_until(is_done: Callable[[], bool], clock: Clock, what: str) -> None:
    """Pause until it is. Raises UnavailableError: it isn't for MOST_WAIT_S."""
    ends_s = clock.monotonic_s() + MOST_WAIT_S
    while not is_done():
        if clock.monotonic_s() >= ends_s:
            raise UnavailableError(f"{what} did not come")
        Actor.pause()


class Hall:
    """Where the workers of a simulation sum. `tears(name)`: does this worker, of those who were given a sum, see an error
    instead, since another one went away meanwhile?"""

    def __init__(self, clock: Clock, tears: Callable[[str], bool] = lambda worker: False) -> None:
        self.clock, self.tears = clock, tears
        self.posted: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.members: dict[tuple[int, int], HallReduction] = {}
        self.num_sums = 0

    def away(self, index: int) -> None:
        """The process of this worker is gone: those who sum with it hear of it."""
        for (_, its), reduction in self.members.items():
            if its == index:
                reduction.left = True


class HallTeam:
    """See `Team`."""

    def __init__(self, hall: Hall, index: int) -> None:
        self.hall, self.address = hall, f"127.0.0.1:{7000 + index}"

    def join(self, meeting: Meeting) -> Reduction:
        return Alone() if meeting.workers == 1 else HallReduction(self.hall, meeting)


class HallReduction:
    """See `Reduction`. Adds in the order of workers."""

    def __init__(self, hall: Hall, meeting: Meeting) -> None:
        self.hall, self.meeting = hall, meeting
        self.index, self.workers = meeting.worker, meeting.workers
        self.left = self.interrupted = False
        self._num = 0
        hall.members[meeting.incarnation, meeting.worker] = self

    def sum(self, bucket_N: Tensor) -> None:
        if self.left:
            raise UnavailableError("this worker has left the others")
        at = self.meeting.incarnation, self._num
        self._num += 1
        posted = self.hall.posted.setdefault(at, {})
        assert self.index not in posted
        posted[self.index] = bucket_N.clone()
        wait_until(lambda: len(posted) == self.workers or self._is_over(), self.hall.clock, "the other workers' part")
        assert len({len(part_N) for part_N in posted.values()}) == 1, "the workers are not in step"
        if len(posted) < self.workers or (self._someone_is_gone() and self.hall.tears(f"worker {self.index}")):
            self.leave()
            raise UnavailableError("interrupted" if self.interrupted else "another worker is gone")
        bucket_N.copy_(sum(posted[index] for index in sorted(posted)))  # type: ignore[arg-type]
        self.hall.num_sums += 1
        self.hall.posted.pop((at[0], at[1] - 2), None)

    def interrupt(self) -> None:
        self.interrupted = True

    def leave(self) -> None:
        self.left = True

    def _is_over(self) -> bool:
        return self.interrupted or self._someone_is_gone()

    def _someone_is_gone(self) -> bool:
        its = [r for (incarnation, _), r in self.hall.members.items() if incarnation == self.meeting.incarnation]
        return any(reduction.left for reduction in its)
