"""The join over serialized state, one call per event or timer, as Flink's operator makes them; without Flink.

A defect that makes a call raise costs its event or its request, not the job (docs/decisions/0016).
"""

from __future__ import annotations

import logging

from joiner.join import INTERNAL_ERROR, FailedRequest, Join, StepResult
from joiner.outputs import dead_event
from joiner.state import ByteMap, Engagement, Impression, SerializedState
from roostream.errors import RoostreamError

log = logging.getLogger("roostream.joiner")
MAX_FAILED_CALLS = 100
"""This many failed calls in a row end the job."""
_CALLS_PER_FAILURE = 10


class KeyedJoin:
    """One instance per subtask. `store` holds the entries of the current key.

    Errors of the store and of schemas (RoostreamError) are raised: a restart may repair them, and the record
    is not their cause. All other errors cost the event, or the request that was due, with a dead letter
    `internal_error`. The last one is raised after MAX_FAILED_CALLS in a row, or if more than one of ten calls
    fails over a longer time: then the defect affects everything, and dead letters would empty the topics.
    """

    def __init__(self, join: Join, store: ByteMap) -> None:
        self.join, self.state = join, SerializedState(store)
        self._debt = 0  # a failed call adds _CALLS_PER_FAILURE, any other removes 1

    def apply(self, key: bytes, event: Impression | Engagement, watermark_ms: int) -> StepResult:
        """As `Join.apply`; the changed entries are written."""
        self.state.reset()
        try:
            step = self.join.apply(self.state, key, event, watermark_ms)
        except RoostreamError:
            raise
        except Exception as failed:
            error, origin = _cause(failed), event.origin
            self._failed(error, f"{origin.topic}[{origin.partition}]@{origin.offset}")
            self.state.reset()
            output = dead_event(key, event, INTERNAL_ERROR, _text(error))
            return StepResult(self.state, key, watermark_ms, [output])
        return self._finish(step)

    def advance(self, key: bytes, timer_ms: int, watermark_ms: int) -> StepResult:
        """As `Join.advance`; the changed entries are written. A request whose step fails is removed, then
        the others that are due at this time are processed."""
        outputs, phase_changes = [], []
        while True:  # each round removes a request, or `_failed` raises
            self.state.reset()
            try:
                step = self.join.advance(self.state, key, timer_ms, watermark_ms)
            except FailedRequest as failed:
                error = _cause(failed)
                self._failed(error, f"request {failed.request_id!r} at {timer_ms}")
                self.state.reset()
                removed = self.join.remove_failed(
                    self.state, key, failed.request_id, watermark_ms, _text(error)
                )
                self.state.flush()
                outputs += removed.outputs
                phase_changes += removed.phase_changes
                continue
            step.outputs[:0] = outputs
            step.phase_changes += phase_changes
            return self._finish(step)

    def _finish(self, step: StepResult) -> StepResult:
        self.state.flush()
        self._debt = max(0, self._debt - 1)
        return step

    def _failed(self, error: BaseException, where: str) -> None:
        self._debt += _CALLS_PER_FAILURE
        if self._debt >= _CALLS_PER_FAILURE * MAX_FAILED_CALLS:
            log.error("too many calls of the join failed, the last one for %s; the job ends", where)
            raise error
        log.error("the join failed for %s; it becomes a dead letter", where, exc_info=error)


def _text(error: BaseException) -> str:
    return f"the joiner failed: {error!r}"[:512]


def _cause(error: Exception) -> BaseException:
    return error.__cause__ or error if isinstance(error, FailedRequest) else error
