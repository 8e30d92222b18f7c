"""The one exception of a call."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from roostream.errors import RoostreamError, printable


class ServingError(RoostreamError):
    """A call that got no answer, or another one than 200. `str()` is the sentence that serving says.

    `status` is HTTP's, 0 where nobody answered; `code` is a word for programs: serving's own, `unreachable`, `timeout`, or
    `http_<status>` of whoever stands before it; `path` is the field at fault, "" where none is; `call_id` is the answer's
    `X-Request-Id`, by which serving's log names the call.
    """

    def __init__(self, status: int, code: str, message: str, *, path: str = "", call_id: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.path, self.call_id = status, code, message, path, call_id

    def __str__(self) -> str:
        at = f" (at {self.path})" if self.path else ""
        return f"{self.status or self.code}: {super().__str__()}{at}"


# ---- When a call is made again. No sockets and no sleep: `attempts` says what to do next, whoever drives it does it, sync or async.
#
# Every call may be made again: a rank has its request id, engagements their event ids, and the joiner counts each once.


AGAIN = frozenset({0, 408, 429, 502, 503, 504})
ONCE_MORE = frozenset({500})  # a defect of the request's way through a process may be that of one process
DEADLINE_HEADER = "x-deadline-ms"
_MAX_SHOWN = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How patient a client is. Times are of the whole call, all of its attempts and pauses."""

    deadline_ms: int = 1000  # of a call that gives none itself
    retries: int = 3  # after the first attempt; 0 = never
    first_s: float = 0.05  # pause before the first retry; each later one is twice as long
    max_s: float = 2.0
    draw: Callable[[], float] = random.random  # jitter, in [0, 1)

    def pause_s(self, attempt: int, asked_s: float) -> float:
        """Before the retry after the `attempt`-th try: not shorter than the server asked for, and never the same for all."""
        jitter = 0.5 + self.draw() / 2
        return max(asked_s * (1 + self.draw() / 4), min(self.first_s * 2**attempt, self.max_s) * jitter)


class Call(NamedTuple):
    """One request, whole."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    expects: frozenset[int] = frozenset({200})  # statuses that are an answer


class Reply(NamedTuple):
    """What came. `status` 0: nothing did, and `body` says why, as text."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after_s(self) -> float:
        """0 where the server doesn't say, or says it as a date."""
        stated = self.headers.get("retry-after", "")
        return float(stated) if stated.isdecimal() else 0.0


class Send(NamedTuple):
    """Make this call now; `remaining_s` is all that remains for it."""

    call: Call
    remaining_s: float


class Pause(NamedTuple):
    """Wait before the next try."""

    seconds: float


Attempts = Generator[Send | Pause, Reply | None, Reply]


def attempts(call: Call, policy: RetryPolicy, deadline_ms: int, now_s: Callable[[], float]) -> Attempts:
    """Yields what to do next; a Send is answered with its Reply. Returns the reply whose status the call expects.

    1 send, telling the server what is left of the deadline
    2 what another try can't change is the result
    3 pause, unless the deadline would pass meanwhile: then what came is the result

    Raises:
        ServingError: the result isn't what the call expects.
    """
    until_s = now_s() + deadline_ms / 1000
    for attempt in range(policy.retries + 1):
        remaining_s = max(until_s - now_s(), 0.001)
        told = (*call.headers, (DEADLINE_HEADER, str(max(int(remaining_s * 1000), 1))))
        came = yield Send(call._replace(headers=told), remaining_s)
        assert came is not None
        reply = came
        if reply.status in call.expects:
            return reply
        may_help = reply.status in AGAIN or (reply.status in ONCE_MORE and attempt == 0)
        pause_s = policy.pause_s(attempt, reply.retry_after_s)
        if not may_help or attempt == policy.retries or now_s() + pause_s >= until_s:
            break
        yield Pause(pause_s)
    raise error_of(reply)


def error_of(reply: Reply) -> ServingError:
    """Of an answer in the one shape of errors, of a proxy's page, or of none."""
    if reply.status == 0:
        said = reply.body.decode()
        return ServingError(
            0, "timeout" if "imeout" in said else "unreachable", f"serving did not answer: {said}"
        )
    call_id = reply.headers.get("x-request-id", "")
    fault = _fault(reply.body)
    if fault is None:
        said = printable(reply.body[:_MAX_SHOWN].decode(errors="replace")) or "no body"
        return ServingError(
            reply.status,
            f"http_{reply.status}",
            f"expected an answer of serving, got {said}",
            call_id=call_id,
        )
    path = str(fault.get("path", ""))
    return ServingError(reply.status, str(fault["code"]), str(fault["message"]), path=path, call_id=call_id)


def _fault(body: bytes) -> dict[str, Any] | None:
    try:
        fault = json.loads(body)["error"]
        return fault if {"code", "message"} <= set(fault) else None
    except (ValueError, KeyError, TypeError):
        return None
