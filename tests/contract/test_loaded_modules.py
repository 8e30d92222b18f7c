"""A program loads what it needs: torch costs two seconds and half a gigabyte, so a shard must not have it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
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
    # what is imported                      heavy packages that may come with it
    "infra.main": (),
    "roo.schema, roo.wire": (),
    "infra.main, param_server.main": ("rocksdict",),
    "infra.main, param_server.client": (),
    "infra.main, joiner.main": (),
    "infra.main, traffic.main": (),
    "infra.main, models.build": ("torch",),
    "infra.main, trainer.controller": (),
    "infra.main, serving.features": ("redis",),
    "infra.main, serving.app": ("torch", "fastapi", "uvicorn", "redis"),
    "infra.main, trainer.worker": ("torch",),
}


@pytest.mark.parametrize("modules", MAY_LOAD)
def test_a_program_loads_only_what_it_needs(modules: str) -> None:
    code = f"import sys\nimport {modules}\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= set(MAY_LOAD[modules])
