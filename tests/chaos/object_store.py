"""An S3 server for the stacks of the chaos tests. Tests can make it refuse requests or slow it down."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.options import StackOptions
from tests.runtime import s3_server

WITH_STORE = ("shard", "controller", "worker", "serving", "joiner", "archiver")


class FaultyStore:
    """A WSGI application in front of an S3 server. It answers 503 while `is_unavailable` and transfers at
    most `max_bytes_per_s` over all requests (0 = no limit)."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application, self.is_unavailable, self.max_bytes_per_s = application, False, 0
        self.num_refused = 0
        self._link = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if self.is_unavailable:
            self.num_refused += 1
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        self._transfer(int(environ.get("CONTENT_LENGTH") or 0))
        answer = self.application(environ, start_response)
        if self.max_bytes_per_s:
            answer = list(answer)
            self._transfer(sum(map(len, answer)))
        return answer

    def _transfer(self, num_bytes: int) -> None:
        if limit := self.max_bytes_per_s:
            with self._link:
                time.sleep(num_bytes / limit)


@contextlib.contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """Start the server. Programs that are started in the block find it by their environment."""
    with s3_server.running():
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        store = FaultyStore(DomainDispatcherApplication(create_backend_app))
        server = make_server("127.0.0.1", 0, store, threaded=True)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join(30)
            server.server_close()


def store_of(folder: Path) -> str:
    """The URL of an empty store for `folder`. All S3 servers of a process share their objects."""
    return f"s3://{s3_server.BUCKET}/{folder.name}"


def with_store(options: StackOptions, url: str) -> StackOptions:
    """The options with this store for all programs that use a checkpoint store."""
    overrides = options.overrides
    return dataclasses.replace(
        options,
        overrides={**overrides, **{name: {**overrides.get(name, {}), "store": url} for name in WITH_STORE}},
    )
