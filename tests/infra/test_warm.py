"""Compiling kernels before anybody waits for them."""

from __future__ import annotations

import pytest

from infra import warm


def test_every_module_with_kernels_is_warmed_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert warm.main() == 0
    assert [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()] == list(warm.MODULES)
