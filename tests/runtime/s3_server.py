"""A real server that speaks S3 (moto), in a thread of this process; skipped, with the reason, where it isn't
installed."""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.request
from collections.abc import Iterator

import pytest

BUCKET = "roostream-tests"


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Its URL; it has a bucket, and the environment names it as S3 programs expect."""
    pytest.importorskip("obstore", reason="obstore, the client of S3 stores, is not installed")
    server_module = pytest.importorskip(
        "moto.server", reason="moto, the S3 server of this test, is not installed"
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}
    kept = dict(os.environ)
    os.environ.update({**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"})
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=30):
            yield url
    finally:
        os.environ.clear()
        os.environ.update(kept)
        server.stop()
