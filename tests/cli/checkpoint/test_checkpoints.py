"""`roostream checkpoint`: commits of a real shard in a stopped home are listed, verified, exported, imported
and rolled back."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from infra.home import Home
from param_server.key_value_store import RocksDbStore
from roostream.cli.checkpoint import checkpoints
from roostream.cli.main import cli
from roostream.cli.stack_commands import trained_commit
from roostream.errors import (
    CheckpointError,
    ConfigError,
    FencedError,
    RoostreamError,
    SetupError,
    UnavailableError,
)
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore, FileStore
from roostream.runtime.manifest import StoredFile
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import register
from tests.param_server.shard_support import (
    ITEM,
    TOPIC,
    link_manifest,
    make_shard,
    push_to,
    small_schema,
    state_of,
)
from tests.runtime.full_disk import limited_file_size
from tests.runtime.manifest_cases import a_part
from trainer.deployment_identity import check_kafka


class OneShardHome:
    """A home whose only shard made three commits; `states` has the shard's rows at each of them. With another
    `store`, the shard also uploads its segments there.
    """

    def __init__(self, root: Path, store: CheckpointStore | None = None) -> None:
        self.root, self.store = root, store or FileStore(root / "store")
        register(self.store, small_schema())
        self.states: dict[int, dict[tuple[str, int, int], bytes]] = {}
        blobs = RocksDbStore(root / "shard-0" / "segments").open()
        try:
            shard = make_shard(blobs=blobs, store=self.store, uploads=store is not None)  # type: ignore[arg-type]
            incarnation = manifests.claim_incarnation(self.store, 0)
            shard.restore(incarnation, "")
            for seq in (1, 2, 3):
                push_to(shard, 2 * seq - 1, ITEM, ids=(seq, seq + 1))
                push_to(shard, 2 * seq, TOPIC, ids=(7,))
                shard.freeze(seq, 0)
                self._link(seq, incarnation, shard.write(seq))
                shard.commit(seq)
                self.states[seq] = state_of(shard)
        finally:
            blobs.close()

    def _link(self, seq: int, incarnation: int, written: dict[str, object]) -> None:
        dense = self._file(manifests.dense_name(seq, incarnation), seq)
        worker_file = self._file(manifests.worker_name(seq, incarnation, 0), seq)
        metrics = {"requests": 100 * seq, "ne": 0.9, "auc": 0.7, "calibration": 1.0}
        workers = {0: a_part({("samples", 0): seq}, seq, file=worker_file, metrics=metrics)}
        before = manifests.newest(self.store)
        previous = {"seq": seq - 1, "checksum": before.checksum if before else ""}
        about = {"dense": dense, "workers": workers, "previous": previous}
        about["schema"] = f"{small_schema().fingerprint:016x}"
        link_manifest(self.store, seq, incarnation, [written], **about)  # type: ignore[arg-type]

    def _file(self, name: str, seq: int) -> StoredFile:
        data = tensor_file.encode({"model.w": np.full(4, seq, np.float32)}, {"seq": str(seq)})
        return manifests.store_file(self.store, name, data)

    def verified(self, seq: int, home: Path | None = None) -> dict[str, str]:
        return {o.part: o.state for o in checkpoints.verify(self.store, seq, home or self.root)}


@pytest.fixture
def home(tmp_path: Path) -> OneShardHome:
    return OneShardHome(tmp_path / "home")


def restore_rows(root: Path) -> dict[tuple[str, int, int], bytes]:
    """Return the rows of a shard that starts in this home."""
    store = FileStore(root / "store")
    newest = manifests.newest(store)
    assert newest is not None
    blobs = RocksDbStore(root / "shard-0" / "segments").open()
    try:
        shard = make_shard(blobs=blobs, store=store)  # type: ignore[arg-type]
        shard.restore(manifests.claim_incarnation(store, 0), newest.name)
        return state_of(shard)
    finally:
        blobs.close()


def run_command(*arguments: object, answer: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)], input=answer)
    if isinstance(result.exception, RoostreamError):
        raise result.exception
    return result.exit_code, result.output


def test_commits_are_listed_newest_first_with_sizes_and_quality(home: OneShardHome) -> None:
    listed = checkpoints.list_commits(home.store)
    assert [one["seq"] for one in listed] == [3, 2, 1]
    assert listed[0]["quality"] == {"requests": 300, "ne": 0.9, "auc": 0.7, "calibration": 1.0}
    assert (
        listed[0]["segments"] == 3
        and listed[0]["rows_bytes"] > listed[1]["rows_bytes"] > 0
        and listed[0]["dense_bytes"] > 16
    )
    code, text = run_command("list", "--home", home.root)
    assert code == 0 and "1-3" in text and "NE 0.9000" in text
    assert json.loads(run_command("list", "--home", home.root, "--json")[1]) == listed


def test_a_damaged_manifest_is_listed_as_damaged(home: OneShardHome) -> None:
    home.store.put("manifests/00000003", b"{}")
    assert "expected a manifest in JSON" in checkpoints.list_commits(home.store)[0]["problem"]
    assert "cannot be read" in run_command("list", "--home", home.root)[1]


def test_verify_reads_all_commits_if_none_can_be_used(home: OneShardHome) -> None:
    for name in home.store.list(manifests.MANIFESTS):
        home.store.put(name, b"{}")
    code, text = run_command("verify", "--home", home.root)
    assert code == 1 and text.count("damaged") >= len(manifests.numbers(home.store))


def test_verify_reads_every_part_of_a_commit(home: OneShardHome) -> None:
    found = home.verified(3)
    assert set(found.values()) == {"ok"} and len(found) == 6
    assert home.verified(1)["manifests/00000001 continues 0"] == "not reached"
    assert run_command("verify", "--home", home.root)[0] == 0


@pytest.mark.parametrize(
    "name", ["dense/00000002-1.safetensors", "workers/00000002-1-0.safetensors", "manifests/00000002"]
)
def test_each_damaged_file_is_found(home: OneShardHome, name: str) -> None:
    data = bytearray(home.store.get(name))
    data[len(data) // 2] ^= 1
    home.store.put(name, bytes(data))
    assert home.verified(2)[name] == "damaged"
    assert name.startswith("manifests") or set(home.verified(3).values()) == {"ok"}, (
        "only the damaged commit is reported"
    )
    assert run_command("verify", "--home", home.root, "--seq", 2)[0] == 1


def test_a_commit_that_a_running_stack_deletes_meanwhile_is_not_damaged(home: OneShardHome) -> None:
    reading = checkpoints.verify(home.store, 1, home.root)
    assert next(reading).state == "ok"
    for name in ("manifests/00000001", "dense/00000001-1.safetensors"):
        home.store.delete(name)
    for outcomes in (list(reading), list(checkpoints.verify(home.store, 1, home.root))):
        assert {o.state for o in outcomes} <= {"ok", "not reached"}
        assert any("was deleted" in o.text and "00000001" in o.part for o in outcomes)


def test_a_damaged_segment_is_found_and_named(home: OneShardHome) -> None:
    blobs = RocksDbStore(home.root / "shard-0" / "segments").open()
    key = next(iter(blobs.keys(b"b/2-1/")))
    blobs.write([(key, (blobs.get(key) or b"")[:-1] + b"\0")])
    blobs.close()
    found = {o.part: o for o in checkpoints.verify(home.store, 3, home.root)}
    assert found["segments of shard 0"].state == "damaged" and found["segments of shard 0"].text.startswith(
        "2-1/"
    )
    assert home.verified(1)["segments of shard 0"] == "ok"


def test_a_replaced_previous_manifest_is_found(home: OneShardHome) -> None:
    other = manifests.load(home.store, "manifests/00000002").manifest
    home.store.put("manifests/00000002", dataclasses.replace(other, step=99).encode())
    assert home.verified(3)["manifests/00000003 continues 2"] == "damaged"


def test_segments_of_a_running_or_remote_shard_are_reported_as_not_reached(
    home: OneShardHome, tmp_path: Path
) -> None:
    assert home.verified(3, tmp_path / "nothing")["segments of shard 0"] == "not reached"
    blobs = RocksDbStore(home.root / "shard-0" / "segments").open()
    try:
        assert home.verified(3)["segments of shard 0"] == "not reached"
    finally:
        blobs.close()


def test_an_exported_commit_is_a_home_that_continues_from_it(home: OneShardHome, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    code, text = run_command("export", "--home", home.root, "--seq", 2, "--to", to)
    assert code == 0 and str(to) in text
    assert restore_rows(to) == home.states[2] != home.states[3]
    assert restore_rows(home.root) == home.states[3], "the exported home is unchanged"
    newest = manifests.newest(FileStore(to / "store"))
    assert newest is not None and newest.manifest == manifests.load(home.store, "manifests/00000002").manifest
    assert set(OneShardHome.verified(home, 2, to).values()) == {"ok"}


def test_rows_of_an_export_are_plain_safetensors_arrays(home: OneShardHome, tmp_path: Path) -> None:
    checkpoints.export(home.store, 3, home.root, tmp_path / "copy")
    stack = small_schema().table_by_name[ITEM].stack
    arrays, about = tensor_file.decode((tmp_path / "copy" / "rows" / f"{stack}-0.safetensors").read_bytes())
    assert about == {"stack": stack, "shard": "0", "seq": "3", "schema": f"{small_schema().fingerprint:016x}"}
    rows = zip(*(arrays[name] for name in ("table", "id", "row", "state", "stamp_ms")), strict=True)
    bits = {
        (stack, int(table), int(id_)): b"".join(value.tobytes() for value in values)
        for table, id_, *values in rows
    }
    assert bits == {key: value for key, value in home.states[3].items() if key[0] == stack} and len(bits) == 4


def test_a_damaged_commit_is_not_exported(home: OneShardHome, tmp_path: Path) -> None:
    home.store.put("dense/00000003-1.safetensors", b"x")
    with pytest.raises(CheckpointError, match="it is damaged"):
        checkpoints.export(home.store, 3, home.root, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    (tmp_path / "copy").mkdir()
    with pytest.raises(SetupError, match="that does not exist"):
        checkpoints.export(home.store, 2, home.root, tmp_path / "copy")
    assert (tmp_path / "copy").is_dir()


def test_an_export_to_a_full_disk_leaves_nothing(home: OneShardHome, tmp_path: Path) -> None:
    with limited_file_size(1 << 9), pytest.raises(UnavailableError, match="free disk space"):
        checkpoints.export(home.store, 3, home.root, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("part", ["rows/d4-adagrad-0.safetensors", "export.json"])
def test_every_part_that_cannot_be_synced_fails_the_export(
    part: str, home: OneShardHome, tmp_path: Path
) -> None:
    """Nothing is called complete that a power failure would empty."""
    pending = tmp_path / "copy" / Path(part).parent

    def refuse(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.parent == pending and path.is_file():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UnavailableError, match="No space left"):
        checkpoints.export(home.store, 3, home.root, tmp_path / "copy", fsync=refuse)
    assert not (tmp_path / "copy").exists()


def test_rollback_lists_what_is_discarded_and_asks(home: OneShardHome) -> None:
    code, text = run_command("rollback", "--home", home.root, 1, answer="n\n")
    assert code == 1 and "2: 1-2 of" in text and "3: 1-3 of" in text and "Discard them?" in text
    assert manifests.numbers(home.store) == [1, 2, 3]
    code, text = run_command("rollback", "--home", home.root, 1, "--yes")
    assert code == 0 and "2 discarded" in text
    assert manifests.numbers(home.store) == [1] and restore_rows(home.root) == home.states[1]
    assert home.store.list("discarded") == ["discarded/00000002", "discarded/00000003"]
    assert manifests.next_seq(home.store) == 4, "commit numbers are never used again"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UnavailableError("the disk is full")])
def test_an_interrupted_import_can_be_repeated(
    error: BaseException, home: OneShardHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command("export", "--home", home.root, "--to", tmp_path / "copy")
    other = ("import", "--from", tmp_path / "copy", "--home", tmp_path / "other")

    def fail(*_: object) -> None:
        raise error  # after the rows were copied

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "register", fail)
        with contextlib.suppress(UnavailableError):
            assert run_command(*other)[0] != 0
    assert run_command(*other)[0] == 0
    assert restore_rows(tmp_path / "other") == home.states[3]


def test_up_knows_that_a_home_has_a_model_which_a_warehouse_does_not_replace(
    home: OneShardHome, tmp_path: Path
) -> None:
    assert trained_commit(Home(home.root)) == 3
    assert trained_commit(Home(tmp_path / "new")) == 0
    newest = manifests.newest(home.store)
    assert newest is not None
    session = TableInput(table="w", version=1, digest="d", spec={}, rows={}, begins={}, ends={})
    from_table = dataclasses.replace(newest.manifest, seq=4, input=session)
    home.store.put(from_table.name, from_table.encode())
    assert trained_commit(Home(home.root)) == 0, "it is still trained from the warehouse"


def test_no_stack_can_start_while_a_home_is_rolled_back_or_imported_into(
    home: OneShardHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack that starts while a person reads the question would train on, and what it trains be lost."""
    locked: list[bool] = []

    def ask(*_: object, **__: object) -> None:
        locked.append(Home(home.root).is_locked())

    monkeypatch.setattr(click, "confirm", ask)
    assert run_command("rollback", "--home", home.root, 1)[0] == 0
    run_command("export", "--home", home.root, "--to", tmp_path / "copy")
    copy_segments = checkpoints.copy_segments

    def copy(*arguments: Any) -> list[str]:
        locked.append(Home(tmp_path / "other").is_locked())
        return copy_segments(*arguments)

    monkeypatch.setattr(checkpoints, "copy_segments", copy)
    run_command("import", "--from", tmp_path / "copy", "--home", tmp_path / "other")
    assert locked == [True, True]
    assert not Home(home.root).is_locked() and not Home(tmp_path / "other").is_locked()


