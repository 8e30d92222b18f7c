"""The manifest of a commit: one file, created exclusively and checked when it is read. Guarantee G5
(docs/architecture.md): damage is always detected."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import CheckpointError, ConfigError, FencedError, OtherVersionError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.manifest import Manifest
from roostream.runtime.retention import Retention, StoreCleaner
from tests.runtime.manifest_cases import a_file, a_manifest, a_part, an_input, encoded
from tests.trainer.memory_store import MemoryStore

GOLDEN = Path(__file__).parents[1] / "golden" / "format_1"


def current_body() -> dict[str, Any]:
    return dict(json.loads(a_manifest().encode())["body"])


def format_4_body() -> dict[str, Any]:
    """A body of format 4. Before format 5, a worker's ids were in its one file."""
    workers = {
        index: {key: value for key, value in part.items() if key != "id_files"}
        for index, part in current_body()["workers"].items()
    }
    return {**current_body(), "format": 4, "workers": workers}


def commit(store: MemoryStore, manifest: Manifest) -> None:
    assert store.create(manifest.name, manifest.encode())
    for file in (manifest.dense, *(part.file for part in manifest.workers.values())):
        store.put(file.name, b"abc")


def test_a_manifest_round_trips_with_integer_keys() -> None:
    manifest = a_manifest(workers={7: a_part({("samples", 3): 4}, metrics={"ne": 0.1 + 0.2, "auc": None})})
    assert manifests.decode(manifest.encode()) == (manifest, manifest.checksum)
    assert manifest.checksum == json.loads(manifest.encode())["checksum"]


def test_a_manifest_of_format_1_is_of_one_worker_whose_state_lies_in_the_dense_file() -> None:
    body = json.loads((GOLDEN / "manifest.json").read_text())["body"]
    [(index, part)] = manifests.decode((GOLDEN / "manifest.json").read_bytes()).manifest.workers.items()
    assert (index, part.file.name, part.dedupe) == (0, body["dense"]["name"], body["dedupe"]["count"])
    assert part.metrics == body["metrics"] and part.offsets


def test_the_purpose_of_an_incarnation_is_stored() -> None:
    store = MemoryStore()
    assert manifests.newest_purpose(store) == {}
    manifests.claim_incarnation(store, 0, {"workers": 3})
    assert manifests.newest_purpose(store) == {"workers": 3}
    manifests.claim_incarnation(store, 0)
    assert manifests.newest_purpose(store) == {}


def test_the_offsets_of_a_commit_cover_all_workers() -> None:
    parts = {i: a_part({("samples", i): 5 + i, ("corrections", i): i}) for i in range(2)}
    assert a_manifest(workers=parts).offsets == {
        ("samples", 0): 5,
        ("samples", 1): 6,
        ("corrections", 0): 0,
        ("corrections", 1): 1,
    }


@given(
    st.dictionaries(st.integers(0, 200), st.integers(0, 2**62), max_size=30),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_offsets_and_numbers_survive(offsets: dict[int, int], number: float) -> None:
    manifest = a_manifest(
        workers={0: a_part({("samples", p): o for p, o in offsets.items()}, metrics={"ne": number})}
    )
    assert manifests.decode(manifest.encode()).manifest == manifest


@given(st.data())
def test_g5_any_flipped_bit_is_detected(data: st.DataObject) -> None:
    raw = bytearray(a_manifest().encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(CheckpointError):
        assert manifests.decode(bytes(raw)).manifest == a_manifest(), (
            "a flipped bit may go unnoticed only where it changes nothing"
        )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected a manifest in JSON"),
        (b"[]", "expected a manifest in JSON"),
        (b'{"checksum": "0", "body": {"format": 1}}', "the manifest is damaged"),
        (encoded({"format": 6}), "expected manifest format 1 to 5, got 6; use the Roostream that wrote it"),
        (encoded({"format": 1}), "the keys of manifest format 1"),
        (encoded({"format": 2}), "the keys of manifest format 2"),
        (encoded({"format": 3}), "the keys of manifest format 3"),
        (encoded({**format_4_body(), "format": 5}), "the keys of manifest format 5: KeyError.'id_files'"),
        (encoded({**format_4_body(), "input": {"phase": "initial"}}), "the keys of manifest format 4"),
        (encoded({**format_4_body(), "samplers": {}}), "unexpected keyword argument 'samplers'"),
        (
            encoded({**format_4_body(), "bucket_map": BucketMap.modulo(32, 2).plain()}),
            "a map of 64 buckets to 2 owners, got 32",
        ),
        (
            encoded({**format_4_body(), "bucket_map": BucketMap.modulo(64, 3).plain()}),
            "of 64 buckets to 2 owners, got 64 to 3",
        ),
    ],
)
def test_an_invalid_manifest_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        manifests.decode(raw)


