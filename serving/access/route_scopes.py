"""The scope that each path requires."""

from __future__ import annotations

from serving.access.bearer_keys import ANY

_OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
_TRAFFIC = {
    "/v1/rank": "rank",
    "/v1/explain": "explain",
    "/v1/retrieve": "retrieve",
    "/v1/recommend": "recommend",
    "/v1/engagements": "engagements",
}
# The live list. It shows no more than a rank answer.
_PAGE = frozenset({"/page/items.json", "/page/rescored.json"})


def traffic_route(path: str) -> str | None:
    """The name of the traffic route at this path, or None."""
    route = _TRAFFIC.get(path)
    if route is None and path.startswith("/v2/models/") and path.endswith("/infer"):
        return "infer"
    return route


def required_scope(path: str, open_files: frozenset[str]) -> str | None:
    """Return a scope, ANY, or None: probes and `open_files`, which contain no data, need no key."""
    route = traffic_route(path)
    if route is not None:
        return "engage" if route == "engagements" else "rank"
    if path in _PAGE:
        return "rank"
    if path == "/metrics":
        return "metrics"
    return None if path in _OPEN or path in open_files else ANY
