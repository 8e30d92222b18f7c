"""Redis with access control and TLS: the users that docs/operations/security.md defines have exactly the
permissions that they need."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from roostream.errors import UnavailableError
from roostream.runtime import redis_client
from roostream.runtime.clock import FakeClock
from roostream.schema.schema import Schema
from serving.online_features.config import FeaturesConfig
from serving.online_features.hydration import Hydrator
from serving.online_features.store import FeatureStore
from serving.online_features.updater import FeatureMetrics, FeatureUpdater
from tests.certificates import Authority
from tests.serving.online_features.feature_cases import (
    T0,
    MemoryEvents,
    RedisServer,
    engagement,
    find_redis,
    impression,
    records_of,
)

pytestmark = pytest.mark.skipif(
    find_redis() is None, reason="no redis-server on PATH nor in the environment: run `make setup`"
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operations" / "security.md"
PASSWORDS = {"updater": "up/date@r", "serving": "s3rv?ng"}


def users() -> dict[str, list[str]]:
    """Return the access rules of each user, as the page lists them."""
    return {
        name: rules.split()
        for name, rules in re.findall(r"^ACL SETUSER (\w+) (.+)$", PAGE.read_text(), re.MULTILINE)
    }


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    root = redis_client.client(server.url, timeout_s=2.0)
    for name, rules in users().items():
        user_rules = [rule.replace("site.", "x.").replace("PASSWORD", PASSWORDS[name]) for rule in rules]
        root.execute_command("ACL", "SETUSER", name, *user_rules)
    root.execute_command("ACL", "SETUSER", "root", "on", ">root", "allkeys", "+@all")
    root.execute_command("ACL", "SETUSER", "default", "off")
    yield server
    server.stop()


def url(tmp_path: Path, address: str, user: str, ca: str = "", password: str = "") -> str:
    file = tmp_path / f"{user}.password"
    file.write_text(f"{password or PASSWORDS[user]}\n")
    common = {"bootstrap": "h:1", "schema": "s.toml", "store": "s", "redis_password_file": str(file)}
    return FeaturesConfig(**common, redis=address, redis_user=user, redis_ca=ca).redis_url  # type: ignore[arg-type]


def update(address: str) -> None:
    updater = updater_of(address)
    updater.open()
    updater.step(0)


def updater_of(address: str) -> FeatureUpdater:
    store = FeatureStore(redis_client.client(address, timeout_s=2.0), address, "x.")
    events = [impression(5, [7, 8], T0), engagement(5, 8, T0 + 1000)]
    metrics = FeatureMetrics(CollectorRegistry())
    return FeatureUpdater(Schema(), store, MemoryEvents(records_of(events)), "c", metrics)


def test_serving_has_read_only_access_to_redis(redis: RedisServer, tmp_path: Path) -> None:
    assert set(users()) == set(PASSWORDS)
    update(url(tmp_path, redis.url, "updater"))
    serving_url = url(tmp_path, redis.url, "serving")
    assert Hydrator(serving_url, "x.", Schema(), timeout_s=5.0).read(5, [7, 8], T0 + 2000)[1][
        "user_clicks"
    ].tolist() == [0, 1]
    with pytest.raises(UnavailableError, match="no permissions"):
        update(serving_url)
    with pytest.raises(UnavailableError, match="no permissions"):
        Hydrator(serving_url, "other.", Schema()).read(5, [7], T0)
    for command in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("GET", "other")):
        for name in PASSWORDS:
            address = url(tmp_path, redis.url, name)
            with pytest.raises(UnavailableError, match="no permissions"), redis_client.redis_errors(address):
                redis_client.client(address, timeout_s=2.0).execute_command(*command)


def test_a_wrong_redis_password_fails_without_printing_it(redis: RedisServer, tmp_path: Path) -> None:
    for address in (redis.url, url(tmp_path, redis.url, "serving", password="hunter2")):
        with pytest.raises(UnavailableError) as refused:
            Hydrator(address, "x.", Schema()).read(5, [7], T0)
        assert "hunter2" not in str(refused.value)


class Proxy:
    """A proxy in front of the server at `port`, which may be changed for later connections. With a
    `certificate` it adds TLS, which the server does not have. Call `close` at the end."""

    def __init__(self, port: int, certificate: tuple[str, str] | None = None) -> None:
        context = None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
        self.port, self._opened = port, contextlib.ExitStack()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._opened.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(plain):
            client = self._context.wrap_socket(plain, server_side=True) if self._context else plain
            server = socket.create_connection(("127.0.0.1", self.port))
            self._opened.callback(client.close)
            self._opened.callback(server.close)
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()
            _copy(client, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def test_no_command_is_refused_that_a_connection_sends(redis: RedisServer, tmp_path: Path) -> None:
    """By default it sends CLIENT SETINFO. Redis 7.0 refuses rules with it, because it does not know it."""
    update(url(tmp_path, redis.url, "updater"))
    root = redis_client.client(redis.url.replace("://", "://root:root@"), timeout_s=2.0)
    assert root.acl_log() == []


def test_redis_over_tls_must_present_a_certificate_for_its_host(redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    trusted, other = Authority(tmp_path, "ours"), Authority(tmp_path / "theirs", "theirs")
    proxy = Proxy(redis.port, trusted.issue("redis"))
    port = proxy.address.partition(":")[2]
    try:
        update(url(tmp_path, f"rediss://{proxy.address}/0", "updater", str(trusted.pem)))
        for address, ca in (
            (proxy.address, other),
            (f"localhost:{port}", trusted),
        ):  # another authority; a host that the certificate is not for
            with pytest.raises(UnavailableError, match="certificate"):
                update(url(tmp_path, f"rediss://{address}/0", "updater", str(ca.pem)))
    finally:
        proxy.close()


def test_an_updater_leaves_a_server_that_became_a_replica(tmp_path: Path) -> None:
    """After a failover the address leads to the new primary, but the old connection still leads to a server
    that refuses writes."""
    old, new = RedisServer(tmp_path), RedisServer(tmp_path)
    with contextlib.ExitStack() as opened:
        for server in (old, new):
            opened.callback(server.stop)
            server.start()
        proxy = Proxy(old.port)
        opened.callback(proxy.close)
        address = f"redis://{proxy.address}/0"
        updater = updater_of(address)
        updater.open()
        redis_client.client(old.url, timeout_s=5.0).replicaof("127.0.0.1", new.port)
        proxy.port = new.port
        with contextlib.suppress(UnavailableError):
            updater.step(0)
        updater.open()
        assert updater.step(0) == 2
        assert redis_client.client(new.url, timeout_s=5.0).hget("x.features:at", "cluster") == b"c"


def test_a_redis_cluster_is_named_as_such(tmp_path: Path) -> None:
    while (server := RedisServer(tmp_path, "--cluster-enabled", "yes")).port + 10_000 > 65_535:
        pass  # nodes of a cluster also listen at this port
    server.start()
    try:
        root = redis_client.client(server.url, timeout_s=5.0)
        hydrator = Hydrator(server.url, "x.", Schema(), clock=FakeClock(), timeout_s=5.0)
        with pytest.raises(UnavailableError, match="not in cluster mode"):
            hydrator.read(5, [7, 8], T0)
        root.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        with pytest.raises(UnavailableError, match="not in cluster mode"):
            update(server.url)
    finally:
        server.stop()
