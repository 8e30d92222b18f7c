from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from infra import jars
from infra.jars import Jar
from roostream.errors import ConfigError, SetupError

CONTENT = b"a jar"


JAR = Jar(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "group", "thing", "1.0")


def give(content: bytes) -> jars.Fetch:
    def fetch(jar: Jar, cache: Path) -> Path:
        path = cache / "downloaded"
        path.write_bytes(content)
        return path

    return fetch


def test_a_jar_with_the_right_checksum_gets_its_name_and_is_not_fetched_again(tmp_path: Path) -> None:
    seen: list[Jar] = []
    assert jars.missing([JAR], tmp_path) == [JAR]
    jars.fetch_all([JAR], tmp_path, give(CONTENT), seen.append)
    assert (tmp_path / "kafka" / "thing-1.0.jar").read_bytes() == CONTENT
    assert seen == [JAR]
    assert jars.missing([JAR], tmp_path) == []


def test_a_damaged_download_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="expected sha256"):
        jars.fetch_all([JAR], tmp_path, give(b"A jar"))
    assert list(tmp_path.iterdir()) == []


def test_the_pinned_list_can_be_read_and_names_broker_connector_and_compiler() -> None:
    folders = {j.path().parent.name for j in jars.read_list()}
    assert folders == {"kafka", "flink", "compiler"}
    assert all(len(j.sha256) == 64 for j in jars.read_list())


def test_a_line_of_another_form_is_named(tmp_path: Path) -> None:
    path = tmp_path / "jars.sha256"
    path.write_text("abc 12 group:artifact:1\nabc group:artifact:1\n")
    with pytest.raises(ConfigError, match=r"jars\.sha256:2: expected"):
        jars.read_list(path)


def test_what_makes_absent_jars_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match="run `make setup` in a checkout, `roostream prepare` where the package is installed"
    ):
        jars.require_jars(tmp_path)
