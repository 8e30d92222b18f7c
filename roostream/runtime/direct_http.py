"""Open URLs of a deployment's own programs, without the proxy that the environment names for other sites."""

from __future__ import annotations

import http.client
import ssl
import urllib.request


def open_direct(
    request: str | urllib.request.Request, timeout_s: float, context: ssl.SSLContext | None = None
) -> http.client.HTTPResponse:
    """As `urllib.request.urlopen`, but never through `http_proxy` or `https_proxy`: a proxy cannot reach the
    loopback addresses of a local stack, and an address in a cluster needs none. Raises as `urlopen`."""
    https = [urllib.request.HTTPSHandler(context=context)] if context else []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *https)
    answer: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
    return answer
