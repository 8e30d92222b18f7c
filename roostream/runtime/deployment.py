"""Settings shared by the programs of a deployment: Kafka, schema, store, partitions, buckets, metrics port.

The settings of each program derive from these classes, so that each key is declared once.
"""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from roostream.errors import ConfigError, reason_of
from roostream.runtime.address import check_addresses, check_listen, check_redis, join_address
from roostream.runtime.kafka.broker import Broker, KafkaSecurity
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS, DEFAULT_PARTITIONS
from roostream.runtime.manifest import KEEP_MANIFESTS
from roostream.runtime.program import LogFormat
from roostream.runtime.retention import Retention
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.runtime.tls import TlsSettings
from roostream.schema.settings import SettingError, Settings, setting, setting_error

MAX_WORKERS = 64
"""A shard holds a push of each, and a thread (param_server/gradient_barrier.py)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSettings(TlsSettings):
    """Settings of every program: metrics port, log format."""

    metrics_host: str = setting("127.0.0.1", "address of /metrics, /livez and /readyz")
    metrics_port: int = setting(0, "their port; 0 = any free port", ge=0, le=65535)
    stalled_after_ms: int = setting(
        120_000, "/livez fails when the main loop has made no turn for this long", ge=1000
    )
    log_format: LogFormat = setting("text", "log format on standard error: text, or json = one object a line")
    insecure: bool = setting(False, "allow listening on public addresses without authentication")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listen(
            "metrics_host",
            join_address(self.metrics_host, self.metrics_port),
            insecure=self.insecure,
            authenticated=self.tls_client_required,  # API keys protect only serving's own port
            by="tls_certificate and tls_client_required",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSettings(ProgramSettings):
    """A program that calls shards, controller or readers, or is called as one."""

    link: LinkSecurity = setting(
        factory=LinkSecurity, help="table: authentication of calls to shards, controller and readers"
    )

    def link_credentials(self) -> LinkCredentials:
        """Certificates and tokens for all of a program's connections. Raises SettingError: a file can't be
        read."""
        return LinkCredentials(self.link, insecure=self.insecure)

    def check_link_port(self, listen: str) -> None:
        """Raises ConfigError: see `check_listen`. `listen`: the setting of this name."""
        check_listen(
            "listen",
            listen,
            insecure=self.insecure,
            authenticated=self.link.is_mutual_tls,
            by="certificate, key and ca of [link]",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment(LinkSettings):
    """Equal in all programs of a deployment. Manifests contain partitions and buckets, which the first commit
    fixes."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "schema", "store")
    """Keys that this program requires."""

    bootstrap: str = setting("", "Kafka, host:port; several with commas")
    kafka_security: KafkaSecurity = setting(
        factory=KafkaSecurity, help="table: protocol and authentication of Kafka"
    )
    prefix: str = setting("", "prefix of topic names and Redis keys")
    schema: str = setting("", "schema TOML file")
    store: str = setting("", "checkpoint store: a directory, or its URL")
    skip_lost: bool = setting(
        True,
        "count and skip records that Kafka deleted before they were read; false = stop with an error",
    )
    partitions: int = setting(
        DEFAULT_PARTITIONS, "partitions of each topic; dead_letters has one", ge=1, le=1024
    )
    keep_commits: int = setting(
        KEEP_MANIFESTS,
        "newest commits to keep, with all files they need; the controller's, shards may keep more",
        ge=2,
        le=1000,
    )
    keep_minutes: int = setting(
        60,
        "of older commits whose rows are in the store, keep one a minute, of so many minutes",
        ge=0,
        le=10_000,
    )
    keep_hours: int = setting(24, "and one an hour, of so many hours", ge=0, le=10_000)
    keep_days: int = setting(7, "and one a day, of so many days", ge=0, le=10_000)
    buckets: int = setting(
        DEFAULT_BUCKETS, "buckets into which the rows of a stack are divided", ge=1, le=1 << 16
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bootstrap:
            check_addresses("bootstrap", *self.bootstrap.split(","))
        self.require(*self.needs)

    def require(self, *keys: str) -> None:
        """Raises ConfigError: one of these keys is empty."""
        helps = {f.name: f.metadata["help"] for f in dataclasses.fields(self)}
        for key in keys:
            if not getattr(self, key):
                raise SettingError(key, f"expected a value ({helps[key]}), got nothing; add it")

    def check_share(self, index: int, num_name: str) -> None:
        """Check the number of a program among several that share the partitions; `num_name`: the setting with
        their number. Raises ConfigError: it has no partition."""
        limit = min(getattr(self, num_name), self.partitions)
        if index >= limit:
            raise setting_error(
                "index", f"less than {limit}, the smaller of {num_name} and partitions", index
            )

    def check_shards(self, num_shards: int) -> None:
        """Raises ConfigError: there are more shards than buckets."""
        if num_shards > self.buckets:
            raise setting_error(
                "num_shards",
                f"at most buckets = {self.buckets}",
                num_shards,
                "each shard needs at least one bucket",
            )

    @property
    def retention(self) -> Retention:
        """Which commits are kept."""
        return Retention(self.keep_commits, self.keep_minutes, self.keep_hours, self.keep_days)

    @property
    def broker(self) -> Broker:
        return Broker(self.bootstrap, self.kafka_security)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedisSettings(Settings):
    """Settings of a program that uses the Redis of online features."""

    redis: str = setting("", "Redis of online features, redis://host:port/0 or rediss://…; '' = none")
    redis_user: str = setting("", "ACL user, if the address has none; '' = Redis' default user")
    redis_password_file: str = setting(
        "", "file whose first line is Redis' password, if the address has none"
    )
    redis_ca: str = setting("", "PEM file of the authorities of a rediss:// address; '' = the system's")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redis:
            check_redis("redis", self.redis)
        if self.redis_password_file and (not self.redis or "@" in self.redis):
            got = "one in the address too" if self.redis else "no address"
            raise SettingError(
                "redis_password_file", f"expected it with an address without a password, got {got}; keep one"
            )
        if self.redis_user and not self.redis_password_file:
            raise SettingError(
                "redis_user",
                "expected it with redis_password_file, got none; add it, or name both in the address",
            )
        if self.redis_ca and not self.redis.startswith("rediss://"):
            raise SettingError(
                "redis_ca", "expected it with an address rediss://…, got another; change the address"
            )

    @property
    def redis_url(self) -> str:
        """The address with user, password and authorities; never to be shown but by
        `roostream.errors.mask_secrets`.

        Raises:
            ConfigError: a file can't be read, or has no password or certificate.
        """
        address = self.redis
        if self.redis_ca:
            try:
                ssl.create_default_context(cafile=self.redis_ca)
            except OSError as error:
                got = f"{self.redis_ca!r}: {error.strerror or error}"
                raise SettingError("redis_ca", f"expected a PEM file of authorities, got {got}") from None
            address += f"{'&' if '?' in address else '?'}ssl_ca_certs={quote(self.redis_ca, safe='')}"
        if not self.redis_password_file:
            return address
        try:
            lines = Path(self.redis_password_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "redis_password_file: expected a file with a password, got "
                f"{self.redis_password_file!r}: {reason_of(error)}"
            ) from None
        if not lines or not lines[0]:
            raise ConfigError(
                "redis_password_file: expected a password in the first line of "
                f"{self.redis_password_file!r}, got none; write it there"
            )
        scheme, _, rest = address.partition("://")
        return f"{scheme}://{quote(self.redis_user, safe='')}:{quote(lines[0], safe='')}@{rest}"
