"""Profiles in the checkpoint store, by what they are of: a feature, the table that it reads, and that table's width. So models
that share a feature share what is known of it, and a table that was renamed or widened begins anew.

    profiles/<feature>.<table>.<dim>.json     {"checksum", "body": {"profile", "time_ms"}}
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from param_server.placement.plan import PlannedTable
from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.manifest import checksum_of
from roostream.schema.ids import MASK64, splitmix64
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, sources_of

log = logging.getLogger("roostream.placement")

FOLDER = "profiles"
KEEP = 0.5  # of what was counted before, when more is added
MAX_AGE_MS = 7 * 86_400_000


class StoredProfile(NamedTuple):
    profile: TableProfile
    time_ms: int  # when it was last added to


class ProfileRecorder:
    """What a loop's batches ask for, and its way into the store. `look` in the loop's thread, `save` in another."""

    def __init__(self, profiler: Profiler, store: CheckpointStore, clock: Clock) -> None:
        self.profiler, self.store, self.clock = profiler, store, clock

    def look(self, step: int, batch: Batch, lookup: Lookup) -> None:
        if self.profiler.looks_at(step):
            self.profiler.see(batch, lookup)

    def save(self) -> None:
        """What was counted since the last time. Where the store is away it is lost, with a warning: it is only statistics."""
        counted = self.profiler.take()
        try:
            save(self.store, counted, self.clock.now_ms())
        except UnavailableError as error:
            log.warning("profiles of %d features are lost: %s", len(counted), error)


def name_of(feature: str, table: str, dim: int) -> str:
    return f"{FOLDER}/{feature}.{table}.{dim}.json"


def save(store: CheckpointStore, profiles: Mapping[str, TableProfile], now_ms: int) -> None:
    """Add what was counted to what is there, which counts for KEEP of it. One writer.

    Raises:
        UnavailableError: the store can't be written; some may be added, and would be added again.
    """
    for profile in profiles.values():
        name = name_of(profile.feature, profile.table, profile.dim)
        before = _read(store, name)
        merged = before.profile.merged(profile, KEEP) if before else profile
        body = {"profile": merged.plain(), "time_ms": now_ms}
        store.put(name, json.dumps({"checksum": _checksum(body), "body": body}).encode())


def stored(store: CheckpointStore, schema: Schema) -> dict[str, StoredProfile]:
    """Feature → what is known of it, for features of this schema. A damaged one is as none, with a warning."""
    found = {}
    for sources in schema.derived(sources_of).values():
        for source in sources:
            if its := _read(store, name_of(source.key, source.table.name, source.table.dim)):
                found[source.key] = its
    return found


def placed_tables(
    schema: Schema,
    known: Mapping[str, StoredProfile],
    *,
    batch: int,
    now_ms: int,
    rows: Mapping[str, int],
    max_age_ms: int = MAX_AGE_MS,
) -> tuple[list[PlannedTable], list[str]]:
    """The schema's tables for a requester's `batch` examples, and why some are as if nobody had counted them. A table is counted
    when every feature that reads it is; what its features ask for is added up, an upper bound of what they share."""
    out, why = [], []
    sources = [source for of_stack in schema.derived(sources_of).values() for source in of_stack]
    for table in schema.tables:
        its = [source.key for source in sources if source.table.name == table.name]
        missing = [key for key in its if key not in known]
        young = [key for key in its if key in known and known[key].profile.batches < MIN_BATCHES]
        old = [key for key in its if key in known and now_ms - known[key].time_ms > max_age_ms]
        texts = ((missing, "never counted"), (young, f"fewer than {MIN_BATCHES} batches"), (old, "too old"))
        reasons = [f"{key}: {text}" for keys, text in texts for key in keys]
        counted = bool(its) and not reasons
        if reasons:
            why.append(f"{table.name} ({', '.join(reasons)})")
        uniques = sum(known[key].profile.uniques_of(batch) for key in its) if counted else None
        ids = sum(known[key].profile.valency * batch for key in its) if counted else None
        row_wise = 0 < table.rule.state_width(table.dim) < table.dim
        out.append(
            PlannedTable(
                name=table.name,
                dim=table.dim,
                row_wise_rule=row_wise,
                rows=rows.get(table.name, 0),
                uniques=uniques,
                ids=ids,
            )
        )
    return out, why


def _read(store: CheckpointStore, name: str) -> StoredProfile | None:
    try:
        outer = json.loads(store.get(name))
        body = outer["body"]
        if outer["checksum"] != _checksum(body):
            raise CheckpointError(f"{name}: expected checksum {outer['checksum']}: it is damaged")
        return StoredProfile(of_plain(body["profile"]), int(body["time_ms"]))
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        if name in store.list(FOLDER):
            log.warning("%s is not used: %s", name, error)
        return None


def _checksum(body: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(body, sort_keys=True).encode())


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
