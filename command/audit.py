"""The auditor as `demo` and `status` use it: sums that are None until the topics could be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from command.auditor import Auditor
from roo.errors import RoostreamError
from runtime.kafka.broker import Broker
from runtime.kafka.topics import DEFAULT_PARTITIONS

_REMEMBERED_MS = 4 * 3_600_000  # a demo runs for days: settled ids are forgotten after this much event time


class Audit:
    """`stack` as in stack.json."""

    def __init__(self, stack: Mapping[str, Any]) -> None:
        settle_ms = int(stack["settle_ms"])
        self.auditor = Auditor(
            Broker(str(stack["kafka"])),
            str(stack["prefix"]),
            num_partitions=int(stack.get("partitions", DEFAULT_PARTITIONS)),
            settle_ms=settle_ms,
            horizon_ms=max(_REMEMBERED_MS, 20 * settle_ms),
        )

    def sums(self, budget_s: float) -> dict[str, Any] | None:
        """Read on for about `budget_s`; the sums of what has been read."""
        try:
            self.auditor.poll(budget_s)
        except RoostreamError:
            return None
        return dataclasses.asdict(self.auditor.sums())

    def read_all(self, limit_s: float, step_s: float = 1.0) -> dict[str, Any] | None:
        """Read to the end of the topics, or for about `limit_s`."""
        sums = None
        for _ in range(max(int(limit_s / step_s), 1)):
            sums = self.sums(step_s)
            if sums is None or self.is_at_end():
                break
        return sums

    def is_at_end(self) -> bool:
        try:
            return self.auditor.poll(0.0) == 0
        except RoostreamError:
            return True

    def close(self) -> None:
        self.auditor.close()
