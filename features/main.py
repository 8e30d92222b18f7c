"""`roostream features`. Imports no torch."""

from __future__ import annotations

from features.config import FeaturesConfig
from runtime import program


def run(config: FeaturesConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `runtime.program.run`."""
    from features.updater import features_body

    return program.run("features", lambda stop: features_body(config, stop), config.log_format)
