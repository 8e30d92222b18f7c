"""Settings of serving: a wrong setting is rejected in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError
from roostream.schema.settings import load
from serving.config import ServingConfig
from serving.online_features.config import FeaturesConfig
from tests.serving.serving_cases import config_of

BAD_SETTINGS = [
    ({"listen": "0.0.0.0:80"}, "key 'listen': expected a loopback address"),
    ({"listen": "example.org:80"}, "key 'listen': expected a loopback address"),
    ({"listen": "8080"}, "'8080'"),
    ({"exploration": 1.5}, "key 'exploration': expected 0..1, got 1.5"),
    ({"max_in_flight": 0}, "key 'max_in_flight': expected 1..100000"),
    ({"max_log_bytes": 1 << 20}, "key 'max_log_bytes': expected at least 2 x log_segment_bytes = 2097152"),
    ({"shards": ("nowhere",)}, "'nowhere'"),
    ({"bootstrap": "kafka"}, "'kafka'"),
    ({"canary": "newest"}, "key 'canary': expected VERSION@SHARE such as newest@0.05"),
    ({"shadow": "best@1"}, "key 'shadow': expected VERSION@SHARE"),
    ({"interleave": "previous@2"}, "key 'interleave': expected VERSION@SHARE"),
    ({"keep_versions": 1}, "key 'keep_versions': expected 2..16"),
    (
        {"admin_listen": "0.0.0.0:1", "admin_token_file": "t"},
        "key 'admin_listen': expected a loopback address",
    ),
    ({"admin_listen": "127.0.0.1:0"}, "key 'admin_token_file': expected a value ("),
]


@pytest.mark.parametrize(("changes", "text"), BAD_SETTINGS, ids=[c[1] for c in BAD_SETTINGS])
def test_a_wrong_setting_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        config_of(tmp_path, **changes)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:80", "127.8.8.8:1", "[::1]:80"])
def test_a_loopback_address_needs_no_permission(tmp_path: Path, listen: str) -> None:
    assert config_of(tmp_path, listen=listen).listen == listen
    assert config_of(tmp_path, listen="0.0.0.0:80", insecure=True).insecure


def test_serving_and_updater_settings_load_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "serving.toml"
    file.write_text(
        'schema = "s.toml"\nstore = "st"\nbootstrap = "a:1,b:2"\nhome = "h"\n'
        'shards = ["c:3"]\nheartbeat = "2s"\nmax_log_bytes = "1GiB"\n'
    )
    config = load(ServingConfig, file, program="serving", environ={})
    assert (config.heartbeat_ms, config.max_log_bytes, config.shards, config.home) == (
        2000,
        1 << 30,
        ("c:3",),
        Path("h"),
    )
    file.write_text('schema = "s.toml"\nbootstrap = "a:1"\nredis = "redis://h:1/0"\n')
    assert load(FeaturesConfig, file, program="features", environ={}).metrics_port == 0
    file.write_text("exploraton = 0.1\n")
    with pytest.raises(ConfigError, match="did you mean 'exploration'"):
        load(ServingConfig, file, environ={})
