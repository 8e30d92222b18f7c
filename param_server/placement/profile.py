"""What is known of a table's traffic, by the feature that reads it: FDP's data, counted from lookups that exist anyway.

Uniques of a batch grow more slowly than ids: what a requester of another size needs is read off a power of the ids. Which batches
are looked at is a hash of (seed, step): replays look at the same.

Paper: Kurian et al., *Scalable Machine Learning Training Infrastructure for Online Ads Recommendation*, §V (feature-based data
placement). Letters: L entries of a feature.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from roostream.schema.ids import MASK64, splitmix64
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, sources_of

MIN_BATCHES = 4  # looked at, before a profile says anything


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableProfile:
    """Of one feature that reads a table. Sums over the batches looked at."""

    feature: str
    table: str
    dim: int
    batches: int
    examples: int  # rows of its side: requests, or candidates
    ids: int
    uniques: int
    max_len: int  # ids of a row
    squares: float = 0.0  # of uniques a batch, for their error
    half_ids: int = 0  # the first half of each batch's, and how many rows those were
    half_uniques: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.uniques <= self.ids, self

    @property
    def valency(self) -> float:
        """Ids an example."""
        return self.ids / self.examples if self.examples else 0.0

    @property
    def batch_examples(self) -> float:
        return self.examples / self.batches if self.batches else 0.0

    def uniques_of(self, examples: float) -> float:
        """Expected in a batch of so many examples: uniques ~ ids^a (Heaps' law), a from the batches' first halves and the whole.
        At the size that was looked at it is exact."""
        if not self.batches or not self.uniques:
            return 0.0
        ids, uniques, power = self.ids / self.batches, self.uniques / self.batches, 1.0
        if 0 < self.half_ids < self.ids:
            power = math.log(self.uniques / self.half_uniques) / math.log(self.ids / self.half_ids)
        wanted = self.valency * examples
        return min(uniques * (wanted / ids) ** min(max(power, 0.0), 1.0), wanted)

    @property
    def error(self) -> float:
        """Relative standard error of the uniques a batch; ∞ below MIN_BATCHES."""
        if self.batches < MIN_BATCHES or not self.uniques:
            return math.inf
        mean = self.uniques / self.batches
        variance = max(self.squares / self.batches - mean * mean, 0.0)
        return math.sqrt(variance / (self.batches - 1)) / mean

    def merged(self, other: TableProfile, keep: float = 1.0) -> Self:
        """This one times `keep`, with what another has counted of the same."""
        assert (self.feature, self.table, self.dim) == (other.feature, other.table, other.dim)

        def both(name: str) -> int:
            return round(keep * getattr(self, name)) + int(getattr(other, name))

        ids = both("ids")
        return dataclasses.replace(
            self,
            batches=both("batches"),
            examples=both("examples"),
            ids=ids,
            uniques=min(both("uniques"), ids),
            max_len=max(self.max_len, other.max_len),
            squares=keep * self.squares + other.squares,
            half_ids=both("half_ids"),
            half_uniques=min(both("half_uniques"), both("half_ids")),
        )

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Profiler:
    """Counts what a share of a loop's batches looks up. One thread."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share, self.seed = share, seed
        self.profiles: dict[str, TableProfile] = {}
        self.num_seen = 0

    def looks_at(self, step: int) -> bool:
        """A hash of seed and step, so that a replay looks at the same."""
        if not self.share:
            return False
        return splitmix64((splitmix64(self.seed & MASK64) ^ step) & MASK64) < int(self.share * (MASK64 + 1))

    def take(self) -> dict[str, TableProfile]:
        """What was counted since the last call, by feature."""
        taken, self.profiles = self.profiles, {}
        return taken

    def see(self, batch: Batch, lookup: Lookup) -> None:
        """A batch that is looked at, and its lookup."""
        self.num_seen += 1
        for stack, sources in batch.schema.derived(sources_of).items():
            for source in sources:
                index_L = lookup.stacks[stack].index[source.key]
                jagged, rows = (
                    (batch.ro_lists, batch.num_requests)
                    if source.side == "ro"
                    else (batch.nro_lists, batch.num_candidates)
                )
                lengths_N = jagged.lengths_KN[jagged.index(source.key.partition(".")[0])]
                half_L = index_L[: len(index_L) // 2]
                uniques, half = (int(np.count_nonzero(np.bincount(at_L))) for at_L in (index_L, half_L))
                seen = TableProfile(
                    feature=source.key,
                    table=source.table.name,
                    dim=source.table.dim,
                    batches=1,
                    examples=rows,
                    ids=len(index_L),
                    uniques=uniques,
                    max_len=int(lengths_N.max(initial=0)),
                    squares=float(uniques) ** 2,
                    half_ids=len(half_L),
                    half_uniques=half,
                )
                before = self.profiles.get(source.key)
                self.profiles[source.key] = before.merged(seen) if before else seen


def of_plain(plain: Mapping[str, Any]) -> TableProfile:
    """Inverse of `TableProfile.plain`. Raises TypeError: another thing."""
    return TableProfile(**plain)
