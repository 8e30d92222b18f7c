"""A fake of Flink's job manager that serves scripted answers over its REST interface."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class FakeFlink:
    """A server on a free port. `answers` maps a path to its JSON answer or an error status; other paths give
    404. `posted` maps a path to the JSON body last posted there; `cancelled` lists the paths of PATCH
    requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.posted: dict[str, Any] = {}
        self.cancelled: list[str] = []
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = fake.answers.get(self.path)
                self._answer(404 if found is None else found if isinstance(found, int) else 200, found)

            def do_POST(self) -> None:
                fake.posted[self.path] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.do_GET()

            def do_PATCH(self) -> None:
                fake.cancelled.append(self.path)
                self._answer(202, {})

            def _answer(self, status: int, found: Any) -> None:
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeFlink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
