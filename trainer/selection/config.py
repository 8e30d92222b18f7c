"""Settings of selection, deferral and rehearsal; all are off by default."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.schema.settings import Settings, setting, setting_error

MIN_SAMPLE = 201  # of Slipstream's sampled search; from here on its interval is conservative (slipstream.py)
_MIN_KEEP = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlipstreamConfig(Settings):
    """Settings of `policy = "slipstream"`. All times are in steps."""

    hot_ratio: float = setting(
        1e-6, "smallest share of all counted accesses that makes a row hot", gt=0, lt=1
    )
    count_requests: int = setting(
        0, "requests whose accesses are counted; 0 = all until the first snapshot", ge=0
    )
    warm_up_steps: int = setting(2000, "steps before the first snapshot of the hot rows", ge=1)
    snapshots: int = setting(
        4, "snapshots of the hot rows; movement is measured between consecutive ones", ge=2, le=64
    )
    snapshot_steps: int = setting(250, "steps from one snapshot to the next", ge=1)
    drop: float = setting(0.3, "share of the hot inputs to skip", ge=0, le=1)
    alpha: float = setting(
        0.5,
        "share of an input's slots that must be stale to skip it; 0 = skip all hot inputs",
        ge=0,
        le=1,
    )
    hot_share: float = setting(1.0, "share of an input's slots that must be hot", gt=0, le=1)
    unvisited: Literal["varying", "stale"] = setting(
        "varying", "class of hot rows that no step visited; the paper: stale"
    )
    max_hot_rows: int = setting(1 << 20, "limit of hot rows; the most accessed ones are kept", ge=1)
    sample: int = setting(
        0,
        "sample of hot inputs for the threshold, as in the paper, 201 or more; 0 = exact, from all of them",
        ge=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.sample < MIN_SAMPLE:
            raise setting_error(
                "sample",
                f"0, or {MIN_SAMPLE} or more",
                self.sample,
                "with fewer the interval would be too narrow",
            )

    @property
    def last_snapshot(self) -> int:
        """The step after which the last snapshot is taken."""
        return self.warm_up_steps + (self.snapshots - 1) * self.snapshot_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionConfig(Settings):
    """Settings of data selection: which requests are trained."""

    policy: Literal["off", "negatives", "random", "slipstream"] = setting(
        "off", "requests that may be skipped: without a positive | any | with stale rows (finite logs only)"
    )
    keep: float = setting(
        0.5, "share of the eligible requests that is trained, for negatives and random", ge=_MIN_KEEP, le=1
    )
    score: Literal["all", "probe", "kept"] = setting(
        "all",
        "skipped requests that are scored for progressive metrics; kept: none, a trained one represents 1 "
        "/ keep",
    )
    probe: float = setting(0.05, "share of the skipped requests to score with score = probe", gt=0, le=1)
    refill: bool = setting(
        False,
        "read larger chunks, so that about batch_requests are trained despite skipping; not with exact",
    )
    slipstream: SlipstreamConfig = setting(factory=SlipstreamConfig, help="settings of policy = slipstream")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score == "kept" and self.policy == "slipstream":
            error = "inputs without stale rows are not a sample of all inputs"
            raise setting_error("score", "all or probe with policy = slipstream", self.score, error)

    @property
    def is_on(self) -> bool:
        return self.policy != "off"

    @property
    def min_kept(self) -> float:
        """Smallest share of many requests that is trained, whatever the log; a few may all be skipped."""
        return max(1 - self.slipstream.drop, _MIN_KEEP) if self.policy == "slipstream" else self.keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferralConfig(Settings):
    """Settings of deferral: which row gradients are collected at the worker."""

    share: float = setting(
        0.0,
        "share of the visits of hot rows whose gradients are deferred, least moving first; 0 = off",
        ge=0,
        le=1,
    )
    choice: Literal["stale", "random"] = setting(
        "stale", "hot rows to defer; random: the same share at random, as a control"
    )
    visits: int = setting(
        8, "a row's gradients are pushed at least once in this many visits", ge=1, le=1 << 16
    )
    min_visits: int = setting(10, "visits that make a row hot", ge=1)
    max_rows: int = setting(1 << 16, "watched rows per stack", ge=1)
    window: int = setting(20_000, "newest visits of hot rows from which the threshold is taken", ge=1)

    @property
    def is_on(self) -> bool:
        return self.share > 0 and self.visits > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalConfig(Settings):
    """Settings of rehearsal: which batches are trained again."""

    batches: int = setting(
        0,
        "number of recent batches, one of which is trained again after each batch; 0 = off",
        ge=0,
        le=1 << 16,
    )
    max_bytes: int = setting(
        16 << 20, "size limit of these batches; they are part of every commit", ge=1 << 10, le=1 << 30
    )

    @property
    def is_on(self) -> bool:
        return self.batches > 0
