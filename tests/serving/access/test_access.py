"""Access control: which routes a bearer key or a client certificate may call, in process and over real
sockets."""

from __future__ import annotations

import dataclasses
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from roostream.errors import ConfigError
from roostream.runtime.tls import TlsContext, TlsSettings
from serving.access.bearer_keys import Keyring, new_key, write_keys
from serving.access.route_scopes import required_scope
from serving.client import Client, RetryPolicy, ServingError
from serving.http.app import HttpInterface
from tests.certificates import Authority, client_context
from tests.serving.live_serving import run_live_serving
from tests.serving.serving_cases import BODY, SCHEMA, InProcessServing, build_serving, config_of
from tests.serving.serving_fakes import FakeRows

CLICK = {"request_id": "r-1", "user_id": 17, "item_id": 8, "action": "click"}
PATIENT = RetryPolicy(deadline_ms=60_000)


def replace_parts(serving: InProcessServing, **parts: Any) -> InProcessServing:
    return InProcessServing(dataclasses.replace(serving.context, **parts), serving.waiting_for)


@pytest.fixture
def with_keys(tmp_path: Path) -> Iterator[tuple[TestClient, dict[str, str], InProcessServing]]:
    """Return (HTTP client, key by scope, serving)."""
    new_keys = {scope: new_key(scope, [scope], 0) for scope in ("rank", "engage", "metrics", "admin")}
    write_keys(tmp_path / "keys.json", [key for _, key in new_keys.values()])
    serving = replace_parts(build_serving(tmp_path, FakeRows(SCHEMA)), keys=Keyring(tmp_path / "keys.json"))
    yield (
        TestClient(HttpInterface(serving.context)),
        {scope: text for scope, (text, _) in new_keys.items()},
        serving,
    )
    serving.close()