def test_rollback_to_the_newest_or_a_missing_commit_changes_nothing(home: OneShardHome) -> None:
    assert "already the newest" in run_command("rollback", "--home", home.root, 3, "--yes")[1]
    with pytest.raises(CheckpointError, match="one of the commits 1 to 3 that are kept, got 9"):
        run_command("rollback", "--home", home.root, 9, "--yes")
    home.store.put("manifests/00000002", b"{}")
    with pytest.raises(CheckpointError, match="manifests/00000002"):
        run_command("rollback", "--home", home.root, 2, "--yes")
    assert manifests.numbers(home.store) == [1, 2, 3] and manifests.newest_incarnation(home.store) == 1


def test_rollback_fences_a_running_controller(
    home: OneShardHome,
) -> None:
    late = manifests.load(home.store, "manifests/00000003").manifest

    class StoreWithRacingCommit(FileStore):
        """A store in which a running controller adds one more commit while the newer ones are discarded."""

        def delete(self, name: str) -> None:
            super().delete(name)
            if name == "manifests/00000002":
                self.create("manifests/00000004", dataclasses.replace(late, seq=4).encode())

    before = manifests.newest_incarnation(home.store)
    assert manifests.discard_after(StoreWithRacingCommit(home.store.root), 1) == [2, 3, 4]
    assert manifests.numbers(home.store) == [1] and manifests.newest_incarnation(home.store) == before + 1


