"""`roostream train`: a model from files alone, that a stack can go on with, whatever interrupts it."""

from __future__ import annotations

import contextlib
import dataclasses
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    (folder / "schema.toml").write_text(to_toml(samples.schema()))
    (folder / "wide.toml").write_text(to_toml(wide()))
    archive(folder / "warehouse", samples.records(list(range(1, 61))))
    return folder


def config(place: Path, home: str, **more: Any) -> TrainConfig:
    given = {"warehouse": str(place / "warehouse"), "schema": str(place / "schema.toml"), **more}
    return TrainConfig(
        home=str(place / home), commit_interval_ms=100, partitions=given.pop("partitions", 2), **given
    )


def last(place: Path, home: str) -> Manifest:
    found = manifests.newest(open_store(str(place / home / "store")))
    assert found is not None
    return found.manifest


def dense(place: Path, home: str) -> bytes:
    store = open_store(str(place / home / "store"))
    return manifests.read_file(store, last(place, home).dense)


def same_bits(place: Path, one: str, other: str) -> bool:
    a, b = tensor_file.decode(dense(place, one))[0], tensor_file.decode(dense(place, other))[0]
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def trained(
    place: Path, home: str, stop: Stop | None = None, loop: LoopConfig = EXACT, **more: Any
) -> dict[str, Any]:
    return train_offline(config(place, home, **more), loop, stop or Stop(), lambda done, rows: None)