@pytest.mark.parametrize(
    ("method", "path", "scopes"),
    [
        ("POST", "/v1/rank", {"rank"}),
        ("POST", "/v2/models/default/infer", {"rank"}),
        ("POST", "/v1/explain", {"rank"}),
        ("POST", "/v1/retrieve", {"rank"}),
        ("POST", "/v1/recommend", {"rank"}),
        ("POST", "/v1/engagements", {"engage"}),
        ("GET", "/page/items.json", {"rank"}),
        ("GET", "/page/rescored.json", {"rank"}),
        ("GET", "/metrics", {"metrics"}),
        ("GET", "/openapi.json", {"rank", "engage", "metrics", "admin"}),
        ("GET", "/v2/models/default", {"rank", "engage", "metrics", "admin"}),
        ("GET", "/nowhere", {"rank", "engage", "metrics", "admin"}),
    ],
)
def test_a_key_gives_access_to_the_routes_of_its_scopes(
    with_keys: Any, method: str, path: str, scopes: set[str]
) -> None:
    http, keys, serving = with_keys
    bodies = {"/v1/engagements": CLICK, "/v1/rank": BODY, "/v1/explain": BODY}
    body = bodies.get(path, {"inputs": [{"name": "item_id", "shape": [1], "datatype": "INT64", "data": [1]}]})
    for scope, key in keys.items():
        answer = http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code in (200, 404)) == (scope in scopes), (scope, answer.text)
        assert scope in scopes or answer.status_code == 403
    refused = http.request(method, path, json=body)
    assert (
        refused.status_code == 401
        and refused.headers["www-authenticate"] == "Bearer"
        and refused.headers["x-request-id"]
    )
    error = refused.json()["error"]
    assert "authorization: Bearer KEY" in (error if path.startswith("/v2") else error["message"])
    get_metric = serving.context.metrics.registry.get_sample_value
    assert get_metric("roostream_serving_requests_total", {"route": "access", "status": "401"}) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/page/items.json"), ("POST", "/v1/rank"), ("GET", "/docs/favicon.png")],
)
def test_a_line_feed_at_the_end_of_a_path_opens_no_route(with_keys: Any, method: str, path: str) -> None:
    http, keys, _ = with_keys
    for key in keys.values():
        answer = http.request(method, f"{path}%0A", json=BODY, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 404, answer.headers


def test_every_traffic_route_requires_a_scope(with_keys: Any) -> None:
    http, keys, _ = with_keys
    key = {"authorization": f"Bearer {keys['rank']}"}
    paths = http.get("/openapi.json", headers=key).json()["paths"]
    traffic = [path for path, operations in paths.items() if "post" in operations]
    assert len(traffic) >= 3 and {required_scope(path, frozenset()) for path in traffic} == {"rank", "engage"}


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"])
def test_probes_work_without_a_key(with_keys: Any, path: str) -> None:
    assert with_keys[0].get(path).status_code == 200


def test_an_unauthorized_call_is_neither_logged_nor_scored(with_keys: Any) -> None:
    http, keys, serving = with_keys
    assert (
        http.post("/v1/rank", json=BODY, headers={"authorization": f"Bearer {keys['engage']}"}).status_code
        == 403
    )
    assert (
        serving.records() == []
        and serving.context.metrics.registry.get_sample_value("roostream_serving_keys") == 4
    )


def test_a_call_without_a_key_is_401_also_while_the_process_is_overloaded(with_keys: Any) -> None:
    http, keys, _ = with_keys
    http.app.gate.in_flight = http.app.gate.max_in_flight
    statuses = [
        http.post("/v1/rank", json=BODY, headers={"authorization": f"Bearer {key}"}).status_code
        for key in ("", keys["engage"], keys["rank"])
    ]
    assert statuses == [401, 403, 429]


def test_the_client_sends_its_key(tmp_path: Path) -> None:
    text, key = new_key("web", ["rank"], 0)
    write_keys(tmp_path / "keys.json", [key])
    serving = replace_parts(build_serving(tmp_path, FakeRows(SCHEMA)), keys=Keyring(tmp_path / "keys.json"))
    with run_live_serving(serving) as live:
        with Client(live.url, key=text, policy=PATIENT) as client:
            assert client.rank({"candidates": [{"item_id": 1}]}).items == [1]
            with pytest.raises(ServingError) as forbidden:
                client.engage(CLICK)  # type: ignore[arg-type]
        with Client(live.url, policy=PATIENT) as client, pytest.raises(ServingError) as unknown:
            client.rank({"candidates": [{"item_id": 1}]})
    assert (forbidden.value.code, unknown.value.code) == ("forbidden", "unauthorized")


def rank_over_tls(url: str, tls: ssl.SSLContext) -> list[Any]:
    with Client(
        url.replace("http:", "https:"), policy=RetryPolicy(deadline_ms=60_000, retries=0), tls=tls
    ) as client:
        return client.rank({"candidates": [{"item_id": 1}]}).items


def test_a_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    certificate, key = old.issue("serving")
    tls = TlsContext(TlsSettings(tls_certificate=certificate, tls_key=key))
    with run_live_serving(replace_parts(build_serving(tmp_path, FakeRows(SCHEMA)), tls=tls)) as live:
        assert rank_over_tls(live.url, client_context(old)) == [1]
        with pytest.raises(ServingError, match="CERTIFICATE_VERIFY_FAILED"):
            rank_over_tls(live.url, client_context(new))
        Path(key).write_bytes(Path(new.issue("other")[1]).read_bytes())
        tls.poll()
        assert rank_over_tls(live.url, client_context(old)) == [1], (
            "a key that does not match the certificate is ignored"
        )
        assert "stay in use" in caplog.text
        new.issue("serving")
        tls.poll()
        assert rank_over_tls(live.url, client_context(new)) == [1]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_changed_authority_of_clients_applies_without_a_restart(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    server_ca, old, new = (Authority(tmp_path, name) for name in ("ours", "old", "new"))
    certificate, key = server_ca.issue("serving")
    tls = TlsContext(
        TlsSettings(
            tls_certificate=certificate, tls_key=key, tls_client_ca=str(old.pem), tls_client_required=True
        )
    )
    before, after = (client_context(server_ca, *ca.issue(f"of-{ca.name}")) for ca in (old, new))
    before.minimum_version = before.maximum_version = version
    with run_live_serving(replace_parts(build_serving(tmp_path, FakeRows(SCHEMA)), tls=tls)) as live:

        def connect(session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
            """Send a request with this session of an earlier connection; return the session of this one."""
            plain = socket.create_connection(live.address, timeout=30)
            with before.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                if not connection.recv(1 << 16).startswith(b"HTTP/1.1 200"):
                    raise ConnectionError("refused")
                return connection.session

        assert rank_over_tls(live.url, before) == [1]
        with pytest.raises(ServingError):
            rank_over_tls(live.url, after)
        session = connect()
        old.pem.write_bytes(new.pem.read_bytes())
        tls.poll()
        assert rank_over_tls(live.url, after) == [1]
        with pytest.raises(ServingError):
            rank_over_tls(live.url, before)
        with pytest.raises(OSError):
            connect(session)


@pytest.mark.parametrize("required", [True, False])
def test_client_certificates_are_required_if_configured(tmp_path: Path, required: bool) -> None:
    server_ca, client_ca = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    certificate, key = server_ca.issue("serving")
    files = TlsSettings(
        tls_certificate=certificate,
        tls_key=key,
        tls_client_ca=str(client_ca.pem),
        tls_client_required=required,
    )
    with run_live_serving(
        replace_parts(build_serving(tmp_path, FakeRows(SCHEMA)), tls=TlsContext(files))
    ) as live:
        assert rank_over_tls(live.url, client_context(server_ca, *client_ca.issue("friend"))) == [1]
        with pytest.raises(ServingError):
            rank_over_tls(live.url, client_context(server_ca, *server_ca.issue("stranger")))
        if required:
            with pytest.raises(ServingError):
                rank_over_tls(live.url, client_context(server_ca))
        else:
            assert rank_over_tls(live.url, client_context(server_ca)) == [1]


@pytest.mark.parametrize(
    "changes", [{"certificate": "none.crt"}, {"client_ca": "none.pem"}, {"key": "swapped"}]
)
def test_unusable_key_or_certificate_files_stop_the_start(tmp_path: Path, changes: dict[str, str]) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("serving")
    other = authority.issue("other")[1]
    files = TlsSettings(
        **{
            "tls_certificate": certificate,
            "tls_key": key,
            **{f"tls_{k}": other if v == "swapped" else v for k, v in changes.items()},
        }
    )
    with pytest.raises(ConfigError, match="expected"):
        TlsContext(files)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"listen": "0.0.0.0:80"}, "give it tls_certificate and keys_file, or set insecure = true"),
        ({"listen": "0.0.0.0:80", "keys_file": "k"}, "set insecure = true"),
        ({"listen": "0.0.0.0:80", "tls_certificate": "c", "tls_key": "k"}, "set insecure = true"),
        (
            {"listen": "0.0.0.0:80", "tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"},
            "set insecure = true",
        ),
        ({"listen": "0.0.0.0:80", "insecure": True}, ""),
        ({"listen": "0.0.0.0:80", "keys_file": "f", "tls_certificate": "c", "tls_key": "k"}, ""),
        (
            {
                "listen": "0.0.0.0:80",
                "tls_certificate": "c",
                "tls_key": "k",
                "tls_client_ca": "a",
                "tls_client_required": True,
            },
            "",
        ),
        ({"tls_certificate": "c"}, "expected tls_certificate with tls_key"),
        ({"tls_key": "c"}, "expected tls_certificate with tls_key"),
        ({"tls_client_ca": "c"}, "only beside them"),
        ({"tls_client_required": True}, "tls_client_ca"),
        ({"admin_listen": "127.0.0.1:1"}, "admin_token_file"),
        ({"admin_listen": "0.0.0.0:1", "keys_file": "f"}, "give it tls_certificate, or set insecure = true"),
        ({"admin_listen": "0.0.0.0:1", "keys_file": "f", "tls_certificate": "c", "tls_key": "k"}, ""),
        (
            {"metrics_host": "0.0.0.0", "keys_file": "f", "tls_certificate": "c", "tls_key": "k"},
            "tls_client_required",
        ),
        ({"admin_listen": "127.0.0.1:1", "keys_file": "f"}, ""),
    ],
)
def test_a_public_port_requires_keys_and_tls(tmp_path: Path, settings: dict[str, Any], refused: str) -> None:
    if not refused:
        assert config_of(tmp_path, **settings).listen
        return
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, **settings)
    assert refused in str(caught.value)
