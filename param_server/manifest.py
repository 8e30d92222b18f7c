"""What a shard reads of a manifest (docs/protocols.md, "Checkpoint store"); the trainer's controller writes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import xxhash

from param_server.segments import Commit, Segment
from roo.errors import CheckpointError, ConfigError
from runtime.checkpoint_store import CheckpointStore

FORMAT = 1
BEGINNING = Commit(0, 0, ())  # before any commit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restorable:
    """One commit, as one shard needs it."""

    commit: Commit
    rows_end: dict[int, int] = dataclasses.field(default_factory=dict)  # `rows` partition → first offset after the commit


def load(store: CheckpointStore, name: str, *, index: int, num_shards: int, num_buckets: int, seed: int) -> Restorable:
    """Shard `index`'s part of manifest `name`; "" is the beginning.

    Raises:
        CheckpointError: the manifest is absent, damaged or of another format.
        ConfigError: it was committed with other shards, buckets or another seed.
    """
    if not name:
        return Restorable(commit=BEGINNING)
    body = _body(store.get(name), name)
    for key, mine in (("num_shards", num_shards), ("num_buckets", num_buckets), ("seed", seed)):
        if body.get(key) != mine:
            raise ConfigError(
                f"{name} was committed with {key} = {body.get(key)}, this shard runs with {mine}; start it with the same, "
                "or with another store and home"
            )
    try:
        shards = body["shards"]
        segments = tuple(Segment(**{f: s[f] for f in Segment._fields}) for s in shards[str(index)]["segments"])
        rows_end = {int(p): int(offset) for p, offset in body["rows_end"].items()}
        return Restorable(commit=Commit(int(body["seq"]), int(body["incarnation"]), segments), rows_end=rows_end)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{name}: expected the segments of shard {index}, got none that can be read ({error!r})") from None


def _body(data: bytes, name: str) -> Mapping[str, Any]:
    try:
        outer = json.loads(data)
        body = dict(outer["body"])
        stated = outer["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name}: expected a manifest in JSON, got {len(data)} bytes that aren't one ({error})") from None
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    if xxhash.xxh3_64_hexdigest(canonical) != stated:
        raise CheckpointError(f"{name}: expected checksum {stated}, got another: it is damaged")
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{name}: expected format {FORMAT}, got {body.get('format')}; use the Roostream that wrote it")
    return body
