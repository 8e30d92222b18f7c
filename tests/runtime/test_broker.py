"""Security settings of Kafka clients, as librdkafka's and Java's properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError
from roostream.runtime.kafka.broker import Broker, KafkaSecurity
from roostream.schema.settings import load

SASL: dict[str, Any] = {"protocol": "SASL_SSL", "username": "worker", "password": "s3cret"}


def test_plaintext_needs_no_settings() -> None:
    assert Broker("k:1").security.librdkafka() == {} == Broker("k:1").security.java()


def test_sasl_over_ssl_configures_python_and_java_clients(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\n")
    security = KafkaSecurity(**SASL, ca=str(ca))
    assert security.librdkafka() == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "worker",
        "sasl.password": "s3cret",
        "ssl.ca.location": str(ca),
    }
    assert security.java() == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": (
            "org.apache.flink.kafka.shaded.org.apache.kafka.common.security.scram.ScramLoginModule "
            'required username="worker" password="s3cret";'
        ),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": "-----BEGIN CERTIFICATE-----\n",
    }


def test_a_custom_certificate_configures_python_and_java_clients(tmp_path: Path) -> None:
    chain, key = tmp_path / "own.pem", tmp_path / "own.key"
    chain.write_text("chain")
    key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    security = KafkaSecurity(protocol="SSL", certificate=str(chain), key=str(key), key_password="k")
    assert security.librdkafka() == {
        "security.protocol": "SSL",
        "ssl.certificate.location": str(chain),
        "ssl.key.location": str(key),
        "ssl.key.password": "k",
    }
    assert security.java() == {
        "security.protocol": "SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "chain",
        "ssl.keystore.key": "-----BEGIN ENCRYPTED PRIVATE KEY-----",
        "ssl.key.password": "k",
    }


def test_a_token_is_fetched_by_both_kinds_of_clients() -> None:
    security = KafkaSecurity(**SASL, mechanism="OAUTHBEARER", token_url="https://id/token", scope="kafka")
    assert security.librdkafka() == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "worker",
        "sasl.oauthbearer.client.secret": "s3cret",
        "sasl.oauthbearer.token.endpoint.url": "https://id/token",
        "sasl.oauthbearer.scope": "kafka",
    }
    package = "org.apache.flink.kafka.shaded.org.apache.kafka.common.security.oauthbearer"
    assert security.java() == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": (
            f'{package}.OAuthBearerLoginModule required clientId="worker" '
            'clientSecret="s3cret" scope="kafka";'
        ),
        "sasl.login.callback.handler.class": f"{package}.OAuthBearerLoginCallbackHandler",
        "sasl.oauthbearer.token.endpoint.url": "https://id/token",
    }


def test_a_password_with_quotes_stays_one_value_in_java() -> None:
    security = KafkaSecurity(**{**SASL, "password": 'a"; x=\\"'})
    assert security.java()["sasl.jaas.config"].endswith('password="a\\"; x=\\\\\\"";')


def test_secrets_are_in_no_repr() -> None:
    broker = Broker("k:1", KafkaSecurity(**SASL, key_password="other"))
    assert "s3cret" not in f"{broker!r} {broker}" and "other" not in repr(broker) and str(broker) == "k:1"


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {**SASL, "mechanism": "OAUTHBEARER"},
        "expected token_url with mechanism OAUTHBEARER alone, got OAUTHBEARER",
    ),
    (
        {**SASL, "token_url": "https://id"},
        "expected token_url with mechanism OAUTHBEARER alone, got SCRAM-SHA-512",
    ),
    ({"protocol": "SASL_SSL"}, "expected username and password for protocol SASL_SSL"),
    ({"protocol": "SSL", "certificate": "c.pem"}, "expected certificate and key together"),
    ({"ca": "ca.pem"}, "expected protocol SSL or SASL_SSL with ca or certificate, got PLAINTEXT"),
    (
        {"username": "u", "password": "p"},
        "expected protocol SASL_SSL or SASL_PLAINTEXT with username, got PLAINTEXT",
    ),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KafkaSecurity(**given)


def test_an_unknown_protocol_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('protocol = "SASL-SSL"\n')
    with pytest.raises(ConfigError, match="did you mean 'SASL_SSL'"):
        load(KafkaSecurity, tmp_path / "s.toml")


def test_a_key_that_java_cannot_read_is_refused_before_the_job_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "rsa.key").write_text("-----BEGIN RSA PRIVATE KEY-----\n-----END RSA PRIVATE KEY-----\n")
    (tmp_path / "c.crt").write_text("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")
    files = {"certificate": str(tmp_path / "c.crt"), "key": str(tmp_path / "rsa.key")}
    with pytest.raises(ConfigError, match=r"kafka_security\.key: expected PKCS #8"):
        KafkaSecurity(protocol="SSL", **files).java()  # type: ignore[arg-type]


def test_comments_of_a_pem_file_may_have_any_letters(tmp_path: Path) -> None:
    text = "# Főtanúsítvány\n-----BEGIN CERTIFICATE-----\n"
    (tmp_path / "ca.pem").write_text(text, encoding="utf-8")
    assert KafkaSecurity(**SASL, ca=str(tmp_path / "ca.pem")).java()["ssl.truststore.certificates"] == text


def test_a_missing_file_is_named_when_java_needs_it() -> None:
    with pytest.raises(ConfigError, match=r"kafka_security.ca: expected a PEM file, got 'nowhere.pem'"):
        KafkaSecurity(**SASL, ca="nowhere.pem").java()
