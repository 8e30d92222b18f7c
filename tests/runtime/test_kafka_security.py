"""Our clients and Flink's Kafka client against a real broker that requires authentication. Flink's client
uses the properties that the job passes to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from cryptography.hazmat.primitives.asymmetric import rsa

from infra import kafka_broker
from infra.home import Home
from infra.jars import CONNECTOR_JARS, KAFKA_JARS, find_java, require_jars
from infra.options import StackOptions
from infra.ports import HOST, Ports
from infra.prepare import compile_java
from infra.supervisor import Supervisor
from roostream.errors import ConfigError, SetupError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import ALLOWED_URLS, Broker, KafkaSecurity
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import ROWS, TopicSettings, name_of
from tests.certificates import Authority
from tests.runtime.token_server import AUDIENCE, TokenServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

USER, PASSWORD = "worker", 'pa"ss\\word; ${x}'
_SECURITY = "org.apache.kafka.common.security"
_PLAIN = (
    f'{_SECURITY}.plain.PlainLoginModule required username="admin" password="a" user_{USER}="{{password}}";'
)
_OAUTH = f"{_SECURITY}.oauthbearer"
_ALLOWED = "org.apache.kafka.sasl.oauthbearer.allowed.urls"
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


class SecuredBroker(NamedTuple):
    """A broker with one listener for passwords and tokens, and one for client certificates."""

    sasl: str
    ssl: str
    authority: Authority
    tokens: TokenServer
    folder: Path


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def broker_properties(folder: Path, authority: Authority, keys: str, sasl: int, ssl: int) -> dict[str, str]:
    """Broker properties beside those of the stack's own broker. `keys`: URL of the keys that verify
    tokens."""
    certificate, key = authority.issue("broker")
    (folder / "broker.pem").write_text(Path(key).read_text() + Path(certificate).read_text())
    listener = "listener.name.guarded"
    plain = _PLAIN.format(password=PASSWORD.replace("\\", "\\\\").replace('"', '\\"'))
    return {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
        "GUARDED:SASL_SSL,SHOWN:SSL",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.guarded.plain.sasl.jaas.config": plain,
        f"{listener}.scram-sha-512.sasl.jaas.config": f"{_SECURITY}.scram.ScramLoginModule required;",
        "listener.name.guarded.oauthbearer.sasl.jaas.config": f"{_OAUTH}.OAuthBearerLoginModule required;",
        f"{listener}.oauthbearer.sasl.server.callback.handler.class": (
            f"{_OAUTH}.OAuthBearerValidatorCallbackHandler"
        ),
        "sasl.oauthbearer.jwks.endpoint.url": keys,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "listener.name.shown.ssl.client.auth": "required",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "broker.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.pem),
        "listeners.more": f"GUARDED://{HOST}:{sasl},SHOWN://{HOST}:{ssl}",
    }


OAUTH_JARS = ("jackson-annotations", "jackson-core", "jackson-databind")
"""Jars of the broker that the connector's client needs for OAUTHBEARER, in addition to jose4j."""


