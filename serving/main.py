"""`roostream serving`."""

from __future__ import annotations

from runtime import program
from serving.config import ServingConfig


def run(config: ServingConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `runtime.program.run`."""
    from serving.process import serve

    return program.run("serving", lambda stop: serve(config, stop))