def test_offline_training_trains_all_samples_once_and_its_commit_starts_a_stream(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = trained(place, "a")
    assert "the worker is stopping" not in caplog.text, "it hears of the last commit"
    assert (report["requests"], report["rows"], report["steps"]) == (60, 60, 16)
    assert report["metrics"]["requests"] == 60 and report["requests_s"] > 0
    manifest = last(place, "a")
    assert manifest.input is None and manifest.kafka == {}
    assert {number: at for (_, number), at in manifest.offsets.items()} == {0: 0, 1: 0}


def test_training_counts_the_tables_traffic_for_plans(place: Path) -> None:
    trained(place, "counted", profile_share=1.0)
    found = read_profiles(open_store(str(place / "counted" / "store")), samples.schema())
    assert found.keys() == {"user", "item"} and found["user"].profile.examples > 0


def test_the_planner_places_the_tables_of_another_model_by_the_counts_of_their_features(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torchrec")
    schema = str(place / "wide.toml")
    trained(place, "first-model", schema=schema, profile_share=1.0)
    given = {"schema": schema, "rows": "torchrec", "workers": 2, "placement": "planner"}
    from trainer.torchrec_rows import planned_placement

    config(place, "other-model", profiles=str(place / "first-model" / "store"), **given)
    now_ms = SystemClock().now_ms()
    with caplog.at_level("INFO"):
        placed = [
            planned_placement("planner", wide(), 2, store, batch=8, now_ms=now_ms)
            for store in (open_store(str(place / home / "store")) for home in ("first-model", "other-model"))
        ]
    assert placed[0].keys() == placed[1].keys() == {"user", "item"}
    assert "profiles of 2 of 2 tables" in caplog.text and "profiles of 0 of 2 tables" in caplog.text
    with pytest.raises(ConfigError, match="'profiles'"):
        config(place, "other-model", profiles="anywhere")


def test_a_home_with_a_trained_model_is_not_overwritten(place: Path) -> None:
    trained(place, "b")
    with pytest.raises(ConfigError, match="with `roostream up`"):
        trained(place, "b")


class StopsAtTheNextCommit(Stop):
    """Set once the home has a commit that it did not have when this was made."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.store = str(home / "store")
        self.first = self.newest_step()

    def newest_step(self) -> int:
        found = manifests.newest(open_store(self.store))
        return -1 if found is None else found.manifest.step

    def is_set(self) -> bool:
        return self.newest_step() > self.first


def interrupted(place: Path, home: str, loop: LoopConfig) -> bool:
    """Trains until the next commit. False if the training ended before it was stopped."""
    try:
        trained(place, home, StopsAtTheNextCommit(place / home), loop)
    except UnavailableError as stopped:
        assert "from the last commit" in str(stopped)
        return True
    return False


def test_g11_interrupted_training_resumes_and_ends_with_equal_bits(place: Path) -> None:
    """One request per step: 60 steps are several commits, on any machine."""
    by_one = dataclasses.replace(EXACT, batch_requests=1, first_batch_requests=1)
    trained(place, "c", loop=by_one)
    interruptions = 0
    while interrupted(place, "d", by_one):
        interruptions += 1
    assert interruptions >= 2
    assert last(place, "d").workers[0].metrics["requests"] == 60
    mine, undisturbed = last(place, "d"), last(place, "c")
    assert mine.step == undisturbed.step
    assert same_bits(place, "c", "d")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"days": "2001-01-01"}, "expected samples of 2001-01-01, got none"),
        ({"partitions": 1}, "expected partitions = 2 or more,"),
        ({"warehouse": "nowhere"}, "is no table"),
        ({"model": "nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_untrainable_input_is_refused_and_no_home_is_made(
    place: Path, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(RoostreamError, match=says):
        trained(place, "e", **more)
    assert not (place / "e").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"pool": "ray"}, "readers or max_readers"),
        ({"readers_listen": "10.0.0.1:7000", "workers": 2}, "'readers_listen': expected"),
        ({"readers_listen": "somewhere"}, "'readers_listen': expected an address"),
        ({"workers": 3}, "key 'workers': expected at most partitions = 2, got 3"),
        ({"rows": "device"}, "key 'rows': expected"),
        ({"schema": "nowhere.toml"}, "expected a schema TOML"),
    ],
)
def test_invalid_settings_are_rejected(place: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(place, "h", **more)


def test_programs_on_other_machines_are_reported_where_and_how_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("infra.ray_pool.RayPool", lambda copy, kind: made.append((copy, kind)))
    for at in ("127.0.0.1:7000", "10.0.0.1:7000"):
        reader_actors(link_table(LinkCredentials(insecure=at.startswith("10."))))(at)
    told = []
    for number, (copy, kind) in enumerate(made):
        program = copy(number, tmp_path)
        program.prepare()
        told.append(load(ReaderConfig, program.command[-1]))
        assert (kind, program.name, program.log.parent.parent) == ("reader", f"reader-{number}", tmp_path)
    assert told == [
        ReaderConfig(controller="127.0.0.1:7000"),
        ReaderConfig(controller="10.0.0.1:7000", listen="0.0.0.0:0", insecure=True),
    ]


@pytest.mark.parametrize("readers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_g11_readers_as_programs_change_no_bit(place: Path, readers: int) -> None:
    trained(place, f"local-{readers}")
    report = trained(place, f"read-{readers}", readers=readers)
    assert (
        report["reading"]["fetched_requests"] >= 60
        and last(place, f"read-{readers}").workers[0].metrics["requests"] == 60
    )
    assert same_bits(place, f"read-{readers}", f"local-{readers}")


# Several workers, and rows that they hold


def wide() -> Schema:
    """The samples' schema with widths that TorchRec can hold."""
    tables = {"user": {"dim": 4}, "item": {"dim": 8, "rule": "rowwise_adagrad"}}
    return schema_from_dict({**samples.TABLES, "tables": tables})


Rows = dict[tuple[int, int], tuple[np.ndarray, np.ndarray, int]]


def rows_at(place: Path, home: str, schema: Schema) -> Rows:
    """Every key's row, state and stamp, whoever has it."""
    manifest, found = last(place, home), {}
    for owner in manifest.shards:
        with contextlib.closing(RocksDbStore(place / home / f"shard-{owner}" / "segments").open()) as blobs:
            its = CommittedShards(manifest, schema, {owner: blobs})
            for part in its.segments(owner, manifest.owners.buckets_of(owner)).read(its.state(owner)):
                block = newest_of(part.blocks, manifest.num_buckets)
                kept = zip(block.rows_LD, block.state_LA, block.stamp_ms_L.tolist(), strict=True)
                for table, id_, values in zip(block.keys.table_U, block.keys.id_U, kept, strict=True):
                    found[int(table), int(id_)] = values
    return found


def bits(rows: Rows) -> dict[Any, Any]:
    return {key: (row.tobytes(), state.tobytes(), stamp) for key, (row, state, stamp) in rows.items()}


def rows_of(place: Path, home: str, schema: Schema | None = None) -> dict[Any, Any]:
    return bits(rows_at(place, home, schema or samples.schema()))


def test_a_model_that_is_not_there_is_rejected_before_any_process_is_started(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        trained(place, "none", model="nowhere.toml", workers=2)


def test_a_schema_that_torchrec_cannot_hold_is_rejected_before_any_process_is_started(place: Path) -> None:
    pytest.importorskip("torchrec")
    with pytest.raises(SchemaError, match=r"'user'.*multiple of 4"):
        trained(place, "none", workers=2, rows="torchrec")
    with pytest.raises(ConfigError, match="'placement'"):
        config(place, "none", placement="planner")


def test_g11_interrupted_training_continues_with_other_owners_of_the_rows(place: Path) -> None:
    by_one = dataclasses.replace(
        EXACT, batch_requests=1, first_batch_requests=1
    )  # several commits, on any machine
    trained(place, "two", loop=by_one, num_shards=2)
    with pytest.raises(UnavailableError):
        trained(place, "three", StopsAtTheNextCommit(place / "three"), by_one, num_shards=2)
    assert last(place, "three").input is not None and last(place, "three").num_shards == 2
    trained(place, "three", loop=by_one, num_shards=3)
    assert last(place, "three").num_shards == 3 and set(last(place, "three").shards) == {0, 1, 2}
    assert same_bits(place, "two", "three") and rows_of(place, "two") == rows_of(place, "three")


BY_TWO = dataclasses.replace(EXACT, batch_requests=2, first_batch_requests=2)


def by_torchrec(place: Path, home: str, **more: Any) -> dict[str, Any]:
    pytest.importorskip("torchrec")
    more = {"rows": "torchrec", "num_shards": 3, **more}
    return trained(place, home, loop=BY_TWO, workers=2, schema=str(place / "wide.toml"), **more)


class KillsAWorker(Stop):
    """Sends SIGKILL to worker 1, as soon as there is a commit."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home, self.killed = home, False

    def is_set(self) -> bool:
        if not self.killed and manifests.newest(open_store(str(self.home / "store"))) is not None:
            of_worker = str(self.home / "conf" / "worker-1.json")
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if child.cmdline()[-1:] == [of_worker]:
                        child.kill()
                        self.killed = True
        return super().is_set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_g11_rows_in_torchrec_train_like_rows_at_shards_whoever_is_killed(place: Path) -> None:
    """To float tolerance as at shards; to the bit as without the kill; then the rows are at the shards."""
    at_shards = by_torchrec(place, "wide-shards", rows="shards")
    report = by_torchrec(place, "wide-torchrec")
    kills = KillsAWorker(place / "wide-killed")
    by_torchrec(place, "wide-killed", stop=kills)
    assert kills.killed
    for name in ("ne", "auc", "calibration"):
        assert report["metrics"][name] == pytest.approx(at_shards["metrics"][name], rel=1e-4)
    assert report["metrics"]["requests"] == 60 and last(place, "wide-torchrec").num_shards == 3
    expected, found = rows_at(place, "wide-shards", wide()), rows_at(place, "wide-torchrec", wide())
    assert found.keys() == expected.keys() and len(found) > 60
    for key, (row, state, stamp) in expected.items():
        np.testing.assert_allclose(found[key][0], row, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[key][1], state, rtol=1e-3, atol=1e-6)
        assert found[key][2] == stamp
    assert same_bits(place, "wide-torchrec", "wide-killed")
    assert bits(found) == rows_of(place, "wide-killed", wide())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rows_that_are_still_at_the_workers_go_to_the_shards_with_the_same_command(place: Path) -> None:
    """As if it had been killed between the last commit and the hand-over."""
    by_torchrec(place, "before", rows="shards", num_shards=2)
    learned = rows_of(place, "before", wide())
    report = by_torchrec(place, "before")
    assert (report["requests"], report["metrics"]["requests"], last(place, "before").num_shards) == (0, 60, 3)
    assert rows_of(place, "before", wide()) == learned and len(learned) > 60
    with pytest.raises(ConfigError, match="trained"):
        by_torchrec(place, "before")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_permanent_error_ends_training_with_its_reason(place: Path) -> None:
    often = dataclasses.replace(EXACT, rehearsal=RehearsalConfig(batches=5))
    with pytest.raises(ConfigError, match=r"training is held: .*rehears"):
        train_offline(config(place, "often", workers=2), often, Stop())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_g11_readers_authenticate_on_a_secured_link(place: Path, tmp_path: Path) -> None:
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
    trained(place, "not-asked")
    report = trained(place, "asked", readers=1, link=str(tmp_path / "link.toml"))
    assert report["reading"]["fetched_requests"] >= 60 and same_bits(place, "asked", "not-asked")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_g11_readers_read_for_workers_that_are_processes(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(place, "read-for", workers=2, num_shards=2, readers=1)
    trained(place, "read-by-themselves", workers=2, num_shards=2)
    warnings = [line.message for line in caplog.records if line.levelname != "INFO"]
    assert not warnings, "each worker restores its partitions of the stream behind the last commit"
    assert last(place, "read-for").step == last(place, "read-by-themselves").step
    assert rows_of(place, "read-for") == rows_of(place, "read-by-themselves")
