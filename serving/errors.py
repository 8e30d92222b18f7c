"""What a request can be refused with."""

from __future__ import annotations

from roo.errors import RoostreamError

CODES = {
    400: "bad_request",
    404: "unknown_model_version",
    413: "too_large",
    415: "unsupported_media_type",
    429: "overloaded",
    500: "internal",
    503: "unavailable",
    504: "deadline_exceeded",
}


class RequestError(RoostreamError):
    """An answer that isn't 200. Nothing was logged, nothing was changed."""

    def __init__(self, status: int, message: str, path: str = "", retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.path, self.retry_after_s = status, path, retry_after_s

    def body(self) -> dict[str, dict[str, str]]:
        """`{"error": {"code", "message", "path"?}}`"""
        return {"error": {"code": CODES[self.status], "message": str(self)} | ({"path": self.path} if self.path else {})}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
