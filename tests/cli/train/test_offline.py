"""`roostream train` trains a model from the files of a warehouse, survives any interruption, and ends with a
commit that a stack continues from. G11 (docs/architecture.md, Guarantees): in `exact` mode, the parameters
after any kills are bit-equal to those of an undisturbed run."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomli_w

from param_server.key_value_store import RocksDbStore
from param_server.placement.profiles import read_profiles
from param_server.row_block import newest_of
from roostream.cli.checkpoint.move_buckets import CommittedShards
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline import train_offline
from roostream.cli.train.offline_readers import link_table, reader_actors
from roostream.errors import ConfigError, RoostreamError, SchemaError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.clock import SystemClock
from roostream.runtime.manifest import Manifest
from roostream.runtime.program import Stop
from roostream.runtime.rpc.security import LinkCredentials
from roostream.schema.registry import to_toml
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.schema.settings import load
from roostream.warehouse.readers.config import ReaderConfig
from tests.certificates import Authority
from tests.trainer import samples
from tests.warehouse.sessions.test_sample_table import archive
from trainer.config import LoopConfig
from trainer.selection.config import RehearsalConfig

EXACT = LoopConfig(exact=True, batch_requests=4, first_batch_requests=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    (folder / "schema.toml").write_text(to_toml(samples.schema()))
    (folder / "wide.toml").write_text(to_toml(make_wide_schema()))
    archive(folder / "warehouse", samples.records(list(range(1, 61))))
    return folder


def config(folder: Path, home: str, **more: Any) -> TrainConfig:
    settings = {"warehouse": str(folder / "warehouse"), "schema": str(folder / "schema.toml"), **more}
    return TrainConfig(
        home=str(folder / home), commit_interval_ms=100, partitions=settings.pop("partitions", 2), **settings
    )


def last_manifest(folder: Path, home: str) -> Manifest:
    found = manifests.newest(open_store(str(folder / home / "store")))
    assert found is not None
    return found.manifest


def dense_file(folder: Path, home: str) -> bytes:
    store = open_store(str(folder / home / "store"))
    return manifests.read_file(store, last_manifest(folder, home).dense)


def same_bits(folder: Path, one: str, other: str) -> bool:
    a, b = tensor_file.decode(dense_file(folder, one))[0], tensor_file.decode(dense_file(folder, other))[0]
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def run_training(
    folder: Path, home: str, stop: Stop | None = None, loop: LoopConfig = EXACT, **more: Any
) -> dict[str, Any]:
    return train_offline(config(folder, home, **more), loop, stop or Stop(), lambda done, rows: None)


def test_offline_training_trains_all_samples_once_and_its_commit_starts_a_stream(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = run_training(folder, "a")
    assert "the worker is stopping" not in caplog.text, (
        "the worker learns that the last commit succeeded, so it does not stop with a warning"
    )
    assert (report["requests"], report["rows"], report["steps"]) == (60, 60, 16)
    assert report["metrics"]["requests"] == 60 and report["requests_s"] > 0
    manifest = last_manifest(folder, "a")
    assert manifest.input is None and manifest.kafka == {}
    assert {number: at for (_, number), at in manifest.offsets.items()} == {0: 0, 1: 0}


def test_training_counts_the_tables_traffic_for_plans(folder: Path) -> None:
    run_training(folder, "counted", profile_share=1.0)
    found = read_profiles(open_store(str(folder / "counted" / "store")), samples.schema())
    assert found.keys() == {"user", "item"} and found["user"].profile.examples > 0


def test_the_planner_uses_the_profiles_of_another_models_home(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torchrec")
    schema = str(folder / "wide.toml")
    run_training(folder, "first-model", schema=schema, profile_share=1.0)
    settings = {"schema": schema, "rows": "torchrec", "workers": 2, "placement": "planner"}
    from trainer.torchrec_rows import planned_placement

    config(folder, "other-model", profiles=str(folder / "first-model" / "store"), **settings)
    now_ms = SystemClock().now_ms()
    with caplog.at_level("INFO"):
        placed = [
            planned_placement("planner", make_wide_schema(), 2, store, batch=8, now_ms=now_ms)
            for store in (open_store(str(folder / home / "store")) for home in ("first-model", "other-model"))
        ]
    assert placed[0].keys() == placed[1].keys() == {"user", "item"}
    assert "profiles of 2 of 2 tables" in caplog.text and "profiles of 0 of 2 tables" in caplog.text
    with pytest.raises(ConfigError, match="'profiles'"):
        config(folder, "other-model", profiles="anywhere")


def test_a_home_with_a_trained_model_is_not_overwritten(folder: Path) -> None:
    run_training(folder, "b")
    with pytest.raises(ConfigError, match="with `roostream up`"):
        run_training(folder, "b")


class StopAtNextCommit(Stop):
    """A stop signal that is set as soon as the home has a new commit."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.store = str(home / "store")
        self.first = self.newest_step()

    def newest_step(self) -> int:
        found = manifests.newest(open_store(self.store))
        return -1 if found is None else found.manifest.step

    def is_set(self) -> bool:
        return self.newest_step() > self.first


