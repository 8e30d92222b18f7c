"""moto's S3 server in a process of its own, with one bucket.

`python -m benchmarks.common.s3_server` prints its URL and runs until its stdin ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.request
from collections.abc import Iterator

from benchmarks.common.peer_process import print_address_and_wait

BUCKET = "roostream-benchmarks"


@contextlib.contextmanager
def server_environment(url: str) -> Iterator[None]:
    """Let S3 programs of this process find the server."""
    kept = dict(os.environ)
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
    os.environ.update({**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def main() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=30):
        print_address_and_wait(url)
    server.stop()


if __name__ == "__main__":
    main()