def test_an_interrupted_rollback_leaves_no_gap_in_the_commits(home: OneShardHome) -> None:
    class StoreKilledAfterDelete(FileStore):
        def delete(self, name: str) -> None:
            super().delete(name)
            raise FencedError("killed")

    with pytest.raises(FencedError):
        manifests.discard_after(StoreKilledAfterDelete(home.store.root), 1)
    assert manifests.numbers(home.store) == [1, 2]
    assert manifests.discard_after(home.store, 1) == [2]


def test_a_home_without_commits_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="there is no store"):
        run_command("list", "--home", tmp_path)
    (tmp_path / "store").mkdir()
    with pytest.raises(UnavailableError, match="its volume is not mounted"):
        run_command("verify", "--home", tmp_path)
    _, text = run_command("init", "--store", tmp_path / "store")
    assert run_command("init", "--store", tmp_path / "store")[1] == text, "an existing store stays as it is"
    with pytest.raises(CheckpointError, match="nothing was committed yet"):
        run_command("verify", "--home", tmp_path)


def test_init_waits_for_an_unavailable_store_only_as_long_as_asked(tmp_path: Path) -> None:
    """While `mount` is a file, no store can be made below it, as on a volume that is not mounted."""
    mount = tmp_path / "mount"
    mount.touch()
    with pytest.raises(UnavailableError, match=r"mount/store .*make the directory available again"):
        run_command("init", "--store", mount / "store")
    with pytest.raises(UnavailableError, match="the checkpoint store has not answered for"):
        run_command("init", "--store", mount / "store", "--wait", "0.2")
    mounting = threading.Timer(0.5, mount.unlink)
    mounting.start()
    _, text = run_command("init", "--store", mount / "store", "--wait", "120")
    mounting.join()
    assert open_checkpoint_store(mount / "store").verify() in text


