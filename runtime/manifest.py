"""Manifests: what one commit is, and the log that they form. Their creation under a name is the commit itself.

A manifest is JSON, `{"checksum": xxh3-64 hex of the canonical body, "body": {...}}`; a damaged one is never loaded, the one
before it is. Incarnations are claimed in the same store by the same create-exclusive call.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import xxhash

from roo.errors import CheckpointError, FencedError
from runtime.checkpoint_store import CheckpointStore

log = logging.getLogger("roostream.manifest")

FORMAT = 1
MANIFESTS, INCARNATIONS, DENSE = "manifests", "incarnations", "dense"
KEEP_MANIFESTS, KEEP_INCARNATIONS = 5, 8


def checksum_of(data: bytes) -> str:
    """xxh3-64 as 16 hex digits: of a manifest's body, of a dense file."""
    return xxhash.xxh3_64_hexdigest(data)


def manifest_name(seq: int) -> str:
    return f"{MANIFESTS}/{seq:08d}"


def dense_name(seq: int, incarnation: int) -> str:
    return f"{DENSE}/{seq:08d}-{incarnation}.safetensors"


def seq_of(name: str) -> int:
    """Number of a manifest or incarnation from its name; 0 if the name isn't one."""
    tail = name.rsplit("/", 1)[-1]
    return int(tail) if tail.isdecimal() else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One commit: everything that a restart needs, and nothing that isn't of that one moment."""

    seq: int
    incarnation: int
    previous: dict[str, Any]  # {"seq", "checksum"} of the manifest that this one continues; seq 0 = none
    step: int  # batches cut since the beginning
    watermark_ms: int  # event time that training has reached
    schema: str  # fingerprint, 16 hex digits
    seed: int
    num_shards: int
    num_buckets: int
    kafka: dict[str, Any]  # {"cluster_id", "topics": {name: id}}
    offsets: dict[str, dict[int, int]]  # topic → partition → next offset to train
    rows_end: dict[int, int]  # `rows` partition → where deltas of this commit end
    shards: dict[int, dict[str, Any]]  # index → what the shard needs to restore: {"segments": [...]}
    dense: dict[str, Any]  # {"name", "bytes", "checksum"}
    model: dict[str, Any]  # the model's configuration
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    dedupe: dict[str, Any] = dataclasses.field(default_factory=dict)  # {"name", "count"}: ids live in the dense file
    admission: dict[str, Any] = dataclasses.field(default_factory=dict)
    samplers: dict[str, Any] = dataclasses.field(default_factory=dict)
    time_ms: int = 0

    @property
    def name(self) -> str:
        return manifest_name(self.seq)

    @property
    def version(self) -> str:
        """Model version as impressions and answers carry it."""
        return f"{self.incarnation}-{self.seq}"

    @property
    def checksum(self) -> str:
        return checksum_of(_canonical(self._body()))

    def encode(self) -> bytes:
        body = self._body()
        return _canonical({"checksum": checksum_of(_canonical(body)), "body": body})

    def _body(self) -> dict[str, Any]:
        body = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.loads(json.dumps(body))  # keys become text here, so that sorting is the same when it is read back


class Restorable(NamedTuple):
    """A manifest that was read whole and verified."""

    name: str
    manifest: Manifest


def decode(data: bytes) -> Manifest:
    """Verified inverse of `Manifest.encode`.

    Raises:
        CheckpointError: not JSON, a checksum that isn't the body's, another format, or a missing or unknown key.
    """
    try:
        outer = json.loads(data)
        body, stated = dict(outer["body"]), outer["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"expected a manifest in JSON, got {len(data)} bytes that aren't one ({error})") from None
    actual = checksum_of(_canonical(body))
    if actual != stated:
        raise CheckpointError(f"expected checksum {stated}, got {actual}: the manifest is damaged")
    if body.pop("format", None) != FORMAT:
        raise CheckpointError(f"expected manifest format {FORMAT}; use the version of Roostream that wrote it")
    try:
        return Manifest(**{**body, **_integer_keys(body)})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"expected the keys of manifest format {FORMAT}: {error}") from None


