"""The admin interface: it lists versions, lets operators with the token change them, and a refused call
changes nothing."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from roostream.cli.main import cli
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.tls import TlsContext, TlsSettings
from roostream.schema.ids import key_bytes
from roostream.schema.settings import SettingError
from serving.access.bearer_keys import Keyring, new_key, write_keys
from serving.admin import AdminToken, read_token
from serving.errors import RequestError
from serving.http import connection
from serving.http.engagements import EngagementParser
from serving.scorer import Version
from serving.versions.interleaving_stats import InterleavingStats, Pair
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.recent_requests import RecentRequests, ScoredRequest
from tests.certificates import Authority
from tests.serving.admin_cases import TOKEN, make_admin_interface, run_admin_server
from tests.serving.live_serving import read_answer
from tests.serving.serving_cases import SCHEMA, InProcessServing

KEY = {"authorization": f"Bearer {TOKEN}"}


class FakeVersion:
    def __init__(self, name: str) -> None:
        self.name = name


class AdminClient:
    """A client of the admin interface of a serving with versions 1-1, 1-2 and 1-3."""

    def __init__(self, token: AdminToken | Keyring | None = None) -> None:
        clock = FakeClock(10_000)
        self.versions = LoadedVersions(cast(Version, FakeVersion("0-0")), 3, now_ms=clock.now_ms)
        for seq in (1, 2, 3):
            self.versions.install(cast(Version, FakeVersion(f"1-{seq}")), committed_ms=1000 * seq)
        self.recent, self.stats = RecentRequests(), InterleavingStats("click")
        app = make_admin_interface(self.versions, self.recent, self.stats, clock, token)
        self.http = TestClient(app, base_url="http://testserver/admin/v1", headers=KEY)

    def ok(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.request(method, path, **({"json": body} if body else {}))
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def admin() -> Iterator[AdminClient]:
    yield AdminClient()


def states(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(v["name"], v["state"]) for v in result["versions"]]


def test_versions_are_listed_with_state_age_and_reasons_of_refusal(admin: AdminClient) -> None:
    admin.versions.refuse("manifests/00000004", "damaged", "a checksum differs")
    result = admin.ok("GET", "/versions")
    assert result["served"] == "1-3" and result["activated"] is None
    times = {"committed_ms": 3000, "installed_ms": 10_000, "age_s": 7.0}
    assert result["versions"][0] == {"name": "1-3", "state": "served", "roles": [], **times}
    assert states(result) == [("1-3", "served"), ("1-2", "held"), ("1-1", "held")]
    why = {"reason": "damaged", "message": "a checksum differs", "at_ms": 10_000}
    assert result["refused"] == [{"name": "manifests/00000004", **why}]


def test_a_loaded_version_is_activated_and_resumed(admin: AdminClient) -> None:
    result = admin.ok("POST", "/versions/1-1/activate")
    assert states(result) == [("1-3", "held"), ("1-2", "held"), ("1-1", "served")]
    assert admin.versions.served.version.name == "1-1"
    assert admin.ok("POST", "/versions/resume")["served"] == "1-3"


@pytest.mark.parametrize("name", ["canary", "shadow", "interleave"])
def test_a_split_is_set_shown_and_removed(admin: AdminClient, name: str) -> None:
    result = admin.ok("PUT", f"/{name}", version="previous", share=0.25)
    assert (result["version"], result["share"], result["means"]) == ("previous", 0.25, "1-2")
    assert admin.ok("GET", f"/{name}") == result and getattr(admin.versions.routing, name).share == 0.25
    assert admin.ok("GET", "/versions")["versions"][1]["roles"] == [name]
    result = admin.ok("PUT", f"/{name}", share=0)
    assert (result["version"], result["share"], result["means"]) == (None, 0, None)


def test_interleaving_reports_wins(admin: AdminClient) -> None:
    admin.stats.record_list(key_bytes(1, 0, "r"), "r", Pair("1-3", "1-2"), [1, 2], [0, 1])
    click = {"request_id": "r", "user_id": 1, "item_id": 2, "action": "click"}
    admin.stats.record_engagements(EngagementParser(SCHEMA).parse(json.dumps(click).encode(), 1).records)
    result = admin.ok("GET", "/interleave")
    assert result["lists"] == result["engagements"] == 1
    won_by = {"served": 0, "rival": 1, "tie": 0}
    assert result["results"] == [{"served": "1-3", "rival": "1-2", "won_by": won_by}]


def test_slow_requests_are_listed_without_features(admin: AdminClient) -> None:
    admin.recent.add(
        ScoredRequest(
            request_id="r-1",
            key=b"k",
            model_version="1-3",
            ro=b"secret",
            nro=b"",
            item_ids=np.arange(3),
            time_ms=5,
            scores_nT=np.zeros((3, 1), np.float32),
            took_s=0.25,
        )
    )
    slow = {"request_id": "r-1", "time_ms": 5, "took_ms": 250.0, "candidates": 3, "model_version": "1-3"}
    assert admin.ok("GET", "/slow") == {"requests": [slow]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/version", b"", 404),
        ("POST", "/versions", b"", 405),
        ("GET", "/versions/1-1/activate", b"", 405),
        ("POST", "/versions/1-9/activate", b"", 404),
        ("POST", "/versions/newest/activate", b"", 400),
        ("PUT", "/canary", b"", 400),
        ("PUT", "/canary", b"\xff", 400),
        ("PUT", "/canary", b'{"version": "newest", "share": 2}', 400),
        ("PUT", "/canary", b'{"version": "best", "share": 1}', 400),
        ("PUT", "/canary", b'{"version": "1-9", "share": 1}', 404),
        ("PUT", "/canary", b'{"version": "newest", "part": 1}', 400),
        ("PUT", "/canary", b'{"version": "newest"}', 400),
        ("PUT", "/canary", b"{}", 400),
        ("PUT", "/canary", b'{"version": "newest", "share": 0.1, "share": 0.9}', 400),
        ("PUT", "/canary", b'{"version": "' + b"x" * (70 << 10), 413),
    ],
)
def test_an_invalid_call_is_refused_in_one_sentence_and_changes_nothing(
    admin: AdminClient, method: str, path: str, body: bytes, status: int
) -> None:
    admin.ok("PUT", "/canary", version="previous", share=0.25)
    before = admin.ok("GET", "/versions"), admin.ok("GET", "/canary")
    answer = admin.http.request(method, path, content=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and message and "\n" not in message
    assert (admin.ok("GET", "/versions"), admin.ok("GET", "/canary")) == before


@pytest.mark.parametrize(
    "header", ["", "Bearer", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0"]
)
def test_calls_without_the_token_are_refused_and_not_logged(
    admin: AdminClient, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "roostream"):
        for path in ("/versions", "/no"):
            answer = admin.http.get(path, headers={"authorization": header})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "unauthorized"
        admin.ok("POST", "/versions/resume")
    assert TOKEN[:-1] not in caplog.text


def test_the_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f" {TOKEN}\nmore\n")
    token = read_token(str(tmp_path / "token"))
    for scheme in (b"Bearer", b"bearer", b"BEARER "):
        token.check(scheme + b" " + TOKEN.encode())
    assert TOKEN not in repr(vars(token))
    with pytest.raises(RequestError):
        AdminToken(TOKEN).check(b"Bearer \xff")


def test_with_keys_the_port_says_what_is_wrong_with_a_key(tmp_path: Path) -> None:
    (web, web_key), (ops, ops_key) = new_key("web", ["rank"], 0), new_key("ops", ["admin"], 0)
    write_keys(tmp_path / "keys.json", [web_key, ops_key])
    port = AdminClient(Keyring(tmp_path / "keys.json"))

    def answer(text: str) -> tuple[int, str]:
        found = port.http.get("/versions", headers={"authorization": f"Bearer {text}"})
        return found.status_code, found.text

    assert answer(ops)[0] == 200
    status, text = answer(web)
    assert status == 403 and "scope admin" in text
    status, text = answer(TOKEN)
    assert status == 401 and "admin_token_file" not in text, "there is no such file"


@pytest.mark.parametrize("content", [None, b"", b"short\n", b"\xff\xfe" * 20])
def test_an_unusable_token_file_is_refused_without_printing_it(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingError, match="key 'admin_token_file': expected a f") as error:
        read_token(str(file))
    assert "short" not in str(error.value)


def test_with_a_certificate_the_port_accepts_only_tls(serving: InProcessServing, tmp_path: Path) -> None:
    server_ca, client_ca = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    certificate, key = server_ca.issue("serving")
    files = TlsSettings(
        tls_certificate=certificate, tls_key=key, tls_client_ca=str(client_ca.pem), tls_client_required=True
    )
    token = tmp_path / "token"
    token.write_text(TOKEN)
    friend = tmp_path / "friend.both"
    friend.write_text("".join(Path(file).read_text() for file in client_ca.issue("friend")))
    with run_admin_server(serving, TlsContext(files)) as port_number:
        command = ["versions", "list", "--admin", f"127.0.0.1:{port_number}", "--token-file", str(token)]
        options = ["--ca", str(server_ca.pem), "--certificate", str(friend)]
        assert CliRunner().invoke(cli, [*command, *options]).output.startswith("0-0  served")
        for wrong, error in (
            ([], UnavailableError),  # without TLS
            (["--ca", str(server_ca.pem)], UnavailableError),  # no client certificate
            (
                ["--ca", str(client_ca.pem), "--certificate", str(friend)],
                UnavailableError,
            ),  # another authority
            (["--ca", str(tmp_path / "none.pem")], ConfigError),
        ):
            assert isinstance(CliRunner().invoke(cli, [*command, *wrong]).exception, error), wrong


def test_an_early_answer_does_not_keep_its_connection(
    serving: InProcessServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.2)
    head = f"GET /admin/v1/versions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
    with (
        run_admin_server(serving) as port_number,
        socket.create_connection(("127.0.0.1", port_number), timeout=30) as client,
    ):
        client.sendall(f"{head}content-length: 1000000000\r\n\r\n{{".encode())
        status, received = read_answer(client)
        assert status == 200 and received.count(b"HTTP/1.1") == 1
