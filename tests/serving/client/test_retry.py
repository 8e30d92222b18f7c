"""The client's retry policy: which calls are retried, when and for how long. No socket is used, and time is
simulated."""

from __future__ import annotations

import pytest

from roostream.runtime.clock import FakeClock
from serving.client.retry import (
    DEADLINE_HEADER,
    Call,
    Pause,
    Reply,
    RetryPolicy,
    Send,
    ServingError,
    attempts,
)

CALL = Call("POST", "/v1/rank", b"{}")
WITHOUT_JITTER = RetryPolicy(retries=3, first_s=0.1, max_s=0.3, draw=lambda: 1.0)
OK = Reply(200, {}, b"{}")


def reply(status: int, **headers: str) -> Reply:
    return Reply(status, {name.replace("_", "-"): value for name, value in headers.items()}, b"")


def run_attempts(
    replies: list[Reply],
    policy: RetryPolicy = WITHOUT_JITTER,
    deadline_ms: int = 10_000,
    takes_s: float = 0.0,
) -> tuple[Reply | ServingError, list[float], list[int]]:
    """Run a call that gets these replies. Return (result, pauses, deadlines that were sent)."""
    clock, pauses, deadlines, remaining = FakeClock(), [], [], list(replies)
    flow = attempts(CALL, policy, deadline_ms, clock.monotonic_s)
    answer: Reply | None = None
    try:
        step = next(flow)
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                clock.advance(step.seconds)
                answer = None
            else:
                assert isinstance(step, Send)
                deadlines.append(int(dict(step.call.headers)[DEADLINE_HEADER]))
                clock.advance(takes_s)
                answer = remaining.pop(0)
            step = flow.send(answer)
    except StopIteration as done:
        return done.value, pauses, deadlines
    except ServingError as error:
        return error, pauses, deadlines


def test_an_answer_is_returned() -> None:
    assert run_attempts([OK]) == (OK, [], [10_000])


@pytest.mark.parametrize("status", [429, 503, 504])
def test_the_default_policy_retries_what_serving_asks_to_send_again(status: int) -> None:
    policy = RetryPolicy()
    refused = reply(status, retry_after="1")
    result, pauses, _ = run_attempts([refused, refused, OK], policy, policy.deadline_ms)
    assert result == OK and len(pauses) == 2 and min(pauses) >= 1.0


@pytest.mark.parametrize("status", [0, 408, 429, 502, 503, 504])
def test_temporary_errors_are_retried_after_growing_pauses(status: int) -> None:
    result, pauses, deadlines = run_attempts([reply(status)] * 3 + [OK])
    assert result == OK and pauses == [0.1, 0.2, 0.3] and deadlines[0] > deadlines[-1] == 9400


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 415, 431])
def test_permanent_errors_are_not_retried(status: int) -> None:
    result, pauses, _ = run_attempts([reply(status), OK])
    assert isinstance(result, ServingError) and result.status == status and not pauses


def test_a_server_error_is_retried_once() -> None:
    assert run_attempts([reply(500), OK])[0] == OK
    result, pauses, _ = run_attempts([reply(500), reply(500), OK])
    assert isinstance(result, ServingError) and len(pauses) == 1


def test_retry_after_is_respected() -> None:
    _, pauses, _ = run_attempts([reply(429, retry_after="2"), OK])
    assert pauses == [2.5], "a random part is added, so that clients do not retry at the same moment"
    _, pauses, _ = run_attempts([reply(429, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), OK])
    assert pauses == [0.1]


def test_the_deadline_covers_all_attempts() -> None:
    result, pauses, deadlines = run_attempts([reply(503), reply(503), OK], deadline_ms=1000, takes_s=0.5)
    assert isinstance(result, ServingError) and result.status == 503
    assert pauses == [0.1] and deadlines == [1000, 400]
    result, pauses, _ = run_attempts([reply(429, retry_after="9"), OK], deadline_ms=1000)
    assert isinstance(result, ServingError) and not pauses, "the pause would exceed the deadline"


def test_a_policy_without_retries_sends_one_request() -> None:
    result, _, deadlines = run_attempts([reply(503), OK], RetryPolicy(retries=0))
    assert isinstance(result, ServingError) and len(deadlines) == 1


def test_pauses_have_jitter() -> None:
    pauses = {RetryPolicy().pause_s(1, 0.0) for _ in range(5)}
    assert len(pauses) == 5 and all(0.05 <= p <= 0.1 for p in pauses)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (
            Reply(
                400,
                {"x-request-id": "c-1"},
                b'{"error":{"code":"bad_request","message":"expected a","path":"$.ro"}}',
            ),
            (400, "bad_request", "expected a", "$.ro", "c-1"),
        ),
        (
            Reply(502, {}, b"<html>Bad\nGateway"),
            (502, "http_502", "expected an answer of serving, got <html>BadGateway", "", ""),
        ),
        (
            Reply(404, {}, b'{"error": "none"}'),
            (404, "http_404", 'expected an answer of serving, got {"error": "none"}', "", ""),
        ),
        (
            Reply(404, {}, b'{"error": ["code", "message"]}'),
            (404, "http_404", 'expected an answer of serving, got {"error": ["code", "message"]}', "", ""),
        ),
        (
            Reply(404, {}, b"[" * 100_000),
            (404, "http_404", f"expected an answer of serving, got {'[' * 200}", "", ""),
        ),
        (Reply(404, {}, b""), (404, "http_404", "expected an answer of serving, got no body", "", "")),
        (
            Reply(0, {}, b"ConnectError refused"),
            (0, "unreachable", "serving did not answer: ConnectError refused", "", ""),
        ),
        (Reply(0, {}, b"ReadTimeout"), (0, "timeout", "serving did not answer: ReadTimeout", "", "")),
    ],
)
def test_every_failure_raises_the_client_error(
    response: Reply, expected: tuple[int, str, str, str, str]
) -> None:
    result, _, _ = run_attempts([response] * 4)
    assert isinstance(result, ServingError)
    assert (result.status, result.code, result.message, result.path, result.call_id) == expected
    assert str(response.status or expected[1]) in str(result) and expected[3] in str(result)
