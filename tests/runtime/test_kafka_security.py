"""A real broker that asks who one is: our clients, and the client in Flink's connector, which reads the job's own properties."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from infra import kafka_broker
from infra.home import Home
from infra.jars import CONNECTOR_JARS, KAFKA_JARS, find_java, require_jars
from infra.options import StackOptions
from infra.ports import HOST, Ports
from infra.prepare import compile_java
from infra.supervisor import Supervisor
from roo.errors import SetupError
from runtime.kafka import clients
from runtime.kafka.broker import ALLOWED_URLS, Broker, KafkaSecurity
from runtime.kafka.topic_admin import TopicAdmin
from runtime.kafka.topics import ROWS, TopicSettings, name_of
from tests.certificates import Authority

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

USER, PASSWORD = "worker", 'pa"ss\\word; ${x}'
_SECURITY = "org.apache.kafka.common.security"
_PLAIN = f'{_SECURITY}.plain.PlainLoginModule required username="admin" password="a" user_{USER}="{{password}}";'
_OAUTH = f'{_SECURITY}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="admin";'
_PROBE = """
import java.io.FileReader;
import java.util.Properties;
import org.apache.flink.kafka.shaded.org.apache.kafka.clients.admin.AdminClient;

public class Probe {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        try (FileReader file = new FileReader(args[0])) {
            settings.load(file);
        }
        try (AdminClient client = AdminClient.create(settings)) {
            System.out.println("topics " + client.listTopics().names().get());
        }
    }
}
"""


class Tokens(ThreadingHTTPServer):
    """Gives a token to whoever shows the client's id and secret; unsigned, as a broker without keys takes it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__((HOST, 0), _TokenHandler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/token"


