"""Programs of a deployment are asked directly, whatever proxy the environment names."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from infra.ports import responds_ok
from roostream.cli.program_health import readiness_error
from roostream.cli.versions_command import versions
from roostream.runtime.flink_rest import FlinkRest
from roostream.runtime.scrape import fetch


class _Program(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = {"/metrics": b"roostream_ready 1\n", "/readyz": b"waits for Kafka"}.get(
            self.path, b'{"jobs": [], "versions": [], "refused": [], "activated": null}'
        )
        self.send_response(503 if self.path == "/readyz" else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """host:port of a program, in an environment with a proxy that does not answer."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Program) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_no_question_goes_through_the_proxy_of_the_environment(program: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    assert responds_ok(f"http://{program}/")
    assert fetch(f"http://{program}/metrics").value("roostream_ready") == 1
    assert readiness_error(f"http://{program}/readyz") == "waits for Kafka"
    assert FlinkRest(f"http://{program}").live_job() is None
    result = CliRunner().invoke(versions, ["list", "--admin", program, "--token-file", str(token)])
    assert (result.exit_code, result.output) == (0, "")
