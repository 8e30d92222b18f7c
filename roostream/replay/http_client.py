"""An HTTP client of serving that retries with backoff while serving is down, and counts outcomes."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import Counter
from typing import Any

import httpx2 as httpx

from roostream.errors import printable
from roostream.schema.settings import setting_error

log = logging.getLogger("roostream.simulator")
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_LOG_INTERVAL_S = 30.0


class HttpClient:
    """Posts JSON from one event loop. Retries are safe, because the joiner removes duplicates by request id
    and event id."""

    def __init__(
        self,
        base_url: str,
        *,
        key: str = "",
        max_in_flight: int = 64,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`key`: sent with every request, if serving requires one. Raises ConfigError: `base_url` is no
        URL."""
        limits = httpx.Limits(max_connections=2 * max_in_flight, max_keepalive_connections=max_in_flight)
        try:
            self._http = httpx.AsyncClient(
                base_url=base_url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                timeout=5.0,
                limits=limits,
                transport=transport,
                verify=ssl.create_default_context(),  # the system's authorities, or those of SSL_CERT_FILE
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise setting_error("serving", "http://host:port", base_url, str(error)) from None
        self.outcomes: Counter[str] = Counter()  # ok | refused | retried | gave_up
        self.last_refusal = ""  # path, status and text of the last answer that rejects a request
        self.last_failure = ""  # why the last attempt that is retried failed
        self._logged_s = -_LOG_INTERVAL_S
        self._is_down = False

    async def post(self, path: str, body: Any, timeout_s: float) -> dict[str, Any] | None:
        """Returns the JSON object of the response. None if serving rejects the body (4xx), the answer is none
        of serving, or `timeout_s` passes."""
        loop = asyncio.get_running_loop()
        until_s, delay_s = loop.time() + timeout_s, 0.2
        while True:
            answer, problem = await self._once(path, body)
            if answer is not None and answer.status_code not in _RETRIED_STATUS:
                return self._finish(path, answer)
            wait_s = max(_retry_after_s(answer), delay_s * random.uniform(0.5, 1.0))
            self.last_failure = problem or f"status {answer.status_code if answer is not None else 0}"
            self._warn(f"request to serving failed: {self.last_failure}; it is retried", loop.time())
            if loop.time() + wait_s > until_s:
                self.outcomes["gave_up"] += 1
                return None
            self.outcomes["retried"] += 1
            await asyncio.sleep(wait_s)
            delay_s = min(delay_s * 2, 3.0)

    async def close(self) -> None:
        await self._http.aclose()

    async def _once(self, path: str, body: Any) -> tuple[httpx.Response | None, str]:
        try:
            return await self._http.post(path, json=body), ""
        except httpx.TransportError as error:
            return None, f"{type(error).__name__} {error}".strip()

    def _finish(self, path: str, answer: httpx.Response) -> dict[str, Any] | None:
        """Count the outcome; returns the body, or None if serving rejected the request."""
        if self._is_down:
            self._is_down = False
            log.info("serving responds again")
        body = _object(answer)
        if body is None:
            self.outcomes["refused"] += 1
            self.last_refusal = f"{path}: status {answer.status_code}: {printable(answer.text[:300])}"
            self._warn(
                f"serving refused a request: {self.last_refusal}; it is not retried",
                asyncio.get_running_loop().time(),
            )
            return None
        self.outcomes["ok"] += 1
        return body

    def _warn(self, problem: str, now_s: float) -> None:
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s, self._is_down = now_s, True
            log.warning("%s", problem)


def _object(answer: httpx.Response) -> dict[str, Any] | None:
    """The JSON object of a successful answer, {} if it is empty; None for any other answer."""
    try:
        body = answer.json() if answer.content else {}
    except ValueError:
        return None
    return body if answer.is_success and isinstance(body, dict) else None


def _retry_after_s(answer: httpx.Response | None) -> float:
    """The Retry-After header in seconds, at most 10."""
    if answer is None:
        return 0.0
    try:
        return min(max(float(answer.headers.get("retry-after", 0)), 0.0), 10.0)
    except ValueError:
        return 0.0
