"""What may stand behind `/v1/rank?`."""

from __future__ import annotations

from urllib.parse import parse_qsl

from roo.errors import nearest
from serving.errors import RequestError, shown

RANK_QUERY = {
    "append": "a page that adds candidates to an open request",
    "ranked": "the answer has `ranked`: item ids, first slot first",
}


def options_of(query: bytes) -> dict[str, bool]:
    """`?append=true&ranked=true`. RequestError 400 for another name or value."""
    out: dict[str, bool] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if query else ():
        if name not in RANK_QUERY:
            raise RequestError(400, f"unknown parameter {shown(name)!r}{nearest(shown(name), RANK_QUERY)}", f"?{shown(name)}")
        if value not in ("true", "false"):
            raise RequestError(400, f"expected true or false, got {shown(value)!r}", f"?{name}")
        out[name] = value == "true"
    return out
