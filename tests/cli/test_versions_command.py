"""`roostream versions` calls serving's admin interface, prints one line per model version, and reports a
refusal in one sentence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from roostream.cli.main import cli
from roostream.errors import ConfigError, RoostreamError, UnavailableError
from tests.runtime.raw_server import NOT_HTTP, raw_server

TOKEN = "0123456789abcdef"
VERSIONS = {
    "served": "1-2",
    "activated": "1-2",
    "versions": [
        {
            "name": "1-3",
            "state": "held",
            "roles": ["shadow"],
            "committed_ms": 1,
            "installed_ms": 2,
            "age_s": 1.0,
        },
        {
            "name": "1-2",
            "state": "served",
            "roles": [],
            "committed_ms": None,
            "installed_ms": 2,
            "age_s": None,
        },
    ],
    "refused": [
        {"name": "manifests/00000004", "reason": "damaged", "message": "a checksum differs", "at_ms": 5}
    ],
}


class FakeAdminServer(HTTPServer):
    """A fake admin interface. It sends `answer` and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, str]] = []
        self.answer: tuple[int, Any] = (200, VERSIONS)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeAdminServer

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers["authorization"]))
        status, content = self.server.answer
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


@pytest.fixture
def admin() -> Iterator[FakeAdminServer]:
    server = FakeAdminServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def versions(address: str, token: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["versions", *arguments, "--admin", address, "--token-file", str(token)])
    if isinstance(result.exception, RoostreamError):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("arguments", "request_line"),
    [
        (("list",), ("GET", "/admin/v1/versions")),
        (("activate", "1-2"), ("POST", "/admin/v1/versions/1-2/activate")),
        (("activate", "a/b"), ("POST", "/admin/v1/versions/a%2Fb/activate")),
        (("resume",), ("POST", "/admin/v1/versions/resume")),
    ],
)
def test_each_command_shows_the_loaded_versions(
    admin: FakeAdminServer, token: Path, arguments: tuple[str, ...], request_line: tuple[str, str]
) -> None:
    lines = versions(admin.address, token, *arguments).output.splitlines()
    assert admin.requests == [(*request_line, f"Bearer {TOKEN}")]
    assert (
        lines[0].startswith("1-3  held, shadow  committed ")
        and lines[1] == "1-2  served, until resume  initial weights"
    )
    assert lines[2] == "manifests/00000004  rejected (damaged)  a checksum differs"


@pytest.mark.parametrize(
    ("status", "content", "text"),
    [
        (
            404,
            {"error": {"code": "unknown_model_version", "message": "model version 1-9 isn't held"}},
            "1-9 isn't held",
        ),
        (401, b"no", "serving answered 401"),
        (500, {"error": 5}, "serving answered 500"),
    ],
)
def test_a_refusal_is_reported_in_one_sentence(
    admin: FakeAdminServer, token: Path, status: int, content: Any, text: str
) -> None:
    admin.answer = (status, content)
    with pytest.raises(ConfigError, match=text):
        versions(admin.address, token, "activate", "1-9")


def test_an_unreachable_process_and_a_missing_token_are_reported(token: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="admin_listen"):
        versions("127.0.0.1:1", token, "list")
    with pytest.raises(ConfigError, match="--token-file: expected a file with a token"):
        versions("127.0.0.1:1", tmp_path / "absent", "list")
    with pytest.raises(ConfigError, match="expected an address like"):
        versions("nowhere", token, "list")
    token.write_text("tok€n")
    with pytest.raises(ConfigError, match="printable ASCII"):
        versions("127.0.0.1:1", token, "list")


def test_another_server_at_the_address_is_reported(token: Path) -> None:
    with (
        raw_server(NOT_HTTP) as url,
        pytest.raises(UnavailableError, match="no answer from the admin interface"),
    ):
        versions(url.removeprefix("http://"), token, "list")


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"{}", b'{"versions": [3], "refused": []}'])
def test_an_answer_of_another_program_is_refused(admin: FakeAdminServer, token: Path, content: bytes) -> None:
    admin.answer = (200, content)
    with pytest.raises(UnavailableError, match=r"admin interface.* at 127.*admin_listen"):
        versions(admin.address, token, "list")
