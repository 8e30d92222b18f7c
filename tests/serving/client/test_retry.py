"""What is tried again, when, and how long: without a socket and without time passing."""

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
STEADY = RetryPolicy(retries=3, first_s=0.1, max_s=0.3, draw=lambda: 1.0)
OK = Reply(200, {}, b"{}")


def reply(status: int, **headers: str) -> Reply:
    return Reply(status, {name.replace("_", "-"): value for name, value in headers.items()}, b"")


def driven(
    replies: list[Reply], policy: RetryPolicy = STEADY, deadline_ms: int = 10_000, takes_s: float = 0.0
) -> tuple[Reply | ServingError, list[float], list[int]]:
    """(result, pauses, deadlines told) of a call that is answered so."""
    clock, pauses, told, left = FakeClock(), [], [], list(replies)
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
                told.append(int(dict(step.call.headers)[DEADLINE_HEADER]))
                clock.advance(takes_s)
                answer = left.pop(0)
            step = flow.send(answer)
    except StopIteration as done:
        return done.value, pauses, told
    except ServingError as error:
        return error, pauses, told


def test_an_answer_is_returned() -> None:
    assert driven([OK]) == (OK, [], [10_000])


@pytest.mark.parametrize("status", [429, 503, 504])
def test_the_default_policy_retries_what_serving_asks_to_send_again(status: int) -> None:
    policy = RetryPolicy()
    refused = reply(status, retry_after="1")
    result, pauses, _ = driven([refused, refused, OK], policy, policy.deadline_ms)
    assert result == OK and len(pauses) == 2 and min(pauses) >= 1.0


@pytest.mark.parametrize("status", [0, 408, 429, 502, 503, 504])
def test_temporary_errors_are_retried_after_growing_pauses(status: int) -> None:
    result, pauses, told = driven([reply(status)] * 3 + [OK])
    assert result == OK and pauses == [0.1, 0.2, 0.3] and told[0] > told[-1] == 9400


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 415, 431])
def test_permanent_errors_are_not_retried(status: int) -> None:
    result, pauses, _ = driven([reply(status), OK])
    assert isinstance(result, ServingError) and result.status == status and not pauses


def test_a_server_error_is_retried_once() -> None:
    assert driven([reply(500), OK])[0] == OK
    result, pauses, _ = driven([reply(500), reply(500), OK])
    assert isinstance(result, ServingError) and len(pauses) == 1


def test_retry_after_is_respected() -> None:
    _, pauses, _ = driven([reply(429, retry_after="2"), OK])
    assert pauses == [2.5], "and not by all clients in the same moment"
    _, pauses, _ = driven([reply(429, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), OK])
    assert pauses == [0.1]


def test_the_deadline_covers_all_attempts() -> None:
    result, pauses, told = driven([reply(503), reply(503), OK], deadline_ms=1000, takes_s=0.5)
    assert isinstance(result, ServingError) and result.status == 503
    assert pauses == [0.1] and told == [1000, 400]
    result, pauses, _ = driven([reply(429, retry_after="9"), OK], deadline_ms=1000)
    assert isinstance(result, ServingError) and not pauses, "there is no time left to wait for"


def test_a_policy_without_retries_sends_one_request() -> None:
    result, _, told = driven([reply(503), OK], RetryPolicy(retries=0))
    assert isinstance(result, ServingError) and len(told) == 1


def test_pauses_have_jitter() -> None:
    pauses = {RetryPolicy().pause_s(1, 0.0) for _ in range(5)}
    assert len(pauses) == 5 and all(0.05 <= p <= 0.1 for p in pauses)


@pytest.mark.parametrize(
    ("given", "expected"),
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
        (Reply(404, {}, b""), (404, "http_404", "expected an answer of serving, got no body", "", "")),
        (
            Reply(0, {}, b"ConnectError refused"),
            (0, "unreachable", "serving did not answer: ConnectError refused", "", ""),
        ),
        (Reply(0, {}, b"ReadTimeout"), (0, "timeout", "serving did not answer: ReadTimeout", "", "")),
    ],
)
def test_every_failure_raises_the_client_error(
    given: Reply, expected: tuple[int, str, str, str, str]
) -> None:
    result, _, _ = driven([given] * 4)
    assert isinstance(result, ServingError)
    assert (result.status, result.code, result.message, result.path, result.call_id) == expected
    assert str(given.status or expected[1]) in str(result) and expected[3] in str(result)
