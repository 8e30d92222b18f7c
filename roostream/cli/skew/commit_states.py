"""Models and embedding rows of commits, for scoring logged lists again.

Rows change between commits and replicas follow every push. So the rows at a moment are known only from the
commits before and after it; rows that are equal in both are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from param_server.initial_rows import initial_rows
from param_server.row_block import RowBlock
from roostream.cli.checkpoint.checkpoints import schema_of, shard_segments
from roostream.errors import CheckpointError, ConfigError, SetupError
from roostream.models.build import model_config_from_dict
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.manifest import Manifest
from roostream.schema.ids import buckets_of
from roostream.schema.registry import open_registry
from roostream.schema.schema import Registry, Schema
from roostream.wire.lookup import Lookup
from serving.scorer import Version, build_version
from serving.versions.version_follower import read_weights

Wanted: TypeAlias = Mapping[str, set[tuple[int, int]]]
"""Stack → (table, id) of the rows to read."""


class SomeRows(NamedTuple):
    """The wanted rows of one commit; a missing row has its initial values."""

    seed: int
    rows: Mapping[str, Mapping[tuple[int, int], np.ndarray]]

    def gather(self, schema: Schema, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D], as a shard would return them."""
        out = {}
        for stack, stack_lookup in lookup.stacks.items():
            tables = {t.id: t for t in schema.stacks[stack]}
            scale_U = np.array(
                [tables[t].init_scale for t in stack_lookup.table_U.tolist()], dtype=np.float32
            )
            rows_UD = initial_rows(
                self.seed, stack_lookup.table_U, stack_lookup.id_U, schema.stacks[stack][0].dim, scale_U
            )
            known = self.rows.get(stack, {})
            for u, key in enumerate(
                zip(stack_lookup.table_U.tolist(), stack_lookup.id_U.tolist(), strict=True)
            ):
                if key in known:
                    rows_UD[u] = known[key]
            out[stack] = rows_UD
        return out


class CommitStates:
    """Commits of a store with the segments of the shards in `home`. Versions and rows are cached."""

    def __init__(self, store: CheckpointStore, home: Path) -> None:
        """Raises CheckpointError: there is no readable commit."""
        self.store, self.home = store, home
        self.manifests: dict[int, Manifest] = {}
        for number in manifests.numbers(store):
            try:
                self.manifests[number] = manifests.load(store, manifests.manifest_name(number)).manifest
            except CheckpointError:
                continue  # `checkpoint verify` reports it; here the version counts as deleted
        if not self.manifests:
            raise CheckpointError(
                "expected a readable commit in this store, got none; nothing can be scored again"
            )
        self.registry: Registry = open_registry(store)
        self._versions: dict[str, Version] = {}
        self._rows: dict[int, SomeRows | str] = {}
        self._wanted: Wanted = {}

    @property
    def names(self) -> dict[str, Manifest]:
        return {m.version: m for m in self.manifests.values()}

    def want(self, wanted: Wanted) -> None:
        """Set the rows that `rows` returns, and clear the cache."""
        self._wanted, self._rows = wanted, {}

    def version(self, name: str) -> Version:
        """The model version `name`, with the modules that training uses.

        Raises:
            CheckpointError: its commit was deleted or is damaged; the message names the existing commits.
        """
        if name not in self._versions:
            manifest = self.names.get(name)
            if manifest is None:
                first, last = min(self.manifests), max(self.manifests)
                raise CheckpointError(
                    f"version {name or '(none)'} was deleted: the store has commits {first} to {last}"
                )
            schema = schema_of(self.store, manifest)
            try:
                config = model_config_from_dict(manifest.model)
                weights = read_weights(self.store, manifest, schema)
                self._versions[name] = build_version(
                    name, schema, config, manifest.seed, weights, as_trained=True
                )
            except (ConfigError, RuntimeError) as error:
                raise CheckpointError(f"version {name} cannot be built: {error}") from None
        return self._versions[name]

    def around(self, version: str, time_ms: int) -> list[int]:
        """Commits whose rows may have been served with `version` at a time, the likeliest first.

        They are the newest commit at or before the time, the next one, and the previous one.
        """
        own = self.names[version].seq
        numbers = sorted(self.manifests)
        before = [n for n in numbers if n <= own or self.manifests[n].time_ms <= time_ms]
        at = numbers.index(before[-1])
        return [numbers[i] for i in (at, at + 1, at - 1) if 0 <= i < len(numbers)]

    def rows(self, seq: int) -> SomeRows:
        """The wanted rows of a commit.

        Raises:
            CheckpointError: its segments were deleted, are damaged, or are not in the home.
        """
        if seq not in self._rows:
            try:
                self._rows[seq] = self._read(self.manifests[seq])
            except (CheckpointError, SetupError) as error:
                self._rows[seq] = str(error)
        found = self._rows[seq]
        if isinstance(found, str):
            raise CheckpointError(f"rows of commit {seq}: {found}")
        return found

    def _read(self, manifest: Manifest) -> SomeRows:
        schema = schema_of(self.store, manifest)
        rows: dict[str, dict[tuple[int, int], np.ndarray]] = {stack: {} for stack in self._wanted}
        for index in manifest.shards:
            with shard_segments(manifest, schema, index, self.home, to_read=True) as (segments, state):
                buckets_by_stack = {stack: self._buckets(stack, manifest, index) for stack in self._wanted}
                for part in segments.read(state, buckets_by_stack):
                    for block in reversed(part.blocks):
                        _take(block, self._wanted[part.stack], rows[part.stack])
        return SomeRows(manifest.seed, rows)

    def _buckets(self, stack: str, manifest: Manifest, index: int) -> list[int]:
        """The buckets of the wanted keys that this shard owns."""
        keys = sorted(self._wanted[stack])
        ids_N = np.array([id_ for _, id_ in keys], dtype=np.int64)
        tables_N = np.array([table for table, _ in keys], dtype=np.uint32)
        buckets = np.unique(buckets_of(ids_N, tables_N, manifest.num_buckets)).tolist() if keys else []
        return sorted({*buckets} & {*manifest.owners.buckets_of(index)})


def _take(block: RowBlock, wanted: set[tuple[int, int]], into: dict[tuple[int, int], np.ndarray]) -> None:
    """Apply a block over older ones."""
    for key in zip(block.gone.table_U.tolist(), block.gone.id_U.tolist(), strict=True):
        into.pop(key, None)
    for at, key in enumerate(zip(block.live.table_U.tolist(), block.live.id_U.tolist(), strict=True)):
        if key in wanted:
            into[key] = block.rows_LD[at]