def train_until_commit(folder: Path, home: str, loop: LoopConfig) -> bool:
    """Train until the next commit. Return False if the training ended before it was stopped."""
    try:
        run_training(folder, home, StopAtNextCommit(folder / home), loop)
    except UnavailableError as stopped:
        assert "from the last commit" in str(stopped)
        return True
    return False


def test_g11_interrupted_training_resumes_and_ends_with_equal_bits(folder: Path) -> None:
    """With one request per step, the 60 steps take several commits on any machine."""
    exact_one_request = dataclasses.replace(EXACT, batch_requests=1, first_batch_requests=1)
    run_training(folder, "c", loop=exact_one_request)
    interruptions = 0
    while train_until_commit(folder, "d", exact_one_request):
        interruptions += 1
    assert interruptions >= 2
    assert last_manifest(folder, "d").workers[0].metrics["requests"] == 60
    assert last_manifest(folder, "d").step == last_manifest(folder, "c").step
    assert same_bits(folder, "c", "d")


def test_a_held_training_ends_with_its_reason_and_goes_on_after_the_repair(folder: Path) -> None:
    """Rows without their manifests are a permanent hold, which no other command could end.

    The first run may stop after the manifest of its commit and before the shards hear of it. The second run
    restores that commit, so from then on every shard knows of a commit.
    """
    one_request = dataclasses.replace(EXACT, batch_requests=1, first_batch_requests=1)
    for _ in range(2):
        assert train_until_commit(folder, "held", one_request)
    manifests_, away = folder / "held" / "store" / "manifests", folder / "away"
    manifests_.rename(away)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"training is held: .*committed rows"):
            run_training(folder, "held", loop=one_request)
    shutil.rmtree(manifests_, ignore_errors=True)
    away.rename(manifests_)
    run_training(folder, "held", loop=one_request)
    assert last_manifest(folder, "held").workers[0].metrics["requests"] == 60


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"days": "2001-01-01"}, "expected samples of 2001-01-01, got none"),
        ({"partitions": 1}, "expected partitions = 2 or more,"),
        ({"warehouse": "nowhere"}, "is no table"),
        ({"model": "nowhere.toml"}, "nowhere.toml"),
        ({"schema": ""}, "expected --schema FILE"),
    ],
)
def test_untrainable_input_is_refused_and_no_home_is_made(
    folder: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(RoostreamError, match=message):
        run_training(folder, "e", **more)
    assert not (folder / "e").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pool": "ray"}, "readers or max_readers"),
        ({"readers_listen": "10.0.0.1:7000", "workers": 2}, "'readers_listen': expected"),
        ({"readers_listen": "somewhere"}, "'readers_listen': expected an address"),
        ({"workers": 3}, "key 'workers': expected at most partitions = 2, got 3"),
        ({"rows": "device"}, "key 'rows': expected"),
        ({"schema": "nowhere.toml"}, "expected a schema TOML"),
    ],
)
def test_invalid_settings_are_rejected(folder: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(folder, "h", **more)


def test_readers_on_other_machines_get_the_controllers_address_and_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Any] = []
    monkeypatch.setattr("infra.ray_pool.RayPool", lambda copy, kind: programs.append((copy, kind)))
    for address in ("127.0.0.1:7000", "10.0.0.1:7000"):
        reader_actors(link_table(LinkCredentials(insecure=address.startswith("10."))))(address)
    configs = []
    for number, (copy, kind) in enumerate(programs):
        program = copy(number, tmp_path)
        program.prepare()
        configs.append(load(ReaderConfig, program.command[-1]))
        assert (kind, program.name, program.log.parent.parent) == ("reader", f"reader-{number}", tmp_path)
    assert configs == [
        ReaderConfig(controller="127.0.0.1:7000"),
        ReaderConfig(controller="10.0.0.1:7000", listen="0.0.0.0:0", insecure=True),
    ]


