"""Pushes made beside training: the loop gives them and goes on, a thread of their own makes them, in their order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from roostream.runtime.bucket_map import BucketMap
from roostream.wire.lookup import Lookup
from trainer.pipeline.stage_timer import StageTimer
from trainer.rows import PushTimes, Rows


class AsyncRows:
    """See `Rows`: those of `beside`, changed a little later. A pull from here sees every push that was given before it; one
    from `beside` sees those that are acknowledged. `changed` is notified of every acknowledgement and failure.

    **If a push fails**, none behind it is made, and every later call raises what it raised, until `forget`."""

    def __init__(self, beside: Rows, stages: StageTimer) -> None:
        self.beside, self.stages = beside, stages
        self.changed = threading.Condition()
        self.pushing = ""  # offsets of the chunk in training: told where its push fails
        self.num_given = self.num_acknowledged = 0
        self._lane = ThreadPoolExecutor(1, "push")
        self._under_way: deque[Lookup] = deque()
        self._error: BaseException | None = None

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.forget()
        self.beside.set_incarnation(incarnation, workers, owners)

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        self.wait()
        return self.beside.pull(lookup)

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        """Returns at once; when it is made, nothing of `gradients` may have been changed."""
        with self.changed:
            self._check()
            self.num_given += 1
            self._under_way.append(lookup)
        self._lane.submit(self._push, lookup, gradients, times, self.pushing)

    def wait(self, most: int = 0) -> None:
        """Until at most so many pushes are still to be acknowledged.

        Raises:
            UnavailableError: one of them failed; its note says of which offsets.
        """
        with self.stages("push"), self.changed:
            self.changed.wait_for(lambda: self._error is not None or len(self._under_way) <= most)
            self._check()

    def check(self) -> None:
        """Raises what a push has raised."""
        with self.changed:
            self._check()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def under_way(self) -> list[Lookup]:
        """What is given and not acknowledged, oldest first. Holding `changed`."""
        return list(self._under_way)

    def forget(self) -> None:
        """The rows are being restored: pushes that haven't begun are not made. No push is under way when it returns."""
        with self.changed:
            self._error = self._error or RuntimeError("pushes are being forgotten")
        self._lane.submit(lambda: None).result()
        with self.changed:
            self._under_way.clear()
            self._error, self.num_acknowledged = None, self.num_given

    def close(self) -> None:
        """Ends the thread; what hasn't begun is not pushed. Idempotent."""
        self._lane.shutdown(cancel_futures=True)

    def _push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes, of: str) -> None:
        if self._error is not None:
            return
        try:
            with self.stages("push"):
                self.beside.push(lookup, gradients, times)
        except BaseException as error:
            error.add_note(f"in the push of {of}")
            with self.changed:
                self._error = self._error or error
                self.changed.notify_all()
            return
        with self.changed:
            self._under_way.popleft()
            self.num_acknowledged += 1
            self.changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
