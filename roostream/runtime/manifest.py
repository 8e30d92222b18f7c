"""Manifests: the contents of a commit. Creating a manifest under its name is the commit.

A manifest is JSON, `{"checksum": xxh3-64 hex of the canonical body, "body": {...}}`. A damaged manifest is
never loaded; the previous one is used instead. Missing and unknown keys are errors, so a new key needs a new
format number. Incarnations are claimed in the same store by the same exclusive `create`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import xxhash

from roostream.errors import CheckpointError, ConfigError, FencedError, OtherVersionError, UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.kafka.topics import Progress, flat, nested
from roostream.runtime.work_unit import TableInput

log = logging.getLogger("roostream.manifest")

FORMAT = 5
MANIFESTS, INCARNATIONS, DENSE, WORKERS = "manifests", "incarnations", "dense", "workers"
SEGMENTS = "segments"
DISCARDED = "discarded"  # manifests that were rolled back
KEEP_MANIFESTS, KEEP_INCARNATIONS = 10, 8
_MAX_ROLLBACKS = 16  # a manifest that is older than so many rollbacks does not arrive any more
_MAX_RETIRED = 100  # incarnations deleted at once: thousands of them must not delay a restore
_PARTITIONS_1 = 4  # partitions of every topic in format 1
_SINCE = {"input": 3, "bucket_map": 4}  # key → format that added it; null in older formats
_ID_FILES_SINCE = 5  # key `id_files` of a worker; none in older formats


def checksum_of(data: bytes) -> str:
    """xxh3-64 as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def manifest_name(seq: int) -> str:
    """The name of the manifest of commit `seq`."""
    return f"{MANIFESTS}/{seq:08d}"


def dense_name(seq: int, incarnation: int) -> str:
    """The name of a commit's dense weights."""
    return f"{DENSE}/{seq:08d}-{incarnation}.safetensors"


def worker_name(seq: int, incarnation: int, index: int) -> str:
    """The name of a worker's state in a commit."""
    return f"{WORKERS}/{seq:08d}-{incarnation}-{index}.safetensors"


def worker_ids_name(seq: int, incarnation: int, index: int) -> str:
    """The name of the sample ids in a worker's state."""
    return f"{WORKERS}/{seq:08d}-{incarnation}-{index}-ids.safetensors"


def segment_copy_name(shard: int, segment: str) -> str:
    """Name of the copy of segment `<seq>-<incarnation>` of a shard (param_server/segment_copies.py)."""
    return f"{SEGMENTS}/{shard}-{segment}"