def test_id_files_of_earlier_commits_are_kept_while_a_commit_names_them() -> None:
    store, ids = MemoryStore(), a_file(manifests.worker_ids_name(1, 1, 0))
    for seq in range(1, 10):
        files = (ids,) if seq <= 6 else ()
        commit(store, a_manifest(seq, workers={0: a_part({("samples", 0): seq}, seq, id_files=files)}))
        store.put(ids.name, b"abc") if seq == 1 else None
        StoreCleaner(store, Retention(2)).clean()
        assert (ids.name in store.list("workers")) == (seq <= 7), seq


@pytest.mark.parametrize(
    ("number", "absent"), [(2, {"input", "bucket_map"}), (3, {"bucket_map"}), (4, set[str]())]
)
def test_older_formats_mean_stream_training_and_bucket_modulo_shards(number: int, absent: set[str]) -> None:
    body = {key: value for key, value in format_4_body().items() if key not in absent}
    found = manifests.decode(encoded({**body, "format": number})).manifest
    assert found == a_manifest() and found.owners == BucketMap.modulo(64, 2)


def test_a_manifest_contains_the_bucket_map() -> None:
    manifest = a_manifest(bucket_map=BucketMap(np.arange(64, dtype=np.int32)[::-1] % 2, 2, 7))
    decoded = manifests.decode(manifest.encode()).manifest
    assert decoded == manifest and decoded.owners.version == 7 and decoded.owners.buckets_of(0)[:2] == [1, 3]
    assert manifest.checksum != a_manifest().checksum


def test_during_a_warehouse_session_offsets_are_those_before_it() -> None:
    at = {("samples", 0): 70, ("samples", 1): 8, ("corrections", 0): 0}
    manifest = a_manifest(input=an_input(), workers={0: a_part(at)})
    decoded = manifests.decode(manifest.encode()).manifest
    assert decoded == manifest and decoded.positions == at
    assert decoded.offsets == {("samples", 0): 5, ("samples", 1): 0, ("corrections", 0): 0}


@pytest.mark.parametrize(
    ("changed", "value"), [("num_shards", 9), ("num_buckets", 9), ("num_partitions", 3), ("seed", 9)]
)
def test_another_number_of_shards_buckets_or_partitions_or_another_seed_is_refused(
    changed: str, value: int
) -> None:
    expected = {"num_shards": 2, "num_buckets": 64, "num_partitions": 4, "seed": 0}
    manifests.check_shape(a_manifest(), **expected)
    # partitions may have been added to the topics
    manifests.check_shape(a_manifest(), **{**expected, "num_partitions": 5})
    with pytest.raises(
        ConfigError, match=f"expected {changed} = {expected[changed]}, got {value}; use the committed value"
    ):
        manifests.check_shape(a_manifest(), **{**expected, changed: value})


@pytest.mark.parametrize("data", [b"abd", b"ab", b""])
def test_g5_a_file_that_is_not_the_committed_one_is_damaged(data: bytes) -> None:
    store = MemoryStore()
    file = manifests.store_file(store, "dense/x", b"abc")
    assert manifests.read_file(store, file) == b"abc"
    store.put("dense/x", data)
    with pytest.raises(CheckpointError, match=r"dense/x: expected 3 bytes with checksum .* it is damaged"):
        manifests.read_file(store, file)


def test_nothing_committed_is_not_an_error() -> None:
    assert manifests.newest(MemoryStore()) is None
    assert manifests.next_seq(MemoryStore()) == 1


