"""When a child that died is started again: pure, told the time.

The first restart comes at once, later ones wait twice as long each time. A child that lived for `stable_s` starts with a clean
sheet. Never give this to a program that ends by itself (`simulate`): its end is its result.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    first_s: float = 0.5
    max_s: float = 15.0
    stable_s: float = 30.0  # well below a minute: one kill a minute is no crash loop
    max_restarts: int = 12  # in a row, none of which lived for stable_s: about two minutes

    def delay_s(self, deaths: int) -> float | None:
        """Seconds until the next start after `deaths` deaths in a row, or None to give up."""
        if deaths > self.max_restarts:
            return None
        return 0.0 if deaths <= 1 else min(self.first_s * 2 ** (deaths - 2), self.max_s)


@dataclasses.dataclass(kw_only=True)
class Restarts:
    """One child's record."""

    policy: RestartPolicy
    deaths_in_a_row: int = 0
    total: int = 0

    def died(self, lived_s: float) -> float | None:
        """Note a death; seconds until the next start, or None to give up."""
        self.deaths_in_a_row = 1 if lived_s >= self.policy.stable_s else self.deaths_in_a_row + 1
        delay_s = self.policy.delay_s(self.deaths_in_a_row)
        if delay_s is not None:
            self.total += 1
        return delay_s

    def forgive(self) -> None:
        """Someone asked for it by name again."""
        self.deaths_in_a_row = 0