def segment_copy_seq(name: str) -> int:
    """Number of the commit that the segment was written for, from the name of its copy; 0 for other
    names."""
    _, _, segment = name.partition("-")
    number = segment.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def seq_of(name: str) -> int:
    """Number of a manifest or incarnation from its name; 0 for other names."""
    tail = name.rsplit("/", 1)[-1]
    return int(tail) if tail.isdecimal() else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of the store, as listed in a manifest."""

    name: str
    bytes: int
    checksum: str


def store_file(store: CheckpointStore, name: str, data: bytes) -> StoredFile:
    """Write `data` under `name`; returns the manifest's entry. Raises UnavailableError: the store can't be
    written."""
    store.put(name, data)
    return StoredFile(name=name, bytes=len(data), checksum=checksum_of(data))


def read_file(store: CheckpointStore, file: StoredFile) -> bytes:
    """The bytes of a file that a manifest names, verified. Raises CheckpointError: absent or damaged."""
    data = store.get(file.name)
    got = checksum_of(data)
    if len(data) != file.bytes or got != file.checksum:
        raise CheckpointError(
            f"{file.name}: expected {file.bytes} bytes with checksum {file.checksum}, got {len(data)} "
            f"with {got}: it is damaged"
        )
    return data


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPart:
    """State of one worker: positions of its partitions, and a file with the rest."""

    offsets: Progress  # positions in the session while one is trained (`Manifest.input`)
    file: StoredFile
    dedupe: int  # number of trained sample ids that later duplicates are compared with
    metrics: dict[str, Any]  # of this worker's partitions since the start of training
    id_files: tuple[StoredFile, ...] = ()  # with these ids, mostly written by earlier commits

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return self.file, *self.id_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One commit: everything a restart needs, all from the same moment."""

    seq: int
    incarnation: int
    previous: dict[str, Any]  # {"seq", "checksum"} of the previous manifest; seq 0 = none
    step: int  # training steps since the start
    watermark_ms: int  # event time that training has reached
    schema: str  # fingerprint, 16 hex digits
    seed: int
    num_shards: int
    num_buckets: int
    num_partitions: int  # of every topic that has keys
    kafka: dict[str, Any]  # {"cluster_id", "topics": {name: id}}
    rows_end: dict[int, int]  # `rows` partition → end offset of this commit's deltas
    shards: dict[int, dict[str, Any]]  # index → what the shard needs to restore: {"segments": [...]}
    dense: StoredFile  # the model's shared part
    model: dict[str, Any]  # the model's configuration
    workers: dict[int, WorkerPart]  # index → state
    input: TableInput | None = None  # the warehouse session that is trained; None = the stream
    bucket_map: BucketMap | None = None  # bucket → shard; None = bucket mod num_shards
    time_ms: int = 0

    @property
    def name(self) -> str:
        return manifest_name(self.seq)

    @property
    def version(self) -> str:
        """Model version, as in impressions and responses."""
        return f"{self.incarnation}-{self.seq}"

    @property
    def owners(self) -> BucketMap:
        """The shard that owns each bucket."""
        return self.bucket_map or BucketMap.modulo(self.num_buckets, self.num_shards)

    @property
    def offsets(self) -> Progress:
        """Partition → next offset of the stream to train. While a warehouse session is trained: the offsets
        before it, because nothing later of the stream has been trained."""
        return self.input.stream_at(self.positions) if self.input else self.positions

    @property
    def positions(self) -> Progress:
        """Partition → position in the current input (stream or session), of all workers."""
        return {
            partition: offset for part in self.workers.values() for partition, offset in part.offsets.items()
        }

    @property
    def num_trained(self) -> int:
        """Requests that all workers have trained since the start of training."""
        return sum(int(part.metrics.get("requests") or 0) for part in self.workers.values())

    @property
    def files(self) -> dict[str, StoredFile]:
        """Name → file, of all files that the trainer wrote for this commit or that it shares with earlier
        ones."""
        parts = [file for part in self.workers.values() for file in part.files]
        return {file.name: file for file in (self.dense, *parts)}

    @property
    def segment_copies(self) -> set[str]:
        """Names that the copies of this commit's segments have, also of those that are not copied yet."""
        return {
            segment_copy_name(index, segment["name"])
            for index, shard in self.shards.items()
            for segment in shard.get("segments", ())
        }

    @property
    def checksum(self) -> str:
        return checksum_of(_canonical(self._body()))

    def encode(self) -> bytes:
        body = self._body()
        return _canonical({"checksum": checksum_of(_canonical(body)), "body": body})

    def _body(self) -> dict[str, Any]:
        body = {
            "format": FORMAT,
            **dataclasses.asdict(dataclasses.replace(self, input=None, bucket_map=None)),
        }
        body["input"] = self.input.plain() if self.input else None
        body["bucket_map"] = self.bucket_map.plain() if self.bucket_map else None
        for part in body["workers"].values():
            part["offsets"] = nested(part["offsets"])
        # Makes all keys text, so that the sort order is the same after decoding.
        return json.loads(json.dumps(body))


class Restorable(NamedTuple):
    """A commit that can be restored: its manifest, read and verified."""

    manifest: Manifest
    checksum: str  # of the stored body, in its own format

    @property
    def name(self) -> str:
        return self.manifest.name