def test_g5_a_damaged_newest_manifest_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    commit(store, a_manifest(1))
    commit(store, a_manifest(2))
    store.damage("manifests/00000002")
    with caplog.at_level(logging.WARNING):
        found = manifests.newest(store)
    assert found is not None and found.manifest == a_manifest(1)
    assert "manifests/00000002" in caplog.text and "damaged" in caplog.text
    assert manifests.next_seq(store) == 3, "the number of the damaged manifest must not be reused"


def test_a_manifest_under_another_name_is_damaged() -> None:
    store = MemoryStore()
    store.create("manifests/00000009", a_manifest(3).encode())
    with pytest.raises(CheckpointError, match="expected seq 9, got 3"):
        manifests.load(store, "manifests/00000009")


def test_training_never_restarts_from_nothing_by_itself() -> None:
    store = MemoryStore()
    commit(store, a_manifest(1))
    store.damage("manifests/00000001")
    with pytest.raises(CheckpointError, match="expected a usable manifest among 1") as caught:
        manifests.newest(store)
    assert "reset" not in str(caught.value), (
        "damaged data may come back from a backup; the message must not suggest a reset"
    )


def test_a_commit_of_a_newer_version_is_not_passed_over_as_if_it_were_damaged() -> None:
    store = MemoryStore()
    commit(store, a_manifest(1))
    store.create("manifests/00000002", encoded({**current_body(), "seq": 2, "format": manifests.FORMAT + 1}))
    with pytest.raises(OtherVersionError, match="manifests/00000002: expected manifest format 1 to"):
        manifests.newest(store)
    assert manifests.discard_after(store, 1) == [2], "a rollback of the older version gives it up"
    found = manifests.newest(store)
    assert found is not None and found.manifest.seq == 1


def test_a_manifest_whose_parts_are_damaged_is_skipped() -> None:
    store = MemoryStore()
    commit(store, a_manifest(1))
    commit(store, a_manifest(2))
    found = manifests.newest(store, {"manifests/00000002"})
    assert found is not None and found.manifest.seq == 1


