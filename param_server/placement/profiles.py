"""Profiles in the checkpoint store, by what they are of: a feature, the table that it reads, and that table's width. So models
that share a feature share what is known of it, and a table that was renamed or widened begins anew.

    profiles/<feature>.<table>.<dim>.json     {"checksum", "body": {"profile", "time_ms"}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from param_server.placement.cost import PlacedTable
from param_server.placement.profile import MIN_BATCHES, Profiler, TableProfile, of_plain
from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.manifest import checksum_of
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


class CountedTables:
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
) -> tuple[list[PlacedTable], list[str]]:
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
            PlacedTable(
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
