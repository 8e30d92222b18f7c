"""The scope that each path requires."""

from __future__ import annotations

from serving.access.bearer_keys import ANY

_OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
_SCOPES = {
    "/v1/rank": "rank",
    "/v1/explain": "rank",
    "/v1/retrieve": "rank",
    "/v1/recommend": "rank",
    "/page/items.json": "rank",
    "/page/rescored.json": "rank",
    "/v1/engagements": "engage",
    "/metrics": "metrics",
}


def required_scope(path: str, open_files: frozenset[str]) -> str | None:
    """Return a scope, ANY, or None: probes and `open_files`, which contain no data, need no key."""
    scope = _SCOPES.get(path)
    if scope is not None:
        return scope
    if path in _OPEN or path in open_files:
        return None
    return "rank" if path.startswith("/v2/models/") and path.endswith("/infer") else ANY
