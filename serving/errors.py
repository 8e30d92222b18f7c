"""What a request can be refused with."""

from __future__ import annotations

from roostream.errors import CheckpointError, RoostreamError

CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    429: "overloaded",
    431: "headers_too_large",
    500: "internal",
    503: "unavailable",
    504: "deadline_exceeded",
}
MAX_SHOWN = 64  # characters of what came that an answer repeats
_MAX_MESSAGE = 400


def shown(value: object) -> str:
    """What came, for a message: cut, so that an answer's size is ours to say."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


class VersionRefusedError(CheckpointError):
    """What was committed is not served: the version in use stays. `reason` is one word, for metrics: one of REFUSALS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


REFUSAL_REASONS = ("damaged", "schema", "model", "not_finite", "warm_up")


class RequestError(RoostreamError):
    """An answer that isn't 200. Nothing was logged, nothing was changed."""

    def __init__(
        self, status: int, message: str, path: str = "", *, retry_after_s: int = 0, code: str = ""
    ) -> None:
        super().__init__(message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…")
        self.status, self.path, self.retry_after_s = status, path, retry_after_s
        self.code = code or CODES[status]

    def body(self) -> dict[str, dict[str, str]]:
        """`{"error": {"code", "message", "path"?}}`"""
        return {
            "error": {"code": self.code, "message": str(self)} | ({"path": self.path} if self.path else {})
        }

    def headers(self) -> dict[str, str]:
        """`retry-after` where trying again can help; a connection whose body wasn't read to its end is closed."""
        retry = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        return retry | ({"connection": "close"} if self.status in (408, 413) else {})
