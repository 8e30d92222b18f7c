"""The programs of this folder: `roostream serving` and `roostream features`. Each imports only what it needs."""

from __future__ import annotations

from runtime import program
from serving.config import FeaturesConfig, ServingConfig


def run_serving(config: ServingConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code (runtime.program.run)."""
    from serving.process import serve

    return program.run("serving", lambda stop: serve(config, stop))


def run_features(config: FeaturesConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code (runtime.program.run). Imports no torch."""
    from serving.features import features_body

    return program.run("features", lambda stop: features_body(config, stop))