@pytest.fixture(scope="module")
def secured_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A running broker with its authority and its token server."""
    try:
        require_jars()
    except SetupError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("guarded")
    authority, tokens, ports, home = Authority(folder, "ours"), TokenServer(), Ports(), Home(folder / "home")
    home.make()
    plain, controller, sasl, ssl = (ports.draw() for _ in range(4))
    supervisor = Supervisor()
    program = kafka_broker.broker_program(
        home, StackOptions(), dict(os.environ), find_java(), plain, controller
    )
    keys = tokens.write_keys(folder / "keys.json")
    jose4j = ":".join(
        map(str, CONNECTOR_JARS.glob("jose4j-*.jar"))
    )  # Kafka's own distribution has jose4j; the jars that we install lack it
    libraries = f"{KAFKA_JARS}/*"
    command = tuple(f"{libraries}:{jose4j}" if part == libraries else part for part in program.command)
    command = (command[0], f"-D{_ALLOWED}={keys}", *command[1:])

    def prepare() -> None:
        program.prepare()
        conf = home.conf / "kafka.properties"
        added = broker_properties(folder, authority, keys, sasl, ssl)
        listeners = added.pop("listeners.more")
        lines = [
            f"{line},{listeners}" if "listeners=PLAINTEXT" in line else line
            for line in conf.read_text().splitlines()
        ]
        conf.write_text(
            "\n".join([*lines, *(f"{key}={_escape(value)}" for key, value in added.items())]) + "\n"
        )

    with contextlib.ExitStack() as stack:
        threading.Thread(target=tokens.serve_forever, daemon=True).start()
        stack.callback(tokens.server_close)
        stack.callback(tokens.shutdown)
        stack.callback(ports.release)
        stack.callback(supervisor.close)
        supervisor.open()
        supervisor.start([dataclasses.replace(program, command=command, prepare=prepare)])
        assert supervisor.wait(lambda: supervisor.slots["kafka"].state == "ready", 60), home.log(
            "kafka"
        ).read_text()[-2000:]
        admin = clients.admin(Broker(f"{HOST}:{plain}"))
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        futures = admin.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(USER, scram, PASSWORD.encode())]
        )
        for future in futures.values():
            future.result(10)
        yield SecuredBroker(f"{HOST}:{sasl}", f"{HOST}:{ssl}", authority, tokens, folder)
        supervisor.stop(["kafka"])


def broker_of(secured_broker: SecuredBroker, how: str) -> Broker:
    if how == "SSL":
        certificate, key = secured_broker.authority.issue(USER)
        security = KafkaSecurity(
            protocol="SSL", ca=str(secured_broker.authority.pem), certificate=certificate, key=key
        )
        return Broker(secured_broker.ssl, security)
    token = {"token_url": secured_broker.tokens.url} if how == "OAUTHBEARER" else {}
    login: dict[str, Any] = {"mechanism": how, "username": USER, "password": PASSWORD, **token}
    return Broker(
        secured_broker.sasl, KafkaSecurity(protocol="SASL_SSL", ca=str(secured_broker.authority.pem), **login)
    )


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-512", "OAUTHBEARER", "SSL"])
def test_our_clients_make_topics_write_and_read(secured_broker: SecuredBroker, how: str) -> None:
    broker, prefix = broker_of(secured_broker, how), f"{how.lower()}."
    clients.wait_for_broker(broker, timeout_s=30)
    TopicAdmin(clients.admin(broker), prefix, 2, TopicSettings()).create()
    producer = clients.producer(broker)
    clients.send(
        producer,
        name_of(prefix, ROWS),
        key=b"k",
        value=b"v",
        timestamp_ms=int(time.time() * 1000),
        partition=0,
    )
    assert producer.flush(20) == 0
    consumer = clients.consumer(broker, "g")
    try:
        assert clients.end_offsets(consumer, name_of(prefix, ROWS), range(2)) == {0: 1, 1: 0}
    finally:
        consumer.close()


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password_is_refused_and_not_printed(
    secured_broker: SecuredBroker, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    security = KafkaSecurity(
        protocol="SASL_SSL",
        ca=str(secured_broker.authority.pem),
        mechanism=how,  # type: ignore[arg-type]
        username=USER,
        password="wrong-one",
    )
    with caplog.at_level("DEBUG"), pytest.raises(KafkaException):
        clients.admin(Broker(secured_broker.sasl, security)).list_topics(timeout=3)
    assert "wrong-one" not in caplog.text


def test_a_wait_says_why_a_broker_refuses(secured_broker: SecuredBroker, tmp_path: Path) -> None:
    other_authority = Authority(tmp_path, "theirs")
    login, certificates = (
        broker_of(secured_broker, "PLAIN").security,
        broker_of(secured_broker, "SSL").security,
    )
    certificate, key = other_authority.issue(USER)
    for address, security, reason in (
        (secured_broker.sasl, dataclasses.replace(login, password="wrong-one"), "[Aa]uthentication failed"),
        (
            secured_broker.sasl,
            dataclasses.replace(login, ca=str(other_authority.pem)),
            "is not valid",
        ),
        (secured_broker.ssl, dataclasses.replace(certificates, certificate=certificate, key=key), "alert"),
    ):
        with pytest.raises(UnavailableError, match=f"{reason}.*; check kafka_security") as caught:
            clients.wait_for_broker(Broker(address, security), timeout_s=3.0)
        assert "wrong-one" not in str(caught.value)


@contextlib.contextmanager
def tls_listener(certificate: str, key: str) -> Iterator[str]:
    """Address of a server that does TLS handshakes and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server((HOST, 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), contextlib.closing(connection):
                connection.settimeout(5)
                context.wrap_socket(connection, server_side=True).close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"{HOST}:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize(
    ("certificate", "reason"),
    [
        ({"expired": True}, "certificate has expired"),
        ({"local": False}, "not valid for '127.0.0.1'"),
        ({}, "unable to get local issuer certificate"),
    ],
    ids=["expired", "other-host", "other-authority"],
)
def test_a_wait_says_why_the_brokers_certificate_is_not_valid(
    tmp_path: Path, certificate: dict[str, Any], reason: str
) -> None:
    (tmp_path / "theirs").mkdir()
    ours = Authority(tmp_path, "ours")
    issuer = ours if certificate else Authority(tmp_path / "theirs", "theirs")
    security = KafkaSecurity(protocol="SSL", ca=str(ours.pem))
    with tls_listener(*issuer.issue("broker", "elsewhere.example", **certificate)) as address:
        with pytest.raises(UnavailableError, match=rf"{reason}.*; check kafka_security") as caught:
            clients.wait_for_broker(Broker(address, security), timeout_s=3.0)
        assert "start it" not in str(caught.value)


def test_a_wait_says_that_a_listener_expects_tls(secured_broker: SecuredBroker) -> None:
    for address in (secured_broker.sasl, secured_broker.ssl):
        with pytest.raises(UnavailableError, match="expects TLS; set protocol"):
            clients.wait_for_broker(Broker(address), timeout_s=3.0)


