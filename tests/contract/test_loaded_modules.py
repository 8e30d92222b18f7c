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
    "roostream.cli.main": (),
    "roostream.schema.schema, roostream.wire.records": (),
    "roostream.cli.main, param_server.main": ("rocksdict",),
    "roostream.cli.main, param_server.client": (),
    "roostream.cli.main, joiner.main": (),
    "roostream.cli.main, roostream.replay.main": (),
    "roostream.cli.main, roostream.models.build": ("torch",),
    "roostream.cli.main, trainer.control.controller": (),
    "roostream.cli.main, serving.online_features.updater": ("redis",),
    "roostream.cli.main, serving.http.app": ("torch", "fastapi", "uvicorn", "redis"),
    "roostream.cli.main, trainer.worker": ("torch",),
    "serving.client": (),
}


@pytest.mark.parametrize("modules", MAY_LOAD)
def test_a_program_loads_only_what_it_needs(modules: str) -> None:
    code = f"import sys\nimport {modules}\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= set(MAY_LOAD[modules])