def test_an_older_copy_of_a_store_is_continued_above_the_incarnation_of_its_shards(
    home: OneShardHome,
) -> None:
    newest = manifests.numbers(home.store)[-1]
    assert run_command("rollback", newest, "--home", home.root, "--yes")[1].endswith("already the newest\n")
    code, _ = run_command("rollback", newest, "--home", home.root, "--incarnation", 70, "--yes")
    assert code == 0 and manifests.newest_incarnation(home.store) == 71
    assert manifests.numbers(home.store)[-1] == newest
    code, _ = run_command("rollback", newest, "--home", home.root, "--incarnation", 5, "--yes")
    assert code == 0 and manifests.is_rolled_back(home.store, newest + 1, 5), "also for a copy that was used"


def import_into_other_home(home: OneShardHome, tmp_path: Path, seq: int = 2) -> tuple[Path, Path]:
    """Export a commit and import it into another home. Return the paths of the export and of that home."""
    run_command("export", "--home", home.root, "--seq", seq, "--to", tmp_path / "export")
    code, text = run_command("import", "--from", tmp_path / "export", "--home", tmp_path / "other")
    assert code == 0 and f"commit {seq}" in text and "oldest available sample" in text
    return tmp_path / "export", tmp_path / "other"


def test_an_import_has_all_trained_state_and_no_offsets(home: OneShardHome, tmp_path: Path) -> None:
    export, other = import_into_other_home(home, tmp_path)
    assert restore_rows(other) == home.states[2]
    store, exported = FileStore(other / "store"), manifests.load(home.store, "manifests/00000002").manifest
    newest = manifests.newest(store)
    assert newest is not None
    imported = newest.manifest
    for name in ("dense", "shards", "model", "schema", "step"):
        assert getattr(imported, name) == getattr(exported, name)
    states = [{i: (part.file, part.metrics) for i, part in m.workers.items()} for m in (imported, exported)]
    assert states[0] == states[1] and imported.offsets == {("samples", 0): 0} != exported.offsets
    assert imported.rows_end == {} and imported.kafka == {} != exported.kafka
    check_kafka(imported, {"cluster_id": "another", "topics": {"samples": "x"}})
    with pytest.raises(ConfigError, match="`roostream checkpoint export` and `import`"):
        check_kafka(exported, {"cluster_id": "another", "topics": {"samples": "x"}})
    assert set(OneShardHome.verified(home, 2, export).values()) <= {"ok", "not reached"}, (
        "the export is unchanged"
    )
    assert {o.state for o in checkpoints.verify(store, 2, other)} == {"ok", "not reached"}