def _integer_keys(body: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows only text as keys; partitions and shard indices are numbers."""
    return {
        "offsets": {t: {int(p): int(o) for p, o in at.items()} for t, at in body["offsets"].items()},
        "rows_end": {int(p): int(o) for p, o in body["rows_end"].items()},
        "shards": {int(i): shard for i, shard in body["shards"].items()},
    }


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def load(store: CheckpointStore, name: str) -> Manifest:
    """Raises CheckpointError: absent or damaged; names it."""
    try:
        manifest = decode(store.get(name))
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if manifest.name != name:
        raise CheckpointError(f"{name}: expected seq {seq_of(name)}, got {manifest.seq}: it is another manifest's copy")
    return manifest


def newest(store: CheckpointStore, passed_over: Collection[str] = ()) -> Restorable | None:
    """The newest good manifest; None where nothing was ever committed. Damaged ones and `passed_over` (names whose parts
    turned out to be damaged) are passed over with a warning for the one before.

    Raises:
        CheckpointError: there are manifests and none is usable; training must not begin anew by itself.
    """
    names = sorted((n for n in store.list(MANIFESTS) if seq_of(n)), key=seq_of, reverse=True)
    for name in names:
        if name in passed_over:
            continue
        try:
            return Restorable(name, load(store, name))
        except CheckpointError as error:
            log.warning("passing over a damaged manifest for the one before it: %s", error)
    if names:
        raise CheckpointError(
            f"expected a usable manifest among {len(names)} ({names[0]} … {names[-1]}), got none; "
            "restore the store from a backup, or wipe it with `roostream reset` to begin anew"
        )
    return None


def next_seq(store: CheckpointStore) -> int:
    """One more than the highest name in use, damaged manifests included: their names stay taken."""
    return 1 + max((seq_of(n) for n in store.list(MANIFESTS)), default=0)


def newest_incarnation(store: CheckpointStore) -> int:
    return max((seq_of(n) for n in store.list(INCARNATIONS)), default=0)


def claim_incarnation(store: CheckpointStore, time_ms: int) -> int:
    """Claim the incarnation after the newest: from then on every controller with an older one is fenced.

    Raises:
        FencedError: another controller claimed it first; this one must exit.
    """
    mine = newest_incarnation(store) + 1
    created = store.create(f"{INCARNATIONS}/{mine:08d}", json.dumps({"format": FORMAT, "time_ms": time_ms}).encode())
    # Between the listing and the creation others may have claimed higher ones and retired the names below them.
    if not created or newest_incarnation(store) != mine:
        raise FencedError(f"incarnation {mine} belongs to another controller, which runs now; this one stops")
    return mine


def retire(store: CheckpointStore, keep: int = KEEP_MANIFESTS) -> None:
    """Delete what no restart needs: manifests but the newest `keep`, dense files that none of those names and that are older
    than the newest of them, old incarnations. Interrupted anywhere, the next call goes on."""
    names = sorted((n for n in store.list(MANIFESTS) if seq_of(n)), key=seq_of)
    for name in names[:-keep]:
        store.delete(name)
    needed, last = set(), 0
    for name in names[-keep:]:
        try:
            needed.add(load(store, name).dense.get("name", ""))
            last = max(last, seq_of(name))
        except CheckpointError:
            log.debug("%s is damaged: it keeps no dense file", name)
    for name in store.list(DENSE):
        number = name.rsplit("/", 1)[-1].split("-", 1)[0]
        if name not in needed and number.isdecimal() and int(number) < last:
            store.delete(name)
    for name in sorted(store.list(INCARNATIONS), key=seq_of)[:-KEEP_INCARNATIONS]:
        store.delete(name)
