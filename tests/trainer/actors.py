"""Processes that wait for each other, one at a time and in a chosen order: threads of which only one ever
runs, and what their workers sum by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from roostream.errors import TransportError, UnavailableError
from roostream.runtime.clock import Clock
from trainer.process_group import GroupSpec, SingleWorkerGroup

MAX_WAIT_S = 5.0  # of a sum or a push for the other workers, in the simulation's time


class Killed(BaseException):
    """Unwinds the process that died; nothing in it catches this."""


class _Strand:
    """A thread that runs acts, one after the other, each when it is let go; `idle` has those that have
    none."""

    idle: ClassVar[list[_Strand]] = []

    def __init__(self) -> None:
        self.actor: Actor | None = None
        self.act: Callable[[], object] = lambda: None
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        threading.Thread(target=self._run, daemon=True).start()

    def switch(self) -> None:
        """Let it run until its act ends or pauses."""
        self.go.release()
        self.back.acquire()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            assert self.actor is not None
            Actor.running.actor = self.actor
            self.actor.run(self.act)
            self.idle.append(self)
            self.back.release()


class Actor:
    """Acts of one process, each run until it ends or pauses; whoever called `do` or `go_on` waits
    meanwhile."""

    running = threading.local()

    def __init__(self) -> None:
        self.busy = False  # an act has paused
        self.is_running = False
        self.is_dead = False
        self._error: BaseException | None = None
        self.strand: _Strand | None = None

    def do(self, act: Callable[[], object]) -> None:
        """Begin an act. Raises what it raises, but Killed."""
        assert not self.busy and not self.is_dead
        self.strand = _Strand.idle.pop() if _Strand.idle else _Strand()
        self.strand.actor, self.strand.act = self, act
        self._switch()

    def go_on(self) -> None:
        """With the act that has paused. Raises as `do`."""
        assert self.busy
        self._switch()

    def kill(self) -> None:
        """Its paused act ends where it is."""
        self.is_dead = True
        if self.busy:
            self._switch()

    @classmethod
    def pause(cls) -> None:
        """Of the act that is running: let others run.

        Raises:
            Killed: they killed this one.
            TransportError: nobody is there who could wait (a copy of a message that came late).
        """
        actor: Actor | None = getattr(cls.running, "actor", None)
        if actor is None:
            raise TransportError("nobody waits for this answer")
        strand = actor.strand
        assert strand is not None
        actor.busy = True
        strand.back.release()
        strand.go.acquire()
        actor.busy = False
        if actor.is_dead:
            raise Killed

    def run(self, act: Callable[[], object]) -> None:
        """In the strand's thread."""
        try:
            act()
        except Killed:
            pass
        except BaseException as error:
            self._error = error

    def _switch(self) -> None:
        strand = self.strand
        assert strand is not None
        self.is_running = True
        strand.switch()
        self.is_running = False
        error, self._error = self._error, None
        if error is not None:
            raise error


def wait_until(is_done: Callable[[], bool], clock: Clock, what: str) -> None:
    """Pause until it is. Raises UnavailableError: it isn't for MAX_WAIT_S."""
    ends_s = clock.monotonic_s() + MAX_WAIT_S
    while not is_done():
        if clock.monotonic_s() >= ends_s:
            raise UnavailableError(f"{what} did not come")
        Actor.pause()


class Hall:
    """Where the workers of a simulation sum. `tears(name)`: does this worker, of those who were given a sum,
    see an error instead, since another one went away meanwhile? `hears(worker, other)`: does what the other
    tells arrive at this worker?"""

    def __init__(
        self,
        clock: Clock,
        tears: Callable[[str], bool] = lambda worker: False,
        hears: Callable[[int, int], bool] = lambda worker, other: True,
    ) -> None:
        self.clock, self.tears, self.hears = clock, tears, hears
        self.posted: dict[tuple[str, int], dict[int, Any]] = {}
        self.members: dict[tuple[str, int], HallReduction] = {}
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

    def join(self, meeting: GroupSpec) -> SingleWorkerGroup | HallReduction:
        return SingleWorkerGroup() if meeting.workers == 1 else HallReduction(self.hall, meeting)


class HallReduction:
    """See `Reduction`, which adds in the order of workers."""

    def __init__(self, hall: Hall, meeting: GroupSpec) -> None:
        self.hall, self.name = hall, f"{meeting.incarnation}{meeting.purpose}"
        self.index, self.workers = meeting.worker, meeting.workers
        self.left = self.interrupted = False
        self._num = 0
        hall.members[self.name, meeting.worker] = self

    def sum(self, bucket_N: Tensor) -> None:
        posted = self._all_told(bucket_N.clone())
        assert len({len(part_N) for part_N in posted.values()}) == 1, "the workers are not in step"
        bucket_N.copy_(sum(posted[index] for index in sorted(posted)))  # type: ignore[arg-type]
        self.hall.num_sums += 1

    def _all_told(self, mine: Any) -> Mapping[int, Any]:
        """What each worker gave for this turn."""
        if self.left:
            raise UnavailableError("this worker has left the others")
        at = self.name, self._num
        self._num += 1
        posted = self.hall.posted.setdefault(at, {})
        assert self.index not in posted
        posted[self.index] = mine
        wait_until(
            lambda: self._has_all(posted) or self._is_over(), self.hall.clock, "the other workers' part"
        )
        if not self._has_all(posted) or (self._someone_is_gone() and self.hall.tears(f"worker {self.index}")):
            self.leave()
            raise UnavailableError("interrupted" if self.interrupted else "another worker is gone")
        self.hall.posted.pop((at[0], at[1] - 2), None)
        return posted

    def interrupt(self) -> None:
        self.interrupted = True

    def leave(self) -> None:
        self.left = True

    def _has_all(self, posted: Mapping[int, Any]) -> bool:
        return len(posted) == self.workers and all(
            other == self.index or self.hall.hears(self.index, other) for other in posted
        )

    def _is_over(self) -> bool:
        return self.interrupted or self._someone_is_gone()

    def _someone_is_gone(self) -> bool:
        """That this worker hears of."""
        its = {i: r for (name, i), r in self.hall.members.items() if name == self.name and r.left}
        return any(other == self.index or self.hall.hears(self.index, other) for other in its)