def test_incarnations_continue_above_those_of_the_other_cluster(home: OneShardHome, tmp_path: Path) -> None:
    for _ in range(4):
        newest = manifests.claim_incarnation(
            home.store, 0, {"workers": 3, "configured": 1, "hold": {"reason": "x"}}
        )
    _, other = import_into_other_home(home, tmp_path)
    store = FileStore(other / "store")
    assert manifests.newest_purpose(store) == {}, (
        "the purpose of the other cluster's incarnation is not taken over"
    )
    assert manifests.claim_incarnation(store, 0) == newest + 1


def test_an_import_needs_an_empty_home_and_is_all_or_nothing(home: OneShardHome, tmp_path: Path) -> None:
    export, other = import_into_other_home(home, tmp_path)
    before = restore_rows(home.root)
    with pytest.raises(SetupError, match="expected a store without commits, got 3"):
        run_command("import", "--from", export, "--home", home.root)
    assert restore_rows(home.root) == before
    (other / "store" / "manifests" / "00000002").unlink()
    with pytest.raises(SetupError, match="expected a home without rows, got shard-0"):
        run_command("import", "--from", export, "--home", other)
    with pytest.raises(CheckpointError, match=r"`roostream checkpoint export`"):
        run_command("import", "--from", home.root, "--home", tmp_path / "third")
    about = json.loads((export / "export.json").read_text())
    (export / "export.json").write_text(json.dumps(about | {"format": 9}))
    with pytest.raises(CheckpointError, match="expected an export of format 1, got 9"):
        run_command("import", "--from", export, "--home", tmp_path / "third")
    (export / "export.json").write_text('{"format": 1, "seq": 1e999}')
    with pytest.raises(CheckpointError, match=r"its export\.json cannot be read"):
        run_command("import", "--from", export, "--home", tmp_path / "third")
    (export / "export.json").write_text(json.dumps(about))
    segments = export / "shard-0" / "segments"
    blobs = RocksDbStore(segments).open()
    with pytest.raises(SetupError, match="cannot be opened"):
        run_command("import", "--from", export, "--home", tmp_path / "third")
    blobs.close()
    segments.rename(export / "moved")
    with pytest.raises(CheckpointError, match="shard-0/segments is missing; copy the export again"):
        run_command("import", "--from", export, "--home", tmp_path / "third")
    (export / "moved").rename(segments)
    FileStore(export / "store").put("dense/00000002-1.safetensors", b"x")
    with pytest.raises(CheckpointError, match=r"dense/00000002-1\.safetensors is damaged"):
        run_command("import", "--from", export, "--home", tmp_path / "third")
    assert not (tmp_path / "third").exists()
