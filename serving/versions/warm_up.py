"""A version is tried before it is served: with requests that were scored a moment ago, in a thread that nobody waits for.

A version with which one of them can't be scored (its code fails, a score isn't finite) is refused: it would fail the next user. A
request that the version in use can't score either says nothing about the new one. What it was tried with also loads what a first
request otherwise would: kernels, caches of shapes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from roostream.errors import describe_error
from serving.errors import RequestError, VersionRefusedError
from serving.scorer import RowReader, Version
from serving.versions.quiet import PATIENCE_S, Quiet
from serving.versions.recent import RecentRequests, ScoredRequest

log = logging.getLogger("roostream.serving.versions")


class WarmUp:
    """Used by one thread."""

    def __init__(
        self,
        recent: RecentRequests,
        rows: RowReader,
        served: Callable[[], Version],
        quiet: Quiet,
        max_requests: int,
    ) -> None:
        self.recent, self.rows, self.served, self.quiet, self.max_requests = (
            recent,
            rows,
            served,
            quiet,
            max_requests,
        )

    def __call__(self, version: Version, stop: threading.Event | None = None) -> None:
        """Score recent requests with it; nothing of that is answered, logged or counted.

        Raises:
            VersionRefusedError: it can't score one that the version in use can.
        """
        for request in self.recent.to_try(self.max_requests):
            self.quiet.wait(PATIENCE_S, stop)
            failure = self._failure(version, request)
            if failure and not self._failure(self.served(), request):
                raise VersionRefusedError(
                    "warm_up", f"{version.name}: expected a score for request {request.request_id}: {failure}"
                )

    def _failure(self, version: Version, request: ScoredRequest) -> str:
        try:
            request.score_with(version, self.rows)
        except RequestError as error:
            return describe_error(error)
        except Exception as error:  # whatever it is, users are not to meet it
            log.debug("warm-up of version %s", version.name, exc_info=True)
            return f"{type(error).__name__}: {error}"
        return ""