def test_a_local_stack_says_that_it_needs_a_kafka_without_tls(secured_broker: SecuredBroker) -> None:
    with pytest.raises(UnavailableError, match="a local stack uses a Kafka without TLS"):
        kafka_broker.use_external_broker(StackOptions(kafka=secured_broker.ssl))


def test_renewed_files_that_a_client_has_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "theirs").mkdir()
    old, new = Authority(tmp_path, "ours"), Authority(tmp_path / "theirs", "theirs")
    with tls_listener(*new.issue("broker")) as address:
        client = clients.admin(Broker(address, KafkaSecurity(protocol="SSL", ca=str(old.pem))))
        old.pem.write_bytes(new.pem.read_bytes())
        with pytest.raises(KafkaException):
            client.list_topics(timeout=2)
        client.poll(0)
    assert "restart this program" in caplog.text


def test_a_wait_names_a_refused_connection_although_librdkafka_reports_it_once() -> None:
    with pytest.raises(UnavailableError, match="Connection refused"):
        clients.wait_for_broker(Broker("127.0.0.1:1"), timeout_s=6.0)


def test_an_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path, "ours").issue(USER, password="secret")
    security = KafkaSecurity(protocol="SSL", certificate=certificate, key=key)
    with pytest.raises(ConfigError, match=r"kafka_security\.key: .*key_password"):
        clients.admin(Broker("127.0.0.1:1", security))
    clients.admin(Broker("127.0.0.1:1", dataclasses.replace(security, key_password="secret")))


@pytest.mark.parametrize("key", ["nowhere.key", "other.key"])
def test_files_that_do_not_fit_are_wrong_settings(key: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    authority.issue("other")
    certificate, _ = authority.issue(USER)
    security = KafkaSecurity(
        protocol="SSL", ca=str(authority.pem), certificate=certificate, key=str(tmp_path / key)
    )
    for create in (clients.admin, clients.producer, lambda broker: clients.consumer(broker, "g")):
        with pytest.raises(ConfigError, match=r"kafka_security\.key|key values mismatch"):
            create(Broker("127.0.0.1:1", security))


@pytest.fixture(scope="module")
def probe(secured_broker: SecuredBroker) -> str:
    """The class path of a Java program that lists topics with the client in Flink's connector."""
    classes, source = secured_broker.folder / "classes", secured_broker.folder / "Probe.java"
    classes.mkdir()
    source.write_text(_PROBE)
    broker_jars = [
        jar for name in ("slf4j-api", *OAUTH_JARS) for jar in KAFKA_JARS.glob(f"{name}-[0-9]*.jar")
    ]
    libraries = [*CONNECTOR_JARS.glob("*.jar"), *broker_jars]
    compile_java([source], libraries, classes)
    return os.pathsep.join(str(path) for path in (classes, *libraries))


def run_probe(
    secured_broker: SecuredBroker, classpath: str, broker: Broker, *flags: str
) -> subprocess.CompletedProcess[str]:
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "request.timeout.ms": "5000",
        "default.api.timeout.ms": "15000",
        **broker.security.java(),
    }
    file = secured_broker.folder / "probe.properties"
    file.write_text("".join(f"{key}={_escape(value)}\n" for key, value in settings.items()))
    command = (str(find_java()), *flags, "-cp", classpath, "Probe", str(file))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-512", "SSL"])
def test_the_client_in_flinks_connector_accepts_the_properties(
    secured_broker: SecuredBroker, probe: str, how: str
) -> None:
    completed = run_probe(secured_broker, probe, broker_of(secured_broker, how))
    assert completed.returncode == 0 and "topics [" in completed.stdout, completed.stderr[-1500:]


def test_the_client_in_flinks_connector_logs_in_with_a_token_it_fetched(
    secured_broker: SecuredBroker, probe: str
) -> None:
    """docs/operations/security.md describes the property and the jars that this needs."""
    if not list(CONNECTOR_JARS.glob("jose4j-*.jar")):
        pytest.skip("jose4j is not installed: run make setup")
    broker = broker_of(secured_broker, "OAUTHBEARER")
    completed = run_probe(secured_broker, probe, broker)
    assert completed.returncode and ALLOWED_URLS in completed.stderr
    secured_broker.tokens.requests.clear()
    completed = run_probe(secured_broker, probe, broker, f"-D{ALLOWED_URLS}={secured_broker.tokens.url}")
    assert completed.returncode == 0 and "topics [" in completed.stdout, completed.stderr[-1500:]
    assert secured_broker.tokens.requests == [f"{USER}:{PASSWORD}"]
    page = Path(__file__).resolve().parents[2] / "docs" / "operations" / "security.md"
    assert ALLOWED_URLS in page.read_text()
    home = (Path(__file__).resolve().parents[2] / "infra/image/flink-home.sh").read_text(encoding="utf-8")
    assert all(f"/jars/kafka/{name}-*.jar" in home for name in OAUTH_JARS)


def test_a_token_that_another_key_signed_is_refused(
    secured_broker: SecuredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    monkeypatch.setattr(secured_broker.tokens, "signs_with", other)
    with pytest.raises(KafkaException):
        clients.admin(broker_of(secured_broker, "OAUTHBEARER")).list_topics(timeout=5)
