"""Errors that a request is answered with, and the reasons why a committed model version is refused."""

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
OTHER_CODES = {404: ("unknown_model", "unknown_model_version"), 408: ("header_timeout",)}
MAX_SHOWN = 64  # characters of a client's value that an answer repeats
_MAX_MESSAGE = 400


def shown(value: object) -> str:
    """`value` as text for an error message, cut to MAX_SHOWN characters."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


class VersionRefusedError(CheckpointError):
    """A committed version cannot be served; the version in use stays. `reason` is one of REFUSAL_REASONS, for
    metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


REFUSAL_REASONS = ("damaged", "schema", "model", "not_finite", "warm_up")


class RequestError(RoostreamError):
    """An answer other than 200. Nothing was logged and nothing was changed."""

    def __init__(
        self, status: int, message: str, path: str = "", *, retry_after_s: int = 0, code: str = ""
    ) -> None:
        super().__init__(message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…")
        self.status, self.path, self.retry_after_s = status, path, retry_after_s
        self.code = code or CODES[status]

    def body(self) -> dict[str, dict[str, str]]:
        """Return `{"error": {"code", "message", "path"?}}`."""
        return {
            "error": {"code": self.code, "message": str(self)} | ({"path": self.path} if self.path else {})
        }

    def headers(self) -> dict[str, str]:
        """Return `retry-after` where a retry can help, and `connection: close` if the body was not read to
        its end."""
        retry = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        return retry | ({"connection": "close"} if self.status in (408, 413) else {})


class NonFiniteScoreError(RequestError):
    """500: a model version gave a score that is not finite for this request."""