def test_incarnations_go_up_and_one_of_two_racing_controllers_exits(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert [manifests.claim_incarnation(store, 0) for _ in range(3)] == [1, 2, 3]

    leave_unfinished(tmp_path / "incarnations")
    assert manifests.claim_incarnation(store, 0) == 4
    assert not list(tmp_path.rglob(".*")), "the claim must delete the unfinished file of a killed writer"

    class RacingStore(MemoryStore):
        def create(self, name: str, data: bytes) -> bool:
            super().create(name, b"the other one's")
            return super().create(name, data)

    with pytest.raises(FencedError, match="incarnation 1 belongs to another controller"):
        manifests.claim_incarnation(RacingStore(), 0)


class FullDiskStore(FileStore):
    """A full disk: a new file fits only after the unfinished ones are deleted."""

    def create(self, name: str, data: bytes) -> bool:
        if list(self.root.rglob(".roostream-unfinished.*")):
            raise UnavailableError("no space left on the disk")
        return super().create(name, data)


def leave_unfinished(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    unfinished = folder / ".roostream-unfinished.left"
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (0, 0))
    return unfinished


def test_a_claim_makes_room_on_a_disk_that_leftovers_have_filled(tmp_path: Path) -> None:
    leave_unfinished(tmp_path / "segments")
    assert manifests.claim_incarnation(FullDiskStore(tmp_path), 0) == 1


def test_leftovers_of_killed_writers_are_deleted_after_a_commit(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    commit(store, a_manifest(1))
    unfinished = leave_unfinished(tmp_path / "segments")
    StoreCleaner(store).clean()
    assert not unfinished.exists()


def test_a_claim_of_a_retired_name_is_lost() -> None:
    class SlowStore(MemoryStore):
        """Between the listing and the creation, other controllers claim incarnations 1 to 9 and delete 1."""

        def create(self, name: str, data: bytes) -> bool:
            self.objects["incarnations/00000009"] = b""
            return super().create(name, data)

    with pytest.raises(FencedError):
        manifests.claim_incarnation(SlowStore(), 0)


def test_old_incarnations_are_deleted_without_a_commit() -> None:
    store = MemoryStore()
    for n in range(1, 40):
        assert manifests.claim_incarnation(store, 0, {"workers": n}) == n
    assert len(store.list("incarnations")) == manifests.KEEP_INCARNATIONS
    assert manifests.newest_purpose(store) == {"workers": 39}


def test_a_claim_succeeds_where_old_incarnations_cannot_be_deleted() -> None:
    class UndeletableStore(MemoryStore):
        def delete(self, name: str) -> None:
            raise UnavailableError("the store can't be written")

    store = UndeletableStore()
    assert [manifests.claim_incarnation(store, 0) for _ in range(12)] == list(range(1, 13))


def test_a_delayed_create_does_not_undo_a_rollback() -> None:
    store = MemoryStore()
    incarnation = manifests.claim_incarnation(store, 0)
    for seq in (1, 2, 3):
        commit(store, a_manifest(seq, incarnation=incarnation))
    assert manifests.discard_after(store, 1) == [2, 3]
    late = a_manifest(4, incarnation=incarnation)
    assert store.create(late.name, late.encode()), "the create arrives after the rollback"

    for _ in range(manifests.KEEP_INCARNATIONS + 2):  # the claim of the rollback itself is deleted meanwhile
        newest = manifests.newest(store)
        assert newest is not None and newest.manifest.seq == 1
        incarnation = manifests.claim_incarnation(store, 0)
    with pytest.raises(CheckpointError, match="rolled back"):
        manifests.discard_after(store, 4)

    assert manifests.next_seq(store) == 5, "the number must not be reused"
    commit(store, a_manifest(5, incarnation=incarnation))
    newest = manifests.newest(store)
    assert newest is not None and newest.manifest.seq == 5


def test_a_second_rollback_does_not_bring_back_what_the_first_one_discarded() -> None:
    store = MemoryStore()
    first = manifests.claim_incarnation(store, 0)
    for seq in (1, 2):
        commit(store, a_manifest(seq, incarnation=first))
    manifests.discard_after(store, 1)
    second = manifests.claim_incarnation(store, 0)
    for seq in (3, 4):
        commit(store, a_manifest(seq, incarnation=second))
    manifests.discard_after(store, 3)
    late = a_manifest(2, incarnation=first)
    assert store.create(late.name, late.encode())
    store.delete(manifests.manifest_name(3))
    newest = manifests.newest(store)
    assert newest is not None and newest.manifest.seq == 1


def test_the_files_of_a_damaged_manifest_are_kept_for_its_repair() -> None:
    store = MemoryStore()
    for seq in (1, 2, 3):
        commit(store, a_manifest(seq))
    store.damage(manifests.manifest_name(2))
    StoreCleaner(store, Retention(2)).clean()
    assert store.list("dense") == [manifests.dense_name(seq, 1) for seq in (2, 3)]
    assert store.list("workers") == [manifests.worker_name(seq, 1, 0) for seq in (2, 3)]


def test_retention_keeps_the_newest_manifests_and_their_files() -> None:
    store = MemoryStore()
    for seq in range(1, 9):
        commit(store, a_manifest(seq))
        manifests.claim_incarnation(store, 0)
    store.put("dense/00000003-1.safetensors", b"of an aborted commit")
    store.put("dense/00000009-1.safetensors", b"being written")
    store.put("workers/00000003-1-1.safetensors", b"of an aborted commit")
    StoreCleaner(store, Retention(3)).clean()
    assert store.list("manifests") == [manifests.manifest_name(s) for s in (6, 7, 8)]
    assert store.list("dense") == [manifests.dense_name(s, 1) for s in (6, 7, 8, 9)]
    assert store.list("workers") == [manifests.worker_name(s, 1, 0) for s in (6, 7, 8)]
    assert manifests.newest_incarnation(store) == 8
    for _ in range(5):
        manifests.claim_incarnation(store, 0)
    StoreCleaner(store).clean()
    assert len(store.list("incarnations")) == manifests.KEEP_INCARNATIONS
