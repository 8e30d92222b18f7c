"""Limits log lines that clients can trigger, or that an outage repeats, to one a minute per kind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

EVERY_S = 60.0
MAX_KINDS = 256


class LogRateLimit:
    """Thread-safe; remembers at most MAX_KINDS kinds."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._lock = threading.Lock()
        # kind → (time of the last line, number of lines suppressed since)
        self._last: dict[Hashable, tuple[float, int]] = {}

    def due(self, kind: Hashable) -> int | None:
        """Return None to suppress a line, else the number of lines of this kind that were suppressed since
        the last one."""
        now_s = self.now_s()
        with self._lock:
            last_s, suppressed = self._last.pop(kind, (-EVERY_S, 0))
            is_due = now_s - last_s >= EVERY_S
            self._last[kind] = (now_s, 0) if is_due else (last_s, suppressed + 1)
            if len(self._last) > MAX_KINDS:
                del self._last[next(iter(self._last))]
        return suppressed if is_due else None

    def warning(self, logger: logging.Logger, kind: Hashable, message: str, *values: object) -> None:
        """Log a warning unless it must be suppressed; the next one of its kind says how many were."""
        suppressed = self.due(kind)
        if suppressed is not None:
            text = f"{message}%s"
            logger.warning(text, *values, and_more(suppressed))

    def over(self, kind: Hashable) -> bool:
        """The cause of this kind is gone, so its next line is due at once. Return whether a line of it was
        logged."""
        with self._lock:
            return self._last.pop(kind, None) is not None


class LogRateLimitFilter(logging.Filter):
    """For the logger of a library; the kind is the message before formatting."""

    def __init__(self, log_rate_limit: LogRateLimit) -> None:
        super().__init__()
        self.log_rate_limit = log_rate_limit

    def filter(self, record: logging.LogRecord) -> bool:
        suppressed = self.log_rate_limit.due(record.msg)
        if suppressed:
            record.msg = f"{record.msg}{and_more(suppressed)}"
        return suppressed is not None


def and_more(suppressed: int) -> str:
    """The end of a line after suppressed ones; "" if there were none."""
    return f" (and {suppressed} more like it since the last such line)" if suppressed else ""


def error_kind(error: BaseException) -> Hashable:
    """Errors that are raised at the same source location are of one kind."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = (at.tb_frame.f_code.co_filename, at.tb_lineno) if at is not None else ()
    return (type(error).__name__, *where)
