"""Pushes in a background thread: the loop queues them and continues; the thread makes them in order."""

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
    """`Rows` whose pushes return at once.

    A pull from here sees every push that was queued before it; a pull from `rows` sees the acknowledged
    pushes. `changed` is notified of every acknowledgment and failure.

    **If a push fails**, no later push is made, and every later call raises the same error, until `forget`."""

    def __init__(self, rows: Rows, stages: StageTimer) -> None:
        self.rows, self.stages = rows, stages
        self.changed = threading.Condition()
        self.pushing = ""  # offsets of the chunk in training, for the notes of a failed push
        self.num_queued = self.num_acknowledged = 0
        self._executor = ThreadPoolExecutor(1, "push")
        self._in_flight: deque[Lookup] = deque()
        self._error: BaseException | None = None

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.forget()
        self.rows.set_incarnation(incarnation, workers, owners)

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        self.wait()
        return self.rows.pull(lookup)

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        """Queue a push. `gradients` may not be changed until it is made."""
        with self.changed:
            self._check()
            self.num_queued += 1
            self._in_flight.append(lookup)
        self._executor.submit(self._push, lookup, gradients, times, self.pushing)

    def save(self) -> None:
        self.wait()
        self.rows.save()

    def wait(self, max_in_flight: int = 0) -> None:
        """Wait until at most `max_in_flight` pushes are unacknowledged. Raises UnavailableError: a push
        failed; its note names the offsets."""
        with self.stages("push"), self.changed:
            self.changed.wait_for(lambda: self._error is not None or len(self._in_flight) <= max_in_flight)
            self._check()

    def check(self) -> None:
        """Raise the error of a failed push."""
        with self.changed:
            self._check()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def in_flight(self) -> list[Lookup]:
        """Unacknowledged pushes, oldest first. Hold `changed`."""
        return list(self._in_flight)

    def forget(self) -> None:
        """The rows are being restored: drop queued pushes. No push is in flight when this returns."""
        with self.changed:
            self._error = self._error or RuntimeError("queued pushes are being dropped")
        self._executor.submit(lambda: None).result()
        with self.changed:
            self._in_flight.clear()
            self._error, self.num_acknowledged = None, self.num_queued

    def close(self) -> None:
        """End the thread and drop queued pushes. Idempotent."""
        self._executor.shutdown(cancel_futures=True)

    def _push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes, of: str) -> None:
        if self._error is not None:
            return
        try:
            with self.stages("push"):
                self.rows.push(lookup, gradients, times)
        except BaseException as error:
            error.add_note(f"in the push of {of}")
            with self.changed:
                self._error = self._error or error
                self.changed.notify_all()
            return
        with self.changed:
            self._in_flight.popleft()
            self.num_acknowledged += 1
            self.changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
