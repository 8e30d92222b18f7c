"""Settings of selection, deferral and rehearsal; all of it is off unless somebody asks for it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.schema.settings import Settings, setting, setting_error

MIN_SAMPLE = (
    201  # of Slipstream's sampled search: from here on its interval is on the safe side (slipstream.py)
)
_MIN_KEEP = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlipstreamConfig(Settings):
    """Of `policy = "slipstream"`: counted, warmed up, looked at, classified, then skipped. Everything counts steps."""

    hot_ratio: float = setting(1e-6, "a row is hot from this share of all counted accesses on", gt=0, lt=1)
    count_requests: int = setting(
        0, "requests whose accesses are counted; 0 = all until the first snapshot", ge=0
    )
    warm_up_steps: int = setting(2000, "steps before the first snapshot of the hot rows", ge=1)
    snapshots: int = setting(
        4, "snapshots of the hot rows; movement is between one and the next", ge=2, le=64
    )
    snapshot_steps: int = setting(250, "steps from one snapshot to the next", ge=1)
    drop: float = setting(0.3, "share of the hot inputs to be skipped", ge=0, le=1)
    alpha: float = setting(
        0.5,
        "share of an input's rows that must be stale for it to be skipped; 0 = all hot ones",
        ge=0,
        le=1,
    )
    hot_share: float = setting(1.0, "share of an input's rows that must be hot", gt=0, le=1)
    unvisited: Literal["varying", "stale"] = setting(
        "varying", "what a hot row is that no step visited; the paper: stale"
    )
    max_hot_rows: int = setting(1 << 20, "hot rows kept, the most visited ones", ge=1)
    sample: int = setting(
        0,
        "hot inputs among which the threshold is searched, as the paper does, 201 or more; 0 = all of them, exactly",
        ge=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.sample < MIN_SAMPLE:
            raise setting_error(
                "sample",
                f"0, or {MIN_SAMPLE} or more",
                self.sample,
                "of fewer the interval would be too narrow",
            )

    @property
    def last_snapshot(self) -> int:
        """The step behind which it is taken."""
        return self.warm_up_steps + (self.snapshots - 1) * self.snapshot_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionConfig(Settings):
    """Which requests are trained."""

    policy: Literal["off", "negatives", "random", "slipstream"] = setting(
        "off", "which requests are skipped: without any positive | any | with stale rows (finite logs alone)"
    )
    keep: float = setting(0.5, "share of what negatives and random judge that is trained", ge=_MIN_KEEP, le=1)
    score: Literal["all", "probe", "kept"] = setting(
        "all",
        "of the skipped requests, for progressive metrics; kept: none, each that is trained stands for 1 / keep of its kind",
    )
    probe: float = setting(
        0.05, "share of the skipped requests that is scored with score = probe", gt=0, le=1
    )
    refill: bool = setting(
        False,
        "chunks are read larger, by as much as was skipped lately, so that about batch_requests are trained; not with exact",
    )
    slipstream: SlipstreamConfig = setting(factory=SlipstreamConfig, help="of policy = slipstream")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score == "kept" and self.policy == "slipstream":
            error = "inputs without stale rows are no sample of all inputs"
            raise setting_error("score", "all or probe with policy = slipstream", self.score, error)

    @property
    def is_on(self) -> bool:
        return self.policy != "off"

    @property
    def min_kept(self) -> float:
        """Share of many requests that is trained at least, whatever the log is; a few may be skipped altogether."""
        return max(1 - self.slipstream.drop, _MIN_KEEP) if self.policy == "slipstream" else self.keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferralConfig(Settings):
    """Whose gradients wait at the worker."""

    share: float = setting(
        0.0,
        "share of the visits of hot rows whose gradients wait, those that move least; 0 = off",
        ge=0,
        le=1,
    )
    choice: Literal["stale", "random"] = setting(
        "stale", "which hot rows wait; random: so many others, as a control"
    )
    visits: int = setting(
        8, "a row's gradients are pushed at every so many visits at least", ge=1, le=1 << 16
    )
    min_visits: int = setting(10, "visits from which on a row is hot", ge=1)
    max_rows: int = setting(1 << 16, "rows of a stack that are looked at", ge=1)
    window: int = setting(20_000, "the newest visits of hot rows, among which the share is taken", ge=1)

    @property
    def is_on(self) -> bool:
        return self.share > 0 and self.visits > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalConfig(Settings):
    """What is trained once more."""

    batches: int = setting(
        0,
        "beside each batch one of so many last ones is trained once more, drawn by the seed; 0 = off",
        ge=0,
        le=1 << 16,
    )
    max_bytes: int = setting(
        16 << 20, "kept of them, the newest; every commit has them", ge=1 << 10, le=1 << 30
    )

    @property
    def is_on(self) -> bool:
        return self.batches > 0
