"""`x-model-version`: which version scores a request, said where a proxy or a gateway can say it too."""

from __future__ import annotations

from starlette.types import Scope

from serving.errors import RequestError, shown
from serving.request import RankRequest

HEADER = "x-model-version"


def take_version(scope: Scope, request: RankRequest) -> None:
    """The header is the body's `model_version`. RequestError 400: both are there and differ."""
    named = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), "")
    if named and request.model_version and named != request.model_version:
        message = f"expected one version, got {shown(request.model_version)!r} here and {shown(named)!r} in {HEADER}"
        raise RequestError(400, message, "$.model_version")
    request.model_version = request.model_version or named
