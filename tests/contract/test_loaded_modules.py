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
    "command.main": (),
    "roo.schema, roo.wire": (),
    "command.main, param_server.main": ("rocksdict",),
    "command.main, param_server.client": (),
    "command.main, joiner.main": (),
    "command.main, traffic.main": (),
    "command.main, models.build": ("torch",),
    "command.main, trainer.control.controller": (),
    "command.main, features.updater": ("redis",),
    "command.main, serving.http.app": ("torch", "fastapi", "uvicorn", "redis"),
    "command.main, trainer.worker": ("torch",),
    "serving.client": (),
}


@pytest.mark.parametrize("modules", MAY_LOAD)
def test_a_program_loads_only_what_it_needs(modules: str) -> None:
    code = f"import sys\nimport {modules}\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= set(MAY_LOAD[modules])