def decode(data: bytes) -> Restorable:
    """Inverse of `Manifest.encode`, with verification; also reads older formats.

    Raises:
        CheckpointError: not JSON, wrong checksum, or a missing or unknown key.
        OtherVersionError: unknown format.
    """
    try:
        outer = json.loads(data)
        body, stated = dict(outer["body"]), outer["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"expected a manifest in JSON, got {len(data)} bytes that aren't one ({error})"
        ) from None
    actual = checksum_of(_canonical(body))
    if actual != stated:
        raise CheckpointError(f"expected checksum {stated}, got {actual}: the manifest is damaged")
    version = body.pop("format", None)
    if version not in range(1, FORMAT + 1):
        raise OtherVersionError(
            f"expected manifest format 1 to {FORMAT}, got {version!r}; use the Roostream that wrote it"
        )
    try:
        body = _from_format_1(body) if version == 1 else body
        later = {key: None for key, since in _SINCE.items() if version < since}
        if version < _ID_FILES_SINCE:
            body["workers"] = {i: {**part, "id_files": []} for i, part in body["workers"].items()}
        return Restorable(_manifest({**body, **later}), stated)
    except (TypeError, ValueError, KeyError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"expected the keys of manifest format {version}: {error!r}") from None


def _manifest(body: Mapping[str, Any]) -> Manifest:
    """Converts the text keys of JSON back to numbers."""
    workers = {
        int(i): WorkerPart(
            **{
                **part,
                "offsets": flat(part["offsets"]),
                "file": StoredFile(**part["file"]),
                "id_files": tuple(StoredFile(**file) for file in part["id_files"]),
            }
        )
        for i, part in body["workers"].items()
    }
    numbered = {
        "rows_end": {int(p): int(o) for p, o in body["rows_end"].items()},
        "shards": {int(i): shard for i, shard in body["shards"].items()},
        "dense": StoredFile(**body["dense"]),
        "workers": workers,
        "input": TableInput.of(body["input"]),
        "bucket_map": BucketMap.from_plain(body["bucket_map"]) if body["bucket_map"] else None,
    }
    manifest = Manifest(**{**body, **numbered})
    manifest.owners.check(manifest.num_buckets, manifest.num_shards)
    return manifest