@pytest.mark.parametrize("readers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_g11_readers_as_programs_change_no_bit(folder: Path, readers: int) -> None:
    run_training(folder, f"local-{readers}")
    report = run_training(folder, f"read-{readers}", readers=readers)
    assert (
        report["reading"]["fetched_requests"] >= 60
        and last_manifest(folder, f"read-{readers}").workers[0].metrics["requests"] == 60
    )
    assert same_bits(folder, f"read-{readers}", f"local-{readers}")


# Tests of several workers, and of rows that the workers hold


def make_wide_schema() -> Schema:
    """Return the samples' schema with table widths that TorchRec supports."""
    tables = {"user": {"dim": 4}, "item": {"dim": 8, "rule": "rowwise_adagrad"}}
    return schema_from_dict({**samples.TABLES, "tables": tables})


Rows = dict[tuple[int, int], tuple[np.ndarray, np.ndarray, int]]


def rows_at(folder: Path, home: str, schema: Schema) -> Rows:
    """Return row, optimizer state and time stamp of every (table, id), over all shards of the last commit."""
    manifest, found = last_manifest(folder, home), {}
    for owner in manifest.shards:
        with contextlib.closing(RocksDbStore(folder / home / f"shard-{owner}" / "segments").open()) as blobs:
            shards = CommittedShards(manifest, schema, {owner: blobs})
            for part in shards.segments(owner, manifest.owners.buckets_of(owner)).read(shards.state(owner)):
                block = newest_of(part.blocks, manifest.num_buckets)
                entries = zip(block.rows_LD, block.state_LA, block.stamp_ms_L.tolist(), strict=True)
                for table, id_, values in zip(block.keys.table_U, block.keys.id_U, entries, strict=True):
                    found[int(table), int(id_)] = values
    return found


def bits(rows: Rows) -> dict[Any, Any]:
    return {key: (row.tobytes(), state.tobytes(), stamp) for key, (row, state, stamp) in rows.items()}


def rows_of(folder: Path, home: str, schema: Schema | None = None) -> dict[Any, Any]:
    return bits(rows_at(folder, home, schema or samples.schema()))


def test_a_missing_model_is_rejected_before_any_process_is_started(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        run_training(folder, "none", model="nowhere.toml", workers=2)


def test_a_schema_that_torchrec_cannot_hold_is_rejected_before_any_process_is_started(folder: Path) -> None:
    pytest.importorskip("torchrec")
    with pytest.raises(SchemaError, match=r"'user'.*multiple of 4"):
        run_training(folder, "none", workers=2, rows="torchrec")
    with pytest.raises(ConfigError, match="'placement'"):
        config(folder, "none", placement="planner")


def test_g11_interrupted_training_continues_with_other_owners_of_the_rows(folder: Path) -> None:
    exact_one_request = dataclasses.replace(
        EXACT, batch_requests=1, first_batch_requests=1
    )  # one request per step, so that there are several commits on any machine
    run_training(folder, "two", loop=exact_one_request, num_shards=2)
    with pytest.raises(UnavailableError):
        run_training(folder, "three", StopAtNextCommit(folder / "three"), exact_one_request, num_shards=2)
    assert last_manifest(folder, "three").input is not None and last_manifest(folder, "three").num_shards == 2
    run_training(folder, "three", loop=exact_one_request, num_shards=3)
    assert last_manifest(folder, "three").num_shards == 3 and set(last_manifest(folder, "three").shards) == {
        0,
        1,
        2,
    }
    assert same_bits(folder, "two", "three") and rows_of(folder, "two") == rows_of(folder, "three")


EXACT_TWO_REQUESTS = dataclasses.replace(EXACT, batch_requests=2, first_batch_requests=2)


def run_torchrec_training(folder: Path, home: str, **more: Any) -> dict[str, Any]:
    pytest.importorskip("torchrec")
    more = {"rows": "torchrec", "num_shards": 3, **more}
    return run_training(
        folder, home, loop=EXACT_TWO_REQUESTS, workers=2, schema=str(folder / "wide.toml"), **more
    )


class KillWorker(Stop):
    """A stop signal that is never set, but sends SIGKILL to worker 1 as soon as there is a commit."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home, self.killed = home, False

    def is_set(self) -> bool:
        if not self.killed and manifests.newest(open_store(str(self.home / "store"))) is not None:
            config_file = str(self.home / "conf" / "worker-1.json")
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if child.cmdline()[-1:] == [config_file]:
                        child.kill()
                        self.killed = True
        return super().is_set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_g11_rows_in_torchrec_train_like_rows_at_shards_also_after_a_kill(folder: Path) -> None:
    """With rows in TorchRec, training equals training with rows at shards up to float tolerance. After a
    kill, it is bit-equal to a run without the kill. At the end, the rows are at the shards.
    """
    at_shards = run_torchrec_training(folder, "wide-shards", rows="shards")
    report = run_torchrec_training(folder, "wide-torchrec")
    kills = KillWorker(folder / "wide-killed")
    run_torchrec_training(folder, "wide-killed", stop=kills)
    assert kills.killed
    for name in ("ne", "auc", "calibration"):
        assert report["metrics"][name] == pytest.approx(at_shards["metrics"][name], rel=1e-4)
    assert report["metrics"]["requests"] == 60 and last_manifest(folder, "wide-torchrec").num_shards == 3
    expected, found = (
        rows_at(folder, "wide-shards", make_wide_schema()),
        rows_at(folder, "wide-torchrec", make_wide_schema()),
    )
    assert found.keys() == expected.keys() and len(found) > 60
    for key, (row, state, stamp) in expected.items():
        np.testing.assert_allclose(found[key][0], row, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[key][1], state, rtol=1e-3, atol=1e-6)
        assert found[key][2] == stamp
    assert same_bits(folder, "wide-torchrec", "wide-killed")
    assert bits(found) == rows_of(folder, "wide-killed", make_wide_schema())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rows_that_are_still_at_the_workers_go_to_the_shards_with_the_same_command(folder: Path) -> None:
    """The state is that of a training killed between its last commit and the hand-over of the rows."""
    run_torchrec_training(folder, "before", rows="shards", num_shards=2)
    learned = rows_of(folder, "before", make_wide_schema())
    report = run_torchrec_training(folder, "before")
    assert (
        report["requests"],
        report["metrics"]["requests"],
        last_manifest(folder, "before").num_shards,
    ) == (0, 60, 3)
    assert rows_of(folder, "before", make_wide_schema()) == learned and len(learned) > 60
    with pytest.raises(ConfigError, match="trained"):
        run_torchrec_training(folder, "before")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_permanent_error_ends_training_with_its_reason(folder: Path) -> None:
    often = dataclasses.replace(EXACT, rehearsal=RehearsalConfig(batches=5))
    with pytest.raises(ConfigError, match=r"training is held: .*rehears"):
        train_offline(config(folder, "often", workers=2), often, Stop())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_g11_readers_authenticate_on_a_secured_link(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("trainer")
    (tmp_path / "token").write_text("t" * 32)
    link = {
        "certificate": certificate,
        "key": key,
        "ca": str(authority.pem),
        "token_file": str(tmp_path / "token"),
    }
    (tmp_path / "link.toml").write_text(tomli_w.dumps({"link": link}))
    run_training(folder, "not-asked")
    report = run_training(folder, "asked", readers=1, link=str(tmp_path / "link.toml"))
    assert report["reading"]["fetched_requests"] >= 60 and same_bits(folder, "asked", "not-asked")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_g11_readers_read_for_workers_that_are_processes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_training(folder, "read-for", workers=2, num_shards=2, readers=1)
    run_training(folder, "read-by-themselves", workers=2, num_shards=2)
    warnings = [line.message for line in caplog.records if line.levelname != "INFO"]
    assert not warnings, (
        "each worker continues its partitions of the stream after the last commit, without warnings"
    )
    assert last_manifest(folder, "read-for").step == last_manifest(folder, "read-by-themselves").step
    assert rows_of(folder, "read-for") == rows_of(folder, "read-by-themselves")
