"""A real S3 server (moto) in a thread of this process. Tests skip with the reason if moto is not
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
    """Start the server and yield its URL. The bucket `BUCKET` exists, and the environment variables that S3
    clients read name this server."""
    pytest.importorskip("obstore", reason="obstore, the client of S3 stores, is not installed")
    server_module = pytest.importorskip(
        "moto.server", reason="moto, the S3 server of this test, is not installed"
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs one line per request
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}
    saved_environment = dict(os.environ)
    os.environ.update({**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"})
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=30):
            yield url
    finally:
        os.environ.clear()
        os.environ.update(saved_environment)
        server.stop()
