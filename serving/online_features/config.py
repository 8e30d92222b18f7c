"""Settings of the feature updater."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roostream.runtime.deployment import Deployment, RedisSettings
from roostream.schema.settings import setting

MAX_UPDATERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(RedisSettings, Deployment):
    """`roostream features`: keeps histories and counters in Redis from the event topics."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "schema", "redis")

    index: int = setting(0, "number of this updater, from 0", ge=0, le=63)
    num_updaters: int = setting(
        1,
        "updaters of this deployment; partition p belongs to number p mod num_updaters",
        ge=1,
        le=MAX_UPDATERS,
    )
    replace_other_cluster: bool = setting(
        False, "delete online features of another Kafka cluster or deleted event topics, and begin anew"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_share(self.index, "num_updaters")
