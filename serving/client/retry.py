"""Retries of the client, without sockets and sleep: `attempts` says what to do next; a sync or async driver
does it.

Every call can be repeated: a rank request has its request id, engagements their event ids, and the joiner
counts each once.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from roostream.errors import RoostreamError, printable


class ServingError(RoostreamError):
    """A call without an answer, or with an error answer. `str()` is the sentence of serving's answer.

    `status` is the HTTP status, 0 without an answer. `code` is one word: serving's own, `unreachable`,
    `timeout`, `bad_fields` (nothing was sent), or `http_<status>` of a proxy. `path` is the invalid field, or
    "". `call_id` is the answer's `X-Request-Id`, which serving's log has as well.
    """

    def __init__(self, status: int, code: str, message: str, *, path: str = "", call_id: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.path, self.call_id = status, code, message, path, call_id

    def __str__(self) -> str:
        at = f" (at {self.path})" if self.path else ""
        return f"{self.status or self.code}: {super().__str__()}{at}"


AGAIN = frozenset({0, 408, 429, 502, 503, 504})
ONCE_MORE = frozenset({500})  # a defect may affect only one of several processes
DEADLINE_HEADER = "x-deadline-ms"
_MAX_SHOWN = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Deadlines and pauses. Times are for a whole call with all attempts and pauses."""

    deadline_ms: int = 5000  # for calls that give none: long enough to retry after a `retry-after` of 1 s
    retries: int = 3  # after the first attempt; 0 = never
    first_s: float = 0.05  # pause before the first retry; each later one is twice as long
    max_s: float = 2.0
    draw: Callable[[], float] = random.random  # jitter, in [0, 1)

    def pause_s(self, attempt: int, asked_s: float) -> float:
        """Pause before the retry after try number `attempt`: at least what the server requests, with
        jitter."""
        jitter = 0.5 + self.draw() / 2
        return max(asked_s * (1 + self.draw() / 4), min(self.first_s * 2**attempt, self.max_s) * jitter)


class Call(NamedTuple):
    """An HTTP request."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    expects: frozenset[int] = frozenset({200})  # status codes of a valid answer


class Reply(NamedTuple):
    """An HTTP answer. With `status` 0 there is none, and `body` is the reason as text."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after_s(self) -> float:
        """Return 0 if the header is absent or a date."""
        stated = self.headers.get("retry-after", "")
        return float(stated) if stated.isdecimal() else 0.0


class Send(NamedTuple):
    """Send this call now; it may take `remaining_s`."""

    call: Call
    remaining_s: float


class Pause(NamedTuple):
    """Wait before the next try."""

    seconds: float


Attempts = Generator[Send | Pause, Reply | None, Reply]


def attempts(call: Call, policy: RetryPolicy, deadline_ms: int, now_s: Callable[[], float]) -> Attempts:
    """Yield what to do next; the driver sends back a Reply for each Send. Return the reply whose status the
    call expects.

    1 send, with the remaining deadline in a header
    2 an error that a retry cannot change is final
    3 pause; if the deadline would pass during the pause, the error is final

    Raises:
        ServingError: the final error.
    """
    until_s = now_s() + deadline_ms / 1000
    for attempt in range(policy.retries + 1):
        remaining_s = max(until_s - now_s(), 0.001)
        headers = (*call.headers, (DEADLINE_HEADER, str(max(int(remaining_s * 1000), 1))))
        answer = yield Send(call._replace(headers=headers), remaining_s)
        assert answer is not None
        reply = answer
        if reply.status in call.expects:
            return reply
        may_help = reply.status in AGAIN or (reply.status in ONCE_MORE and attempt == 0)
        pause_s = policy.pause_s(attempt, reply.retry_after_s)
        if not may_help or attempt == policy.retries or now_s() + pause_s >= until_s:
            break
        yield Pause(pause_s)
    raise error_of(reply)


def error_of(reply: Reply) -> ServingError:
    """The error of an answer of serving, of a proxy, or of a missing answer."""
    if reply.status == 0:
        text = reply.body.decode()
        return ServingError(
            0, "timeout" if "imeout" in text else "unreachable", f"serving did not answer: {text}"
        )
    call_id = reply.headers.get("x-request-id", "")
    fault = _fault(reply.body)
    if fault is None:
        text = printable(reply.body[:_MAX_SHOWN].decode(errors="replace")) or "no body"
        return ServingError(
            reply.status,
            f"http_{reply.status}",
            f"expected an answer of serving, got {text}",
            call_id=call_id,
        )
    path = str(fault.get("path", ""))
    return ServingError(reply.status, str(fault["code"]), str(fault["message"]), path=path, call_id=call_id)


def _fault(body: bytes) -> dict[str, Any] | None:
    try:
        fault = json.loads(body)["error"]
        return fault if isinstance(fault, dict) and {"code", "message"} <= set(fault) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
