"""A server that answers every connection with the same bytes and closes it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

NOT_HTTP = b"+PONG\r\n\r\n"
CUT_OFF = b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"jobs": ['
"""What a client reads from a server that is killed while it answers."""


@contextlib.contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()
