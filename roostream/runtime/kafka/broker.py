"""Address and authentication of Kafka, for librdkafka (`clients.py`) and for Flink's connectors (`java()`).

Imports no client, so that settings can use it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Literal

from roostream.errors import ConfigError, reason_of
from roostream.schema.settings import setting

_LOGIN = {
    "PLAIN": "plain.PlainLoginModule",
    "SCRAM-SHA-256": "scram.ScramLoginModule",
    "SCRAM-SHA-512": "scram.ScramLoginModule",
    "OAUTHBEARER": "oauthbearer.OAuthBearerLoginModule",
}
SHADED = "org.apache.flink.kafka.shaded."
"""Prefix of Kafka's classes and system properties in Flink's connector, which contains a renamed copy of the
client."""
ALLOWED_URLS = f"{SHADED}org.apache.kafka.sasl.oauthbearer.allowed.urls"
"""System property of Flink's JVMs: the URLs from which tokens may be fetched. It must contain `token_url`."""
_SECURITY = f"{SHADED}org.apache.kafka.common.security."


@dataclasses.dataclass(frozen=True, kw_only=True)
class KafkaSecurity:
    """The table `[kafka_security]` of a program's TOML. `repr` omits secrets, so logs do too."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = setting(
        "PLAINTEXT", "security protocol of the broker's listener"
    )
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = setting(
        "SCRAM-SHA-512", "SASL mechanism"
    )
    username: str = setting("", "SASL user name; with OAUTHBEARER the client id")
    password: str = setting("", "SASL password; with OAUTHBEARER the client secret", secret=True)
    token_url: str = setting("", "OAUTHBEARER: URL of the token endpoint (client credentials grant)")
    scope: str = setting("", "OAUTHBEARER: scope of the token; '' = the default scope")
    ca: str = setting("", "SSL: PEM file of the authorities of the broker's certificate; '' = the system's")
    certificate: str = setting("", "SSL: PEM file of this program's certificate chain; '' = none")
    key: str = setting("", "SSL: PEM file of its private key (PKCS #8)")
    key_password: str = setting("", "SSL: password of that file", secret=True)

    def __post_init__(self) -> None:
        if self.uses_sasl and not (self.username and self.password):
            raise ConfigError(
                f"expected username and password for protocol {self.protocol}, got none; add both"
            )
        if self.uses_oauth != bool(self.token_url) or (self.scope and not self.uses_oauth):
            raise ConfigError(
                f"expected token_url with mechanism OAUTHBEARER alone, got {self.mechanism}; add it, or "
                "leave it out"
            )
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("expected certificate and key together, got one of them; add the other")
        if not self.uses_tls and (self.ca or self.certificate):
            raise ConfigError(
                f"expected protocol SSL or SASL_SSL with ca or certificate, got {self.protocol}; change it"
            )
        if not self.uses_sasl and (self.username or self.password):
            raise ConfigError(
                f"expected protocol SASL_SSL or SASL_PLAINTEXT with username, got {self.protocol}; change it"
            )

    @property
    def uses_tls(self) -> bool:
        return self.protocol.endswith("SSL")

    @property
    def files(self) -> tuple[Path, ...]:
        """The PEM files that clients read when they are created."""
        return tuple(Path(name) for name in (self.ca, self.certificate, self.key) if name)

    @property
    def uses_sasl(self) -> bool:
        return self.protocol.startswith("SASL")

    @property
    def uses_oauth(self) -> bool:
        return self.uses_sasl and self.mechanism == "OAUTHBEARER"

    def check_files(self) -> None:
        """Check that the files can be read. Raises ConfigError, which names the setting and the file."""
        for name in ("ca", "certificate", "key"):
            if (path := getattr(self, name)) and not os.access(path, os.R_OK):
                reason = "Permission denied" if os.path.exists(path) else "No such file"
                raise ConfigError(
                    f"kafka_security.{name}: expected a PEM file, got {path!r}: {reason}; check the path"
                )

    def librdkafka(self) -> dict[str, str]:
        """Options of librdkafka; {} for PLAINTEXT."""
        options: dict[str, str] = {} if self.protocol == "PLAINTEXT" else {"security.protocol": self.protocol}
        if self.uses_oauth:
            options |= {
                "sasl.mechanism": self.mechanism,
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.client.id": self.username,
                "sasl.oauthbearer.client.secret": self.password,
                "sasl.oauthbearer.token.endpoint.url": self.token_url,
            }
            if self.scope:
                options["sasl.oauthbearer.scope"] = self.scope
        elif self.uses_sasl:
            options |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.username,
                "sasl.password": self.password,
            }
        if self.ca:
            options["ssl.ca.location"] = self.ca
        if self.certificate:
            options |= {"ssl.certificate.location": self.certificate, "ssl.key.location": self.key}
        if self.key_password:
            options["ssl.key.password"] = self.key_password
        return options

    def java(self) -> dict[str, str]:
        """Options of the Java client in Flink's connector; {} for PLAINTEXT. Files are included as text, so
        that task managers do not need them.

        Raises:
            ConfigError: a file can't be read.
        """
        options: dict[str, str] = {} if self.protocol == "PLAINTEXT" else {"security.protocol": self.protocol}
        if self.uses_sasl:
            names = ("clientId", "clientSecret", "scope") if self.uses_oauth else ("username", "password")
            values = zip(names, (self.username, self.password, self.scope), strict=False)
            login = " ".join(f"{name}={_quoted(value)}" for name, value in values if value)
            options["sasl.mechanism"] = self.mechanism
            options["sasl.jaas.config"] = f"{_SECURITY}{_LOGIN[self.mechanism]} required {login};"
        if self.uses_oauth:
            handler = f"{_SECURITY}oauthbearer.OAuthBearerLoginCallbackHandler"
            options["sasl.login.callback.handler.class"] = handler
            options["sasl.oauthbearer.token.endpoint.url"] = self.token_url
        if self.ca:
            options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _text("ca", self.ca)}
        if self.certificate:
            options |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.certificate.chain": _text("certificate", self.certificate),
                "ssl.keystore.key": _pkcs8(self.key),
            }
        if self.key_password:
            options["ssl.key.password"] = self.key_password
        return options


@dataclasses.dataclass(frozen=True)
class Broker:
    """Address and authentication. `str()` is the address only."""

    bootstrap: str
    security: KafkaSecurity = KafkaSecurity()

    def __str__(self) -> str:
        return self.bootstrap


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _pkcs8(path: str) -> str:
    text = _text("key", path)
    if not re.search("BEGIN (ENCRYPTED )?PRIVATE KEY", text):
        raise ConfigError(
            "kafka_security.key: expected PKCS #8 (BEGIN PRIVATE KEY) for Flink, got another form in "
            f"{path!r}; convert it: openssl pkcs8 -topk8 -nocrypt"
        )
    return text


def _text(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"kafka_security.{name}: expected a PEM file, got {path!r}: {reason_of(error)}; check the path"
        ) from None
