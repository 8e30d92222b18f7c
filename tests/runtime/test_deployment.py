"""Settings that all programs of a deployment share: declared once and checked in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from joiner.config import JoinerConfig
from param_server.config import ShardConfig
from roostream.errors import ConfigError
from roostream.replay.config import SimulateConfig
from roostream.runtime.deployment import Deployment, ProgramSettings
from roostream.runtime.kafka.broker import Broker, KafkaSecurity
from roostream.schema.settings import load
from serving.config import ServingConfig
from serving.online_features.config import FeaturesConfig
from tests.certificates import Authority
from trainer.config import ControllerConfig, WorkerConfig

SHARED = {"bootstrap": "k:1", "schema": "s.toml", "store": "store"}
PROGRAMS: list[tuple[type[Deployment], dict[str, Any]]] = [
    (ShardConfig, {"controller": "c:1", "home": "h"}),
    (ControllerConfig, {"listen": "127.0.0.1:0", "num_shards": 2}),
    (WorkerConfig, {"controller": "c:1", "shards": ["a:1"]}),
    (ServingConfig, {"home": "h"}),
    (FeaturesConfig, {"redis": "redis://r:1/0"}),
    (JoinerConfig, {}),
]
LISTENING = [ShardConfig, ControllerConfig, ServingConfig]


def write_config(tmp_path: Path, values: dict[str, Any]) -> Path:
    """Write `values` as a TOML file and return its path."""
    path = tmp_path / "program.toml"
    path.write_text(
        "".join(
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
            for key, value in values.items()
        )
    )
    return path


@pytest.mark.parametrize(("cls", "program_settings"), PROGRAMS)
def test_every_program_reads_the_deployments_settings(
    cls: type[Deployment], program_settings: dict[str, Any], tmp_path: Path
) -> None:
    path = write_config(
        tmp_path, {**SHARED, **program_settings, "partitions": 8, "buckets": 128, "prefix": "a."}
    )
    environ = {
        "ROOSTREAM_P_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "ROOSTREAM_P_KAFKA_SECURITY_USERNAME": "me",
        "ROOSTREAM_P_KAFKA_SECURITY_PASSWORD": "s3cret",
    }
    config = load(cls, path, program="p", environ=environ)
    assert (config.partitions, config.buckets, config.prefix, config.store) == (8, 128, "a.", "store")
    assert config.broker == Broker(
        "k:1", KafkaSecurity(protocol="SASL_SSL", username="me", password="s3cret")
    )
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize(("cls", "program_settings"), [*PROGRAMS, (SimulateConfig, {})])
def test_serving_metrics_on_a_public_address_needs_permission(
    cls: type[ProgramSettings], program_settings: dict[str, Any], tmp_path: Path
) -> None:
    values = {
        **(SHARED if issubclass(cls, Deployment) else {}),
        **program_settings,
        "metrics_host": "0.0.0.0",
    }
    with pytest.raises(
        ConfigError,
        match=r"program.toml:\d+: key 'metrics_host': expected a loopback address .* set insecure = true",
    ):
        load(cls, write_config(tmp_path, values), environ={})
    assert (
        load(cls, write_config(tmp_path, {**values, "insecure": True}), environ={}).metrics_host == "0.0.0.0"
    )


@pytest.mark.parametrize(("cls", "program_settings"), [p for p in PROGRAMS if p[0] in LISTENING])
def test_listening_on_a_public_address_needs_permission(
    cls: type[Deployment], program_settings: dict[str, Any], tmp_path: Path
) -> None:
    values = {**SHARED, **program_settings, "listen": "0.0.0.0:7000"}
    with pytest.raises(
        ConfigError,
        match=r"program.toml:\d+: key 'listen': expected a loopback address .* set insecure = true",
    ):
        load(cls, write_config(tmp_path, values), environ={})
    assert load(cls, write_config(tmp_path, {**values, "insecure": True}), environ={}).insecure


@pytest.mark.parametrize(
    ("cls", "program_settings"), [p for p in PROGRAMS if p[0] in (ShardConfig, ControllerConfig)]
)
def test_a_link_with_certificates_may_be_reached_by_others(
    cls: type[Deployment], program_settings: dict[str, Any], tmp_path: Path
) -> None:
    path = write_config(tmp_path, {**SHARED, **program_settings, "listen": "0.0.0.0:7000"})
    with pytest.raises(
        ConfigError, match=r"give it certificate, key and ca of \[link\], or set insecure = true"
    ):
        load(cls, path, environ={})
    path.write_text(path.read_text() + '[link]\ncertificate = "c"\nkey = "k"\nca = "a"\n')
    assert load(cls, path, environ={}).link.is_mutual_tls


@pytest.mark.parametrize(("cls", "program_settings"), PROGRAMS[:-1])
def test_a_missing_required_setting_is_named(
    cls: type[Deployment], program_settings: dict[str, Any], tmp_path: Path
) -> None:
    for key in set(cls.needs) & set(SHARED):
        with pytest.raises(ConfigError, match=f"key '{key}': expected a value .*, got nothing; add it"):
            load(cls, write_config(tmp_path, {**SHARED, **program_settings, key: ""}), environ={})


WRONG = [
    ({"bootstrap": "a:1,kafka"}, "key 'bootstrap': expected an address like '127.0.0.1:7000', got 'kafka'"),
    ({"partitions": 0}, "key 'partitions': expected 1..1024, got 0"),
    ({"buckets": 0}, "key 'buckets': expected 1..65536, got 0"),
    ({"metrics_port": 70_000}, "key 'metrics_port': expected 0..65535, got 70000"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Deployment(**{**SHARED, **change})
    assert str(caught.value) == message


def test_the_redis_password_is_read_from_address_or_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3/cret\n")
    common = {"bootstrap": "h:1", "schema": "s.toml", "store": "s"}
    file = {"redis_password_file": str(tmp_path / "password")}
    assert FeaturesConfig(**common, redis="rediss://h:1/0", **file).redis_url == "rediss://:s3%2Fcret@h:1/0"
    assert FeaturesConfig(**common, redis="redis://:pw@h:1/0").redis_url == "redis://:pw@h:1/0"
    ca = Authority(tmp_path, "ours").pem
    program_settings = FeaturesConfig(
        **common, redis="rediss://h:1/0", redis_user="up/dater", redis_ca=str(ca), **file
    )
    query = f"ssl_ca_certs={quote(str(ca), safe='')}"
    assert program_settings.redis_url == f"rediss://up%2Fdater:s3%2Fcret@h:1/0?{query}"
    with pytest.raises(ConfigError, match="key 'redis_user': expected it with redis_password_file"):
        FeaturesConfig(**common, redis="redis://h:1/0", redis_user="updater")
    with pytest.raises(ConfigError, match="key 'redis_ca': expected it with an address rediss://"):
        FeaturesConfig(**common, redis="redis://h:1/0", redis_ca="/etc/ca.pem")
    with pytest.raises(
        ConfigError, match="expected it with an address without a password, got one in the address too"
    ):
        FeaturesConfig(**common, redis="redis://:pw@h:1/0", **file)
    with pytest.raises(ConfigError, match="redis_password_file: expected a file with a password"):
        _ = FeaturesConfig(**common, redis="redis://h:1/0", redis_password_file=str(tmp_path)).redis_url


def features_config(**settings: str) -> FeaturesConfig:
    return FeaturesConfig(bootstrap="h:1", schema="s.toml", store="s", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_of_redis_authorities_that_cannot_be_used_is_a_wrong_setting(
    tmp_path: Path, content: str | None
) -> None:
    """Otherwise the program would wait for Redis, with an error that names no file."""
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    config = features_config(redis="rediss://h:1/0", redis_ca=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match=r"redis_ca.*ca\.pem"):
        _ = config.redis_url


@pytest.mark.parametrize("content", ["", "\n"])
def test_a_file_without_a_redis_password_is_a_wrong_setting(tmp_path: Path, content: str) -> None:
    (tmp_path / "password").write_text(content)
    config = features_config(redis="redis://h:1/0", redis_password_file=str(tmp_path / "password"))
    with pytest.raises(ConfigError, match="expected a password in the first line"):
        _ = config.redis_url


@pytest.mark.parametrize(
    "url", ["localhost:6379", "redis://", "redis://h:x/0", "http://h:1", ":s3cret@h:1", "redis:s3cret@h"]
)
def test_an_invalid_redis_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="key 'redis': expected redis://host:port/0") as error:
        FeaturesConfig(bootstrap="h:1", schema="s.toml", store="s", redis=url)
    assert "s3cret" not in str(error.value)
