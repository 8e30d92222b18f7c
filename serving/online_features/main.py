"""`roostream features`. Imports no torch."""

from __future__ import annotations

from roostream.runtime import program
from serving.online_features.config import FeaturesConfig


def run(config: FeaturesConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `roostream.runtime.program.run`."""
    from serving.online_features.updater import features_body

    return program.run("features", lambda stop: features_body(config, stop), config.log_format)
