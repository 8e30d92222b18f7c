"""`roostream checkpoint export` and `import` of commits whose rows are in an object store. Both work while
the shard runs, and without access to its home."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from param_server.key_value_store import MemoryKeyValueStore, RocksDbStore
from roostream.errors import CheckpointError, SetupError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore, open_store
from roostream.runtime.store_identity import init_store, open_checkpoint_store
from roostream.schema.registry import to_toml
from tests.cli.checkpoint.test_checkpoints import OneShardHome, restore_rows, run_command
from tests.param_server.shard_support import make_shard, small_schema, state_of
from tests.runtime import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server.running() as url:
        yield url


class RunningDeployment:
    """A deployment with its checkpoint store in a bucket, whose running shard has its home open."""

    def __init__(self, folder: Path, name: str) -> None:
        self.url, self.backup = (f"s3://{s3_server.BUCKET}/{name}-{what}" for what in ("live", "backup"))
        init_store(self.url)
        self.home = OneShardHome(folder / "home", open_checkpoint_store(self.url))
        self.states = self.home.states

    def export(self, to: object, *arguments: object) -> str:
        code, text = run_command("export", "--store", self.url, "--home", "/nowhere", "--to", to, *arguments)
        assert code == 0, text
        return text


@pytest.fixture
def running(s3: str, tmp_path: Path) -> Iterator[RunningDeployment]:
    found = RunningDeployment(tmp_path, tmp_path.name.lower().replace("_", "-").strip("-"))
    blobs = RocksDbStore(tmp_path / "home" / "shard-0" / "segments").open()  # a running shard holds this lock
    yield found
    blobs.close()


def restore_rows_from_store(store: CheckpointStore) -> dict[tuple[str, int, int], bytes]:
    """Return the rows of a shard that starts with an empty home and reads them from `store`."""
    newest = manifests.newest(store)
    assert newest is not None
    shard = make_shard(MemoryKeyValueStore(), store)  # type: ignore[arg-type]
    shard.restore(manifests.claim_incarnation(store, 0), newest.name)
    return state_of(shard)


def test_a_running_deployment_is_exported_to_another_bucket_and_continues_there(
    running: RunningDeployment,
) -> None:
    assert "commit 2" in running.export(running.backup, "--seq", 2)
    backup = open_checkpoint_store(running.backup)
    assert backup.verify() != running.home.store.identity  # type: ignore[attr-defined]
    assert restore_rows_from_store(backup) == running.states[2] != running.states[3]
    assert restore_rows_from_store(open_checkpoint_store(running.url)) == running.states[3]


@pytest.mark.parametrize("source", ["backup", "live"])
def test_a_bucket_is_imported_into_an_empty_bucket_without_homes(
    running: RunningDeployment, source: str
) -> None:
    running.export(running.backup)
    other = f"{running.backup}-other"
    source_url = running.backup if source == "backup" else running.url
    code, text = run_command("import", "--from", source_url, "--store", other, "--home", "/nowhere")
    assert code == 0 and "commit 3" in text
    store = open_checkpoint_store(other)
    assert restore_rows_from_store(store) == running.states[3]
    newest = manifests.newest(store)
    assert newest is not None and newest.manifest.kafka == {} and not any(newest.manifest.offsets.values())


def test_a_bucket_is_imported_into_a_folder_with_homes(running: RunningDeployment, tmp_path: Path) -> None:
    to = tmp_path / "other"
    code, _ = run_command("import", "--from", running.url, "--home", to)
    assert code == 0 and restore_rows(to) == running.states[3]


def test_a_folder_of_a_running_deployment_has_rows_as_arrays_and_is_imported_into_a_bucket(
    running: RunningDeployment, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    running.export(folder, "--seq", 2)
    assert restore_rows(folder) == running.states[2] and list((folder / "rows").iterdir())
    other = f"{running.backup}-of-folder"
    code, _ = run_command("import", "--from", folder, "--store", other)
    assert code == 0 and restore_rows_from_store(open_checkpoint_store(other)) == running.states[2]
    assert not (tmp_path / ".roostream").exists()


def test_a_running_deployment_is_exported_as_a_collection(running: RunningDeployment, tmp_path: Path) -> None:
    text = running.export(tmp_path / "rows.safetensors", "--seq", 2)
    assert "embedding_bags." in text and (tmp_path / "rows.safetensors").exists()


def test_a_collection_that_is_imported_into_a_bucket_has_its_rows_there(
    running: RunningDeployment, tmp_path: Path
) -> None:
    rows, again, home = tmp_path / "rows.safetensors", tmp_path / "again.safetensors", tmp_path / "other"
    running.export(rows, "--make-ids", tmp_path / "ids.safetensors")
    (tmp_path / "schema.toml").write_text(to_toml(small_schema()) + '\n[[nro]]\nname = "price"\n')
    ids = ("--ids", tmp_path / "ids.safetensors")
    schema = ("--schema", tmp_path / "schema.toml")
    code, text = run_command(
        "import", "--from", rows, *ids, *schema, "--store", running.backup, "--home", home
    )
    assert code == 0, text
    shutil.rmtree(home)
    code, text = run_command("export", "--store", running.backup, "--home", "/nowhere", "--to", again, *ids)
    assert code == 0 and again.read_bytes() == rows.read_bytes(), text


def test_an_export_replaces_nothing_and_one_that_failed_has_no_commit(running: RunningDeployment) -> None:
    running.home.store.delete("segments/0-2-1")
    with pytest.raises(CheckpointError, match="copy segments/0-2-1"):
        running.export(running.backup)
    assert manifests.numbers(open_store(running.backup)) == []
    running.export(running.backup, "--seq", 1)
    with pytest.raises(SetupError, match="expected a store without commits"):
        running.export(running.backup, "--seq", 1)


def test_copies_are_verified_while_the_shard_runs(running: RunningDeployment) -> None:
    code, text = run_command("verify", "--store", running.url, "--home", "/nowhere")
    lines = text.splitlines()
    assert code == 0 and sum("segments/0-" in line and line.endswith(" ok") for line in lines) == 6
    assert any("segments of shard 0 not reached" in line for line in lines)
    data = running.home.store.get("segments/0-3-1")
    running.home.store.put("segments/0-3-1", data[:-1] + bytes([data[-1] ^ 1]))
    code, text = run_command("verify", "--store", running.url, "--home", "/nowhere")
    assert code == 1 and "segments/0-3-1 damaged" in text


def test_the_list_shows_tier_and_bytes_in_the_store(running: RunningDeployment) -> None:
    code, text = run_command("list", "--store", running.url)
    assert code == 0 and text.count("kept as newest") == 3 and "MB in the store)" in text
