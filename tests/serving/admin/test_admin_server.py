"""The admin port on a real socket: a token, bounded bodies, and an end."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from admin_cases import TOKEN, admin_of
from click.testing import CliRunner
from live_serving import answer_of
from serving_cases import Built

from roostream.cli.main import cli
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.tls import TlsContext, TlsFiles
from serving.http import connection
from tests.certificates import Authority


@pytest.fixture
def http(built: Built) -> Iterator[httpx2.Client]:
    with (
        admin_of(built) as port,
        httpx2.Client(
            base_url=f"http://127.0.0.1:{port}/admin/v1", headers={"authorization": f"Bearer {TOKEN}"}
        ) as client,
    ):
        yield client


def test_with_a_certificate_the_admin_port_accepts_only_tls(built: Built, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    certificate, key = ours.issue("serving")
    files = TlsFiles(certificate=certificate, key=key, client_ca=str(theirs.pem), client_required=True)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    friend = tmp_path / "friend.both"
    friend.write_text("".join(Path(file).read_text() for file in theirs.issue("friend")))
    with admin_of(built, TlsContext(files)) as port:
        told = ["versions", "list", "--admin", f"127.0.0.1:{port}", "--token-file", str(token)]
        own = ["--ca", str(ours.pem), "--certificate", str(friend)]
        assert CliRunner().invoke(cli, [*told, *own]).output.startswith("0-0  served")
        for given, error in (
            ([], UnavailableError),  # http
            (["--ca", str(ours.pem)], UnavailableError),  # no certificate of its own
            (["--ca", str(theirs.pem), "--certificate", str(friend)], UnavailableError),  # another authority
            (["--ca", str(tmp_path / "none.pem")], ConfigError),
        ):
            assert isinstance(CliRunner().invoke(cli, [*told, *given]).exception, error), given


def test_admin_changes_apply_to_requests(http: httpx2.Client, built: Built) -> None:
    assert http.get("/versions").json()["served"] == "0-0"
    answer = http.put("/shadow", json={"version": "newest", "share": 0.5})
    assert answer.status_code == 200 and answer.json()["share"] == 0.5
    assert built.service.versions.routing.shadow.share == 0.5


@pytest.mark.parametrize("header", ["", "Bearer wrong", f"Basic {TOKEN}"])
def test_calls_without_the_token_are_refused_and_not_logged(
    http: httpx2.Client, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "roostream"):
        for answer in (
            http.get("/versions", headers={"authorization": header}),
            http.get("/no", headers={"authorization": header}),
        ):
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "unauthorized"
        assert http.post("/versions/resume").status_code == 200
    assert TOKEN not in caplog.text and "wrong" not in caplog.text


def test_an_admin_error_has_the_common_error_shape(http: httpx2.Client) -> None:
    answer = http.post("/versions/9-9/activate")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_model_version"


def test_an_admin_body_is_bounded(http: httpx2.Client) -> None:
    answer = http.put("/canary", content=json.dumps({"version": "x" * (70 << 10)}))
    assert answer.status_code == 413


def test_an_early_answer_of_the_admin_port_does_not_keep_its_connection(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.2)
    head = f"GET /admin/v1/versions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
    with admin_of(built) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(f"{head}content-length: 1000000000\r\n\r\n{{".encode())
        status, received = answer_of(line)
        assert status == 200 and received.count(b"HTTP/1.1") == 1
