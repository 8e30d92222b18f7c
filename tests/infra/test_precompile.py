"""Compiling kernels before anybody waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import precompile, prepare
from infra.options import ROOT


def test_every_module_with_kernels_is_warmed_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert precompile.main() == 0
    assert [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()] == list(
        precompile.MODULES
    )


def test_what_an_extra_brings_is_passed_over_without_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "lacks_extra.py").write_text("import a_package_of_an_extra\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("import broken.gone\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(precompile, "MODULES", ("lacks_extra",))
    assert precompile.main() == 0
    assert capsys.readouterr().out == "  lacks_extra: passed over, a_package_of_an_extra isn't installed\n"
    monkeypatch.setattr(precompile, "MODULES", ("broken",))
    with pytest.raises(ModuleNotFoundError):
        precompile.main()


def test_kernels_are_compiled_anew_when_a_file_with_one_changes() -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in prepare.kernel_sources()}
    expected = {
        "roostream/wire/decode_scan.py",
        "param_server/kernels.py",
        "trainer/selection/deferral_kernels.py",
        "roostream/models/embedding_ops.py",
    }
    assert expected | {"serving/answer.py"} <= sources
    assert "trainer/process_group.py" not in sources
