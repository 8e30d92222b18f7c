"""What may stand behind `/v1/rank?`, and the client's own deadline."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from starlette.types import Scope

from roostream.errors import nearest
from serving.errors import RequestError, shown

RANK_QUERY = {
    "append": "a page that adds candidates to an open request",
    "ranked": "the answer has `ranked`: item ids, first slot first",
    "top": "the answer has `top` in place of scores and order: the first so many slots, each with its item id and scores",
}
DEADLINE = "x-deadline-ms"


class RankOptions(NamedTuple):
    append: bool = False
    ranked: bool = False
    top: int = 0  # 0 = all of them, as scores and order


def options_of(query: bytes) -> RankOptions:
    """`?append=true&ranked=true&top=10`. RequestError 400 for another name or value."""
    out: dict[str, Any] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if query else ():
        if name not in RANK_QUERY:
            raise RequestError(
                400, f"unknown parameter {shown(name)!r}{nearest(shown(name), RANK_QUERY)}", f"?{shown(name)}"
            )
        out[name] = _top(value) if name == "top" else _flag(name, value)
    return RankOptions(**out)


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise RequestError(400, f"expected true or false, got {shown(value)!r}", f"?{name}")
    return value == "true"


def _top(value: str) -> int:
    number = _positive(value)
    if not number:
        raise RequestError(400, f"expected a number of slots from 1 on, got {shown(value)!r}", "?top")
    return number


def deadline_ms_of(scope: Scope, max_ms: int) -> int:
    """The client's, where it gave one in `x-deadline-ms`, and at most `max_ms`. RequestError 400 for what isn't one."""
    stated = next(
        (value.decode("latin-1") for name, value in scope["headers"] if name == DEADLINE.encode()), None
    )
    if stated is None:
        return max_ms
    number = _positive(stated.strip())
    if not number:
        raise RequestError(400, f"expected {DEADLINE} as whole milliseconds from 1 on, got {shown(stated)!r}")
    return min(number, max_ms)


def _positive(text: str) -> int:
    """0 = it isn't."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0
