"""What is packaged is what is there, pinned without addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NOT_PACKAGED = {"tests", "benchmarks", "docs", "build"}


def test_the_packages_are_the_folders() -> None:
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name not in NOT_PACKAGED}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders


def test_folders_are_flat() -> None:
    nested = [p for name in PROJECT["tool"]["setuptools"]["packages"] for p in (ROOT / name).glob("*/**/*.py")]
    assert [str(p.relative_to(ROOT)) for p in nested if "__pycache__" not in p.parts] == []


def test_tests_have_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_pin_has_a_hash_and_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all(re.match(r"[a-z0-9._-]+==", e) and "--hash=sha256:" in e for e in entries)
    assert not re.search(r"https?:|index-url|find-links| @ ", text)


def test_every_direct_dependency_is_pinned() -> None:
    pinned = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE))
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    wanted += [d for extra in project["optional-dependencies"].values() for d in extra]
    names = {re.split(r"[\[<>=!~ ]", d, maxsplit=1)[0].lower().replace("_", "-") for d in wanted}
    assert names - pinned == set()


def test_flink_of_the_lock_is_flink_of_the_connector() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    jars = (ROOT / "infra" / "jars.sha256").read_text(encoding="utf-8")
    assert "apache-flink==2.3.0" in lock
    assert "flink-sql-connector-kafka:5.0.0-2.2" in jars