class _TokenHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Tokens)
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        who = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        self.server.asked.append(who)
        now_s = int(time.time())
        claims = {"sub": who.partition(":")[0], "iat": now_s, "exp": now_s + 3600}
        parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "none"}, claims)]
        body = json.dumps({"access_token": f"{'.'.join(parts)}.", "token_type": "Bearer", "expires_in": 3600}).encode()
        self.send_response(200 if form == {"grant_type": ["client_credentials"]} else 400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Guarded(NamedTuple):
    """A broker with a listener for passwords and tokens, and one for certificates."""

    sasl: str
    ssl: str
    authority: Authority
    tokens: Tokens
    folder: Path


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def properties(folder: Path, authority: Authority, sasl: int, ssl: int) -> dict[str, str]:
    """What is set beside the settings of the stack's own broker."""
    certificate, key = authority.issue("broker")
    (folder / "broker.pem").write_text(Path(key).read_text() + Path(certificate).read_text())
    plain = _PLAIN.format(password=PASSWORD.replace("\\", "\\\\").replace('"', '\\"'))
    return {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,GUARDED:SASL_SSL,SHOWN:SSL",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.guarded.plain.sasl.jaas.config": plain,
        "listener.name.guarded.scram-sha-512.sasl.jaas.config": f"{_SECURITY}.scram.ScramLoginModule required;",
        "listener.name.guarded.oauthbearer.sasl.jaas.config": _OAUTH,
        "listener.name.shown.ssl.client.auth": "required",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "broker.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.pem),
        "listeners.more": f"GUARDED://{HOST}:{sasl},SHOWN://{HOST}:{ssl}",
    }


OAUTH_JARS = ("jackson-annotations", "jackson-core", "jackson-databind")
"""Of the broker's; beside jose4j, what the connector's client asks for with OAUTHBEARER and does not bring."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    try:
        require_jars()
    except SetupError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("guarded")
    authority, tokens, ports, home = Authority(folder, "ours"), Tokens(), Ports(), Home(folder / "home")
    home.make()
    plain, controller, sasl, ssl = (ports.draw() for _ in range(4))
    supervisor = Supervisor(lambda: None)
    whole = kafka_broker.program(home, StackOptions(), dict(os.environ), find_java(), plain, controller)

    def prepare() -> None:
        whole.prepare()
        conf = home.conf / "kafka.properties"
        more = properties(folder, authority, sasl, ssl)
        listeners = more.pop("listeners.more")
        lines = [f"{line},{listeners}" if "listeners=PLAINTEXT" in line else line for line in conf.read_text().splitlines()]
        conf.write_text("\n".join([*lines, *(f"{key}={_escaped(value)}" for key, value in more.items())]) + "\n")

    with contextlib.ExitStack() as closing:
        threading.Thread(target=tokens.serve_forever, daemon=True).start()
        closing.callback(tokens.server_close)
        closing.callback(tokens.shutdown)
        closing.callback(ports.release)
        closing.callback(supervisor.close)
        supervisor.open()
        supervisor.want([dataclasses.replace(whole, prepare=prepare)])
        assert supervisor.wait(lambda: supervisor.slots["kafka"].state == "ready", 60), home.log("kafka").read_text()[-2000:]
        admin = clients.admin(Broker(f"{HOST}:{plain}"))
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        told = admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, scram, PASSWORD.encode())])
        for future in told.values():
            future.result(10)
        yield Guarded(f"{HOST}:{sasl}", f"{HOST}:{ssl}", authority, tokens, folder)
        supervisor.stop(["kafka"])


def broker_of(guarded: Guarded, how: str) -> Broker:
    if how == "SSL":
        certificate, key = guarded.authority.issue(USER)
        security = KafkaSecurity(protocol="SSL", ca=str(guarded.authority.pem), certificate=certificate, key=key)
        return Broker(guarded.ssl, security)
    token = {"token_url": guarded.tokens.url} if how == "OAUTHBEARER" else {}
    login: dict[str, Any] = {"mechanism": how, "username": USER, "password": PASSWORD, **token}
    return Broker(guarded.sasl, KafkaSecurity(protocol="SASL_SSL", ca=str(guarded.authority.pem), **login))


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-512", "OAUTHBEARER", "SSL"])
def test_our_clients_make_topics_write_and_read(guarded: Guarded, how: str) -> None:
    broker, prefix = broker_of(guarded, how), f"{how.lower()}."
    clients.wait_for_broker(broker, timeout_s=30)
    TopicAdmin(clients.admin(broker), prefix, 2, TopicSettings()).create()
    producer = clients.producer(broker)
    clients.send(producer, name_of(prefix, ROWS), key=b"k", value=b"v", timestamp_ms=int(time.time() * 1000), partition=0)
    assert producer.flush(20) == 0
    consumer = clients.consumer(broker, "g")
    try:
        assert clients.end_offsets(consumer, name_of(prefix, ROWS), range(2)) == {0: 1, 1: 0}
    finally:
        consumer.close()


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password_is_refused_and_not_told(guarded: Guarded, how: str, caplog: pytest.LogCaptureFixture) -> None:
    security = KafkaSecurity(
        protocol="SASL_SSL",
        ca=str(guarded.authority.pem),
        mechanism=how,
        username=USER,
        password="wrong-one",  # type: ignore[arg-type]
    )
    with caplog.at_level("DEBUG"), pytest.raises(KafkaException):
        clients.admin(Broker(guarded.sasl, security)).list_topics(timeout=3)
    assert "wrong-one" not in caplog.text


@pytest.fixture(scope="module")
def probe(guarded: Guarded) -> str:
    """The class path of a program that lists topics by the client in Flink's connector."""
    classes, source = guarded.folder / "classes", guarded.folder / "Probe.java"
    classes.mkdir()
    source.write_text(_PROBE)
    of_broker = [jar for name in ("slf4j-api", *OAUTH_JARS) for jar in KAFKA_JARS.glob(f"{name}-[0-9]*.jar")]
    libraries = [*CONNECTOR_JARS.glob("*.jar"), *of_broker]
    compile_java([source], libraries, classes)
    return os.pathsep.join(str(path) for path in (classes, *libraries))


def listed(guarded: Guarded, classpath: str, broker: Broker, *flags: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "request.timeout.ms": "5000",
        "default.api.timeout.ms": "15000",
        **broker.security.java(),
    }
    file = guarded.folder / "probe.properties"
    file.write_text("".join(f"{key}={_escaped(value)}\n" for key, value in settings.items()))
    command = (str(find_java()), *flags, "-cp", classpath, "Probe", str(file))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-512", "SSL"])
def test_the_client_in_flinks_connector_takes_the_jobs_properties(guarded: Guarded, probe: str, how: str) -> None:
    done = listed(guarded, probe, broker_of(guarded, how))
    assert done.returncode == 0 and "topics [" in done.stdout, done.stderr[-1500:]


def test_for_tokens_the_client_in_flinks_connector_wants_a_property_and_finds_its_classes(guarded: Guarded, probe: str) -> None:
    """As docs/operations/security.md says; jars that it asks for are ours, and the image has them. It fetches a token and refuses
    it, since those of this test are unsigned, which our own clients and the broker take here."""
    if not list(CONNECTOR_JARS.glob("jose4j-*.jar")):
        pytest.skip("jose4j is not here: run make setup")
    broker = broker_of(guarded, "OAUTHBEARER")
    done = listed(guarded, probe, broker)
    assert done.returncode and ALLOWED_URLS in done.stderr
    done = listed(guarded, probe, broker, f"-D{ALLOWED_URLS}={guarded.tokens.url}")
    assert "ClassNotFound" not in done.stderr and "NoClassDefFound" not in done.stderr, done.stderr[-1500:]
    assert "expected three sections (header, payload, and signature)" in done.stderr, done.stderr[:1500]
    page = Path(__file__).resolve().parents[2] / "docs" / "operations" / "security.md"
    assert ALLOWED_URLS in page.read_text()
    home = (Path(__file__).resolve().parents[2] / "infra/image/flink-home.sh").read_text(encoding="utf-8")
    assert all(f"/jars/kafka/{name}-*.jar" in home for name in OAUTH_JARS)
