"""A program imports no heavy package that it does not need. Importing torch takes two seconds and half a
gigabyte."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "numba",
    "torch",
    "torchrec",
    "fbgemm_gpu",
    "pyflink",
    "fastapi",
    "uvicorn",
    "pandas",
    "pyarrow",
    "rocksdict",
    "redis",
    "rich",
    "grpc_tools",
)

MAY_LOAD = {
    # imported modules → heavy packages that may come with them
    "roostream.cli.main": (),
    "roostream.schema.schema_file, roostream.wire.block": (),
    "roostream.cli.main, param_server.main": ("numba", "rocksdict"),
    "roostream.cli.main, joiner.main": (),
    "roostream.cli.main, roostream.replay.main": (),
    "roostream.cli.main, trainer.control.controller": (),
    "roostream.cli.main, serving.online_features.updater": ("redis",),
    "roostream.cli.main, serving.http.app": ("numba", "torch", "fastapi", "uvicorn", "redis"),
    "roostream.cli.main, trainer.worker": ("numba", "torch"),
    "serving.client": (),
}


@pytest.mark.parametrize(
    "modules",
    [pytest.param(m, marks=[pytest.mark.slow] if "torch" in heavy else []) for m, heavy in MAY_LOAD.items()],
)
def test_a_program_imports_only_the_heavy_packages_it_needs(modules: str) -> None:
    code = f"import sys\nimport {modules}\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    completed = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert set(completed.stdout.split()) <= set(MAY_LOAD[modules])
