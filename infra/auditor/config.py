"""Settings of the auditor."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roostream.runtime.deployment import Deployment
from roostream.schema.settings import setting, setting_error

HORIZON_MS = 1_800_000


def horizon_for(settle_ms: int, *, replay: bool) -> int:
    """`horizon_ms` of a deployment. In a replay the auditor remembers all ids (0), because events have the
    times of their log and corrections and dead letters the broker's time, years apart."""
    return 0 if replay else max(2 * settle_ms, HORIZON_MS)


def check_num_auditors(num_auditors: int, partitions: int) -> None:
    """Check that each auditor gets equally many partitions.

    Raises:
        ConfigError: `num_auditors` does not divide `partitions`.
    """
    if partitions % num_auditors:
        raise setting_error(
            "num_auditors",
            f"a divisor of partitions = {partitions}",
            num_auditors,
            "so that a key stays with its auditor when partitions are added",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditorConfig(Deployment):
    """`roostream auditor`: counts all records of the topics to prove that every event is accounted for."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "home")

    home: str = setting("", "directory where the sums are saved between two runs")
    settle_ms: int = setting(
        600_000,
        "how long an event may wait for its outcome; twice the join window plus a minute is enough",
        ge=1,
    )
    horizon_ms: int = setting(
        HORIZON_MS, "event time for which settled ids are remembered; 0 = forever", ge=0
    )
    index: int = setting(0, "number of this auditor, from 0", ge=0)
    num_auditors: int = setting(
        1,
        "auditors of this deployment, a divisor of `partitions`; partition p belongs to number p mod "
        "num_auditors",
        ge=1,
        le=64,
    )
    save_interval_ms: int = setting(15_000, "time between two saves of the sums", ge=100)
    max_waiting: int = setting(1_000_000, "inputs without an outcome at which reading of inputs pauses", ge=1)

    compare_model: bool = setting(
        True,
        "compare the model with simple baselines, about 0.3 ms of CPU a request; needs the schema. Of "
        "several auditors, number 0 does so for its own requests",
    )
    compare_share: float = setting(
        1.0,
        "share of these requests that are compared, chosen by sample id; the baselines learn from them "
        "alone. 0.1 is enough above 1,000 requests a second",
        gt=0,
        le=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_auditors(self.num_auditors, self.partitions)
        if self.index >= self.num_auditors:
            raise setting_error("index", f"less than num_auditors = {self.num_auditors}", self.index)
        if self.horizon_ms and self.horizon_ms < 2 * self.settle_ms:
            raise setting_error(
                "horizon_ms", f"0, or at least twice settle_ms = {self.settle_ms}", self.horizon_ms
            )