def _from_format_1(body: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had one worker, with its state in the dense file, and two keys that were never used."""
    kept = {
        k: v for k, v in body.items() if k not in ("offsets", "dedupe", "metrics", "admission", "samplers")
    }
    own = {
        "offsets": body["offsets"],
        "file": body["dense"],
        "dedupe": body["dedupe"]["count"],
        "metrics": body["metrics"],
    }
    return {**kept, "num_partitions": _PARTITIONS_1, "workers": {"0": own}}


def check_shape(
    manifest: Manifest, *, num_shards: int, num_buckets: int, num_partitions: int, seed: int
) -> None:
    """Raises ConfigError: a value differs from the committed one. Placement and initialization of rows depend
    on these values. Only the number of partitions may grow (`roostream topics grow`)."""
    configured = {
        "num_shards": num_shards,
        "num_buckets": num_buckets,
        "num_partitions": num_partitions,
        "seed": seed,
    }
    for name, value in configured.items():
        committed = getattr(manifest, name)
        if committed != value and not (name == "num_partitions" and value > committed):
            raise ConfigError(
                f"{manifest.name}: expected {name} = {committed}, got {value}; use the committed value, "
                "or another store and home"
            )


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def load(store: CheckpointStore, name: str) -> Restorable:
    """Read and verify a manifest. Raises CheckpointError, with the name: absent or damaged."""
    try:
        data = store.get(name)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    return load_data(name, data)


def load_chosen(store: CheckpointStore, name: str) -> Restorable:
    """Read the manifest that the controller has chosen for a restore.

    Raises:
        CheckpointError: it is damaged; the controller chooses the one before it.
        UnavailableError: it is not there. The controller has seen it, so this program may not see it yet.
    """
    try:
        return load(store, name)
    except CheckpointError:
        if name in store.list(MANIFESTS):
            raise
        raise UnavailableError(
            f"expected {name}, which the controller has found, got a checkpoint store without it"
        ) from None


def load_data(name: str, data: bytes) -> Restorable:
    """The manifest that was read under this name. Raises CheckpointError, with the name: damaged."""
    try:
        found = decode(data)
    except CheckpointError as error:
        raise type(error)(f"{name}: {error}") from None
    if found.name != name:
        raise CheckpointError(
            f"{name}: expected seq {seq_of(name)}, got {found.manifest.seq}: it is a copy of another manifest"
        )
    return found


def newest(store: CheckpointStore, skip: Collection[str] = ()) -> Restorable | None:
    """The newest usable manifest; None if nothing was ever committed. Skips damaged ones and those that a
    rollback discarded, with a warning, and those in `skip` (names of manifests whose parts are damaged).

    Raises:
        CheckpointError: there are manifests but none is usable; training must not start over on its own.
        OtherVersionError: a newer version of Roostream wrote the newest one.
    """
    names = sorted((n for n in store.list(MANIFESTS) if seq_of(n)), key=seq_of, reverse=True)
    past = rollbacks(store) if names else ()
    for name in names:
        if name in skip:
            continue
        try:
            found = load(store, name)
        except OtherVersionError as error:
            raise OtherVersionError(
                f"{error}, or go back to an older commit with `roostream checkpoint rollback N`"
            ) from None
        except CheckpointError as error:
            log.warning("skipping a damaged manifest: %s", error)
            continue
        if any(rollback.discards(found.manifest.seq, found.manifest.incarnation) for rollback in past):
            log.warning("skipping %s of incarnation %d: it was rolled back", name, found.manifest.incarnation)
            continue
        return found
    if names:
        raise CheckpointError(
            f"expected a usable manifest among {len(names)} ({names[0]} … {names[-1]}), got none; "
            "the warnings above say what is damaged; restore it from a backup "
            '(docs/architecture.md, "Damage")'
        )
    return None


def next_seq(store: CheckpointStore) -> int:
    """One more than the highest number in use; numbers of damaged and discarded manifests are not reused."""
    return 1 + max((seq_of(n) for n in (*store.list(MANIFESTS), *store.list(DISCARDED))), default=0)


def newest_incarnation(store: CheckpointStore) -> int:
    """The newest incarnation that was claimed in this store; 0 = none."""
    return max((seq_of(n) for n in store.list(INCARNATIONS)), default=0)


class PastRollback(NamedTuple):
    """A `checkpoint rollback` of the past. It discards newer commits for good, also one whose manifest
    reaches the store only after the rollback."""

    seq: int  # the commit that was made the newest
    incarnation: int  # claimed for the rollback

    def discards(self, seq: int, incarnation: int) -> bool:
        """Whether it discarded commit `seq` of this incarnation."""
        return seq > self.seq and incarnation < self.incarnation


def rollbacks(store: CheckpointStore) -> list[PastRollback]:
    """All rollbacks that still discard manifests. Each claim repeats those of the claim before it."""
    for name in sorted(store.list(INCARNATIONS), key=seq_of, reverse=True):
        try:
            body = json.loads(store.get(name))
            return [PastRollback(*map(int, pair)) for pair in body.get("rollbacks", ())]
        except (CheckpointError, ValueError, AttributeError, TypeError) as error:
            log.warning("%s can't be read (%s); using the incarnation before it", name, error)
    return []


def is_rolled_back(store: CheckpointStore, seq: int, incarnation: int) -> bool:
    """Whether a rollback discarded commit `seq` of this incarnation, although its manifest may still, or
    again, be in the store."""
    return any(rollback.discards(seq, incarnation) for rollback in rollbacks(store))


def has_lost(store: CheckpointStore, seq: int, incarnation: int) -> bool:
    """Whether the store has lost the manifest of a commit that succeeded, and was the newest: it is absent,
    and no rollback discarded it. A damaged manifest is not lost. Raises UnavailableError: as `list`."""
    names = {*store.list(MANIFESTS), *store.list(DISCARDED)}
    found = {manifest_name(seq), f"{DISCARDED}/{seq:08d}"} & names
    return not found and not is_rolled_back(store, seq, incarnation)


def claim_incarnation(
    store: CheckpointStore,
    time_ms: int,
    wish: Mapping[str, Any] | None = None,
    *,
    restored_seq: int | None = None,
    above: int = 0,
) -> int:
    """Claim the next incarnation: controllers with older ones are fenced from then on. Unfinished files and
    incarnations that nobody needs are deleted. The incarnation's file stores `wish`, what it was claimed for
    (`newest_purpose`), and past rollbacks.

    `restored_seq`: this claim makes that commit the newest. `above`: the incarnation is higher than this one.

    Raises:
        FencedError: another controller claimed it first; this one must exit.
    """
    try:
        store.sweep()  # first: leftovers may fill the disk that the claim needs
    except UnavailableError as error:
        log.warning("unfinished files could not be deleted: %s; the next claim tries again", error)
    claimed = max(newest_incarnation(store), above) + 1
    past = rollbacks(store)
    if restored_seq is not None:  # it also covers rollbacks to the same commit or a later one
        past = [*(p for p in past if p.seq < restored_seq), PastRollback(restored_seq, claimed)][
            -_MAX_ROLLBACKS:
        ]
    body: dict[str, Any] = {"time_ms": time_ms}
    if wish:
        body["wish"] = dict(wish)
    if past:
        body["rollbacks"] = [list(p) for p in past]
    created = store.create(f"{INCARNATIONS}/{claimed:08d}", json.dumps(body, sort_keys=True).encode())
    # Between listing and creation, others may have claimed higher incarnations and deleted lower names.
    if not created or newest_incarnation(store) != claimed:
        raise FencedError(
            f"incarnation {claimed} belongs to another controller that is running; this controller stops"
        )
    try:
        retire_incarnations(store)
    except UnavailableError as error:
        log.warning("old incarnations could not be deleted: %s; the next claim tries again", error)
    return claimed


def retire_incarnations(store: CheckpointStore) -> None:
    """Delete all but the newest incarnations. Their numbers are not claimed again, because only higher ones
    are."""
    for name in sorted(store.list(INCARNATIONS), key=seq_of)[:-KEEP_INCARNATIONS][:_MAX_RETIRED]:
        store.delete(name)


def newest_purpose(store: CheckpointStore) -> dict[str, Any]:
    """The purpose that the newest incarnation was claimed with; {} if its file has none, as those of older
    versions."""
    newest_one = newest_incarnation(store)
    try:
        body = json.loads(store.get(f"{INCARNATIONS}/{newest_one:08d}")) if newest_one else {}
        return dict(body.get("wish", {}))
    except (CheckpointError, ValueError, AttributeError, TypeError) as error:
        log.warning("the file of incarnation %d can't be read (%s); using the settings", newest_one, error)
        return {}


def numbers(store: CheckpointStore) -> list[int]:
    """Numbers of all manifests, including damaged ones, ascending."""
    return sorted(seq_of(name) for name in store.list(MANIFESTS) if seq_of(name))


def discard_after(store: CheckpointStore, seq: int, *, above: int = 0) -> list[int]:
    """Make manifest `seq` the newest by moving later ones to `discarded/`. Returns their numbers.

    Fences a running controller; a commit that it still makes is discarded too, also one that arrives after
    this call (`PastRollback`). `above`: as in `claim_incarnation`.

    Raises:
        CheckpointError: manifest `seq` is absent, damaged or was rolled back; nothing was changed.
        FencedError: a controller started at this moment; stop it and call again.

    **If it fails half-way:** some of the newest are discarded; the next call continues.
    """
    kept = load(store, manifest_name(seq)).manifest
    if is_rolled_back(store, kept.seq, kept.incarnation):
        raise CheckpointError(
            f"expected a commit that is in use, got {kept.name} of incarnation {kept.incarnation}, which was "
            "rolled back; choose another one of `roostream checkpoint list`"
        )
    claim_incarnation(store, 0, newest_purpose(store), restored_seq=seq, above=above)
    gone: list[int] = []
    while newer := [number for number in reversed(numbers(store)) if number > seq]:
        for number in newer:  # newest first, so that the remaining manifests never have a gap
            store.create(f"{DISCARDED}/{number:08d}", store.get(manifest_name(number)))
            store.delete(manifest_name(number))
            gone.append(number)
    return sorted(gone)
