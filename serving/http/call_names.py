"""What a call is called: the client's `X-Request-Id` or one of ours, and where it stands in a trace (W3C Trace Context).

A call is one HTTP exchange; its id is for logs. The `request_id` of a rank's body is another thing: it names the request whose
engagements are joined, through retries and pages.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from typing import Any

from roostream.runtime.program import CallContext

HEADER = b"x-request-id"
CALL_ID_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}$"
TRACEPARENT_PATTERN = "^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]*)?$"

_HELPS = {
    "X-Request-Id": (
        "name of this call in logs; made here when missing, and in every answer",
        CALL_ID_PATTERN,
    ),
    "traceparent": ("W3C Trace Context: logs name the trace, spans continue it", TRACEPARENT_PATTERN),
}
DOCUMENTED: list[dict[str, Any]] = [
    {
        "name": name,
        "in": "header",
        "description": text,
        "required": False,
        "schema": {"type": "string", "pattern": pattern},
    }
    for name, (text, pattern) in _HELPS.items()
]

_CALL_ID = re.compile(CALL_ID_PATTERN.rstrip("$").encode())
_TRACE = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_OWN, _NUMBERS = os.urandom(8).hex(), itertools.count(1)


def names_of(headers: Iterable[tuple[bytes, bytes]]) -> CallContext:
    """From a request's headers, names in lower case. What isn't valid is as if it weren't there."""
    call_id = trace = b""
    for name, value in headers:
        if name == HEADER:
            call_id = call_id or value
        elif name == b"traceparent":
            trace = value
    known = call_id.decode() if call_id and _CALL_ID.fullmatch(call_id) else f"{_OWN}-{next(_NUMBERS):x}"
    return _traced(known, trace) if trace else CallContext(known)


def _traced(call_id: str, trace: bytes) -> CallContext:
    """Version 00 has four parts; a later one may have more."""
    found = _TRACE.fullmatch(trace)
    if found is None or (found[3] and trace.startswith(b"00")):
        return CallContext(call_id)
    return CallContext(call_id, found[1].decode(), found[2].decode())
