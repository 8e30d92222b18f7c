"""The one exception of a call."""

from __future__ import annotations

from roostream.errors import RoostreamError


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
