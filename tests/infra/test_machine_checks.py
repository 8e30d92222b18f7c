from __future__ import annotations

from pathlib import Path

import pytest

from infra import machine_checks
from infra.jars import find_java
from roostream.errors import SetupError


@pytest.mark.parametrize("version", [(3, 11), (3, 12)])
def test_a_good_python_passes(version: tuple[int, int]) -> None:
    machine_checks.require_python(version)


@pytest.mark.parametrize("version", [(3, 10), (3, 13), (2, 7)])
def test_another_python_is_told_in_one_sentence(version: tuple[int, int]) -> None:
    with pytest.raises(SetupError, match=r"expected Python 3\.11 or 3\.12 .* got"):
        machine_checks.require_python(version)


def test_too_little_disk_is_told_even_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    machine_checks.require_disk(tmp_path / "a" / "b", min_bytes=1)
    with pytest.raises(SetupError, match="free disk"):
        machine_checks.require_disk(tmp_path / "a" / "b", min_bytes=1 << 60)


def test_too_little_memory_is_told(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:        3900000 kB\nMemFree: 1 kB\n")
    with pytest.raises(SetupError, match=r"8 GB of memory, got 4\.0 GB"):
        machine_checks.require_memory(meminfo=meminfo)
    meminfo.write_text("MemTotal:        8000000 kB\n")
    machine_checks.require_memory(meminfo=meminfo)


def test_a_java_that_is_not_there_is_told() -> None:
    with pytest.raises(SetupError, match="no java at"):
        find_java("/no/such/java")
    assert find_java().exists()
