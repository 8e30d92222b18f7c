"""Profiles of tables' traffic by the feature that reads them (FDP), and their storage in the checkpoint
store.

A profile is counted from lookups that training makes anyway. Unique rows of a batch grow more slowly than
ids; the number for another batch size follows from a power law of the ids. Which batches are counted is a
hash of (seed, step), so replays count the same ones. Models that share a feature share its profile; a renamed
or widened table starts a new one. Of several workers, the first one counts: each has samples of all kinds.

    profiles/<feature>.<table>.<dim>.json     {"checksum", "body": {"profile", "time_ms"}}

Paper: Kurian et al., *Scalable Machine Learning Training Infrastructure for Online Ads Recommendation*, §V
(feature-based data placement). Letters: L entries of a feature.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
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
from roostream.wire.lookup import Lookup, Source, sources_of

log = logging.getLogger("roostream.placement")

FOLDER = "profiles"
WINDOW_BATCHES = 256  # earlier counts weigh no more than these make up to, whatever the time between commits
MAX_AGE_MS = 7 * 86_400_000
MIN_BATCHES = 4  # counted before a profile is used
_MAX_NAME = 64 - len(".json")  # of an object below FOLDER (runtime/checkpoint_store.py)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableProfile:
    """The traffic of one feature that reads a table. Sums over the counted batches."""

    feature: str
    table: str
    dim: int
    batches: int
    examples: int  # requests or candidates, by the feature's side
    ids: int
    uniques: int
    max_len: int  # largest number of ids of a row
    squares: float = 0.0  # sum of squares of uniques a batch, for the error
    half_ids: int = 0  # ids and unique rows of the first half of each batch
    half_uniques: int = 0
    requests: int = 0  # 0 = not counted: as many as examples
    impression_ids: int = 0  # ids if every impression had all ids of its request; 0 = not counted

    def __post_init__(self) -> None:
        assert 0 <= self.uniques <= self.ids, self

    @property
    def valency(self) -> float:
        """Ids an example."""
        return self.ids / self.examples if self.examples else 0.0

    @property
    def expansion(self) -> float:
        """How often an id would be repeated if every impression had all ids of its request; 1 = not
        counted, or the feature belongs to candidates."""
        return self.impression_ids / self.ids if self.impression_ids else 1.0

    @property
    def _expands(self) -> bool:
        """Whether `impression_ids` was counted; without ids it is 0 then, too."""
        return self.impression_ids > 0 or not self.ids

    def examples_of(self, requests: float) -> float:
        """Number of examples of the feature in a batch of `requests` requests, as in the counted batches: one
        a request, or one a candidate."""
        return requests * self.examples / self.requests if self.requests else requests

    def uniques_of(self, examples: float) -> float:
        """The expected number of different rows in a batch of this many examples, by Heaps' law: it grows as
        ids^a, with `a` from counts of half and of whole batches. Exact at the counted size; 0.0 if nothing
        was counted."""
        if not self.batches or not self.uniques:
            return 0.0
        ids, uniques, power = self.ids / self.batches, self.uniques / self.batches, 1.0
        if 0 < self.half_ids < self.ids and self.half_uniques:  # decayed counts may round to 0
            power = math.log(self.uniques / self.half_uniques) / math.log(self.ids / self.half_ids)
        wanted = self.valency * examples
        return min(uniques * (wanted / ids) ** min(max(power, 0.0), 1.0), wanted)

    @property
    def error(self) -> float:
        """Relative standard error of the unique rows a batch; infinite below MIN_BATCHES."""
        if self.batches < MIN_BATCHES or not self.uniques:
            return math.inf
        mean = self.uniques / self.batches
        variance = max(self.squares / self.batches - mean * mean, 0.0)
        return math.sqrt(variance / (self.batches - 1)) / mean

    def merged(self, other: TableProfile, keep: float = 1.0) -> Self:
        """This profile, weighted by `keep`, plus another one of the same feature."""
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
            requests=both("requests") if self.requests and other.requests else 0,
            impression_ids=both("impression_ids") if self._expands and other._expands else 0,
        )

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class StoredProfile(NamedTuple):
    """A profile as the checkpoint store has it."""

    profile: TableProfile
    time_ms: int  # of the last update


class Profiler:
    """Counts what a share of a loop's batches looks up. One thread."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share, self.seed = share, seed
        self.profiles: dict[str, TableProfile] = {}

    def is_counted(self, step: int) -> bool:
        """A hash of seed and step decides, so that a replay counts the same batches."""
        if not self.share:
            return False
        return splitmix64((splitmix64(self.seed & MASK64) ^ step) & MASK64) < int(self.share * (MASK64 + 1))

    def take(self) -> dict[str, TableProfile]:
        """What was counted since the last call, by feature."""
        taken, self.profiles = self.profiles, {}
        return taken

    def count(self, batch: Batch, lookup: Lookup) -> None:
        """Count a batch and its lookup."""
        for stack, sources in batch.schema.derived(sources_of).items():
            for source in sources:
                index_L = lookup.stacks[stack].index[source.key]
                lengths_N = _list_lengths(batch, source)
                impressions = int(batch.num_candidates_R @ lengths_N) if source.side == "ro" else len(index_L)
                half_L = index_L[: len(index_L) // 2]
                uniques, half = (int(np.count_nonzero(np.bincount(at_L))) for at_L in (index_L, half_L))
                seen = TableProfile(
                    feature=source.key,
                    table=source.table.name,
                    dim=source.table.dim,
                    batches=1,
                    examples=len(lengths_N),
                    ids=len(index_L),
                    uniques=uniques,
                    max_len=int(lengths_N.max(initial=0)),
                    squares=float(uniques) ** 2,
                    half_ids=len(half_L),
                    half_uniques=half,
                    requests=batch.num_requests,
                    impression_ids=impressions,
                )
                before = self.profiles.get(source.key)
                self.profiles[source.key] = before.merged(seen) if before else seen


class ProfileRecorder:
    """Counts a training loop's batches and saves the profiles. `observe` is called by the loop's thread,
    `save` by another."""

    def __init__(self, profiler: Profiler, store: CheckpointStore, clock: Clock) -> None:
        self.profiler, self.store, self.clock = profiler, store, clock
        self._lock = threading.Lock()

    def observe(self, step: int, batch: Batch, lookup: Lookup) -> None:
        """Count the batch of a step, if it is one of those that are counted."""
        if self.profiler.is_counted(step):
            with self._lock:
                self.profiler.count(batch, lookup)

    def save(self) -> None:
        """Save what was counted since the last call. If the store is away it is lost, with a warning: it is
        only statistics."""
        with self._lock:
            counted = self.profiler.take()
        try:
            save_profiles(self.store, counted, self.clock.now_ms())
        except UnavailableError as error:
            log.warning("profiles of %d features are lost: %s", len(counted), error)


def name_of(feature: str, table: str, dim: int) -> str:
    """The name of a profile's object in the store. A name that is too long for a store is cut, and ends in a
    checksum of the whole name."""
    name = f"{feature}.{table}.{dim}"
    if len(name) > _MAX_NAME:
        name = f"{name[: _MAX_NAME - 17]}-{checksum_of(name.encode())}"
    return f"{FOLDER}/{name}.json"


def save_profiles(store: CheckpointStore, profiles: Mapping[str, TableProfile], now_ms: int) -> None:
    """Merge new counts into the stored ones, which are weighted so that they and the new ones are at most
    WINDOW_BATCHES batches, if the new ones are fewer. One writer.

    Raises:
        UnavailableError: the store cannot be written; some profiles may be merged already.
    """
    for profile in profiles.values():
        name = name_of(profile.feature, profile.table, profile.dim)
        before = _read(store, name)
        keep = max(WINDOW_BATCHES - profile.batches, 0) / max(before.profile.batches, 1) if before else 0.0
        merged = before.profile.merged(profile, min(keep, 1.0)) if before else profile
        body = {"profile": merged.plain(), "time_ms": now_ms}
        store.put(name, json.dumps({"checksum": _checksum(body), "body": body}).encode())


def read_profiles(store: CheckpointStore, schema: Schema) -> dict[str, StoredProfile]:
    """Feature → its stored profile, for features of this schema. A damaged profile counts as none, with a
    warning."""
    found = {}
    for sources in schema.derived(sources_of).values():
        for source in sources:
            if profile := _read(store, name_of(source.key, source.table.name, source.table.dim)):
                found[source.key] = profile
    return found


def planned_tables(
    schema: Schema,
    known: Mapping[str, StoredProfile],
    *,
    batch: int,
    now_ms: int,
    rows: Mapping[str, int],
) -> tuple[list[PlannedTable], list[str]]:
    """Return the schema's tables in the form that a planner takes, for batches of `batch` requests, and a
    sentence for each table without a usable profile.

    A table has a usable profile if each feature that reads it has one. The row counts of its features are
    added. The sum is an upper bound, because features may read the same rows.
    """
    tables, why = [], []
    sources = [source for of_stack in schema.derived(sources_of).values() for source in of_stack]
    for table in schema.tables:
        keys = [source.key for source in sources if source.table.name == table.name]
        missing = [key for key in keys if key not in known]
        young = [key for key in keys if key in known and known[key].profile.batches < MIN_BATCHES]
        old = [key for key in keys if key in known and now_ms - known[key].time_ms > MAX_AGE_MS]
        texts = ((missing, "never counted"), (young, f"fewer than {MIN_BATCHES} batches"), (old, "too old"))
        reasons = [f"{key}: {text}" for listed, text in texts for key in listed]
        counted = bool(keys) and not reasons
        if reasons:
            why.append(f"{table.name} ({', '.join(reasons)})")
        profiles = [known[key].profile for key in keys] if counted else []
        uniques = sum(profile.uniques_of(profile.examples_of(batch)) for profile in profiles)
        ids = sum(profile.valency * profile.examples_of(batch) for profile in profiles)
        expanded = sum(
            profile.expansion * profile.valency * profile.examples_of(batch) for profile in profiles
        )
        row_wise = 0 < table.rule.state_width(table.dim) < table.dim
        tables.append(
            PlannedTable(
                name=table.name,
                dim=table.dim,
                row_wise_rule=row_wise,
                rows=rows.get(table.name, 0),
                uniques=uniques if counted else None,
                ids=ids if counted else None,
                impression_ids=expanded if counted else None,
            )
        )
    return tables, why


def _read(store: CheckpointStore, name: str) -> StoredProfile | None:
    try:
        outer = json.loads(store.get(name))
        body = outer["body"]
        if outer["checksum"] != _checksum(body):
            raise CheckpointError(f"{name}: expected checksum {outer['checksum']}: it is damaged")
        return StoredProfile(TableProfile(**body["profile"]), int(body["time_ms"]))
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        if name in store.list(FOLDER):
            log.warning("profile %s is ignored: %s", name, error)
        return None


def _checksum(body: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(body, sort_keys=True).encode())


def impression_bytes(batch: Batch) -> int:
    """Bytes of ids, rows and gradients in a step if every impression of the batch had all ids of its request
    and nothing were deduplicated."""
    total = 0
    for sources in batch.schema.derived(sources_of).values():
        for source in sources:
            lengths_N = _list_lengths(batch, source)
            ids = batch.num_candidates_R @ lengths_N if source.side == "ro" else lengths_N.sum()
            total += int(ids) * (8 + 8 * source.table.dim)
    return total


def _list_lengths(batch: Batch, source: Source) -> np.ndarray:
    """The number of ids in the list of each request (side "ro") or candidate ("nro"), int32 [N]."""
    lists = batch.ro_lists if source.side == "ro" else batch.nro_lists
    return lists.lengths_KN[lists.index(source.key.partition(".")[0])]
