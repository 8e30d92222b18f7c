"""Settings of the feature updater."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roo.config import setting
from runtime.deployment import Deployment


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(Deployment):
    """`roostream features`: keeps histories and counters in Redis from the event topics."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "schema", "redis")

    redis: str = setting("", "redis://host:port/0")
