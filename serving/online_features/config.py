"""Settings of the feature updater."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roostream.runtime.deployment import Deployment, RedisSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(RedisSettings, Deployment):
    """`roostream features`: keeps histories and counters in Redis from the event topics."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "schema", "redis")
