"""The version follower loads the dense weights that the trainer commits: verified, complete, and newest
first.

Guarantee G5 (docs/architecture.md, Guarantees): damaged data is detected and never served.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.models.build import build_model
from roostream.models.inputs import INPUT_NAMES, input_names, input_names_tensor
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.manifest import Manifest, dense_name, store_file
from roostream.schema.schema import Schema, Transform
from serving.build import _check_shape
from serving.errors import VersionRefusedError
from serving.scorer import Version, first_version
from serving.versions import version_follower as dense_follower
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.routing import Routing, TrafficSplit
from serving.versions.version_follower import RECHECK_POLLS, VersionFollower
from tests.runtime.manifest_cases import a_manifest, encoded
from tests.serving.serving_cases import MODEL, SCHEMA, config_of


class Commits:
    """A store to which tests commit versions as the trainer does, and a follower of it."""

    def __init__(self, root: Path) -> None:
        self.store = FileStore(root)
        self.versions = LoadedVersions(first_version(SCHEMA, MODEL, 0))
        self.installed: list[str] = []
        self.versions.on_change = lambda loaded: self.installed.append(loaded.version.name)
        self.follower = VersionFollower(self.store, SCHEMA, self.versions, 0)

    def commit(self, seq: int, *, incarnation: int = 1, fill: float = 0.5, **changes: Any) -> Manifest:
        """Commit a version in which every weight is `fill`."""
        weights = {
            f"model.{n}": np.full(t.shape, fill, np.float32)
            for n, t in build_model(SCHEMA, MODEL, 0).state_dict().items()
        }
        data = tensor_file.encode(weights | changes.pop("tensors", {}), {"seq": str(seq)})
        file = store_file(self.store, dense_name(seq, incarnation), data)
        manifest = a_manifest(
            seq,
            incarnation=incarnation,
            schema=changes.pop("schema", f"{SCHEMA.fingerprint:016x}"),
            dense=file,
            model=changes.pop("model", dataclasses.asdict(MODEL)),
            time_ms=123,
        )
        assert not changes
        assert self.store.create(manifest.name, manifest.encode())
        return manifest

    @property
    def value(self) -> float:
        return float(next(iter(self.versions.newest.model.parameters())).flatten()[0])


@pytest.fixture
def commits(tmp_path: Path) -> Commits:
    return Commits(tmp_path / "store")


def test_without_a_manifest_the_first_version_stays(commits: Commits) -> None:
    assert not commits.follower.poll() and commits.versions.newest.name == "0-0"


def test_each_commit_is_installed_once(commits: Commits) -> None:
    commits.commit(1, fill=0.25)
    assert commits.follower.poll() and commits.versions.newest.name == "1-1" and commits.value == 0.25
    assert not commits.follower.poll()
    commits.commit(2, incarnation=3, fill=0.75)
    assert commits.follower.poll() and commits.versions.newest.name == "3-2" and commits.value == 0.75
    assert commits.installed == ["1-1", "3-2"] and commits.versions.num_swaps == 2
    assert commits.versions.named("1-1").name == "1-1"


def test_the_untrained_version_is_never_the_one_before_the_newest(commits: Commits) -> None:
    """Else a restarted process with a canary served it to most users until the next commit."""
    commits.versions.put(canary=TrafficSplit("newest", 0.05), shadow=TrafficSplit("previous", 0.1))
    commits.commit(1)
    assert commits.follower.poll() and commits.versions.served.version.name == "1-1"
    assert commits.versions.resolve(commits.versions.routing.shadow) is None
    commits.commit(2)
    assert commits.follower.poll() and commits.versions.served.version.name == "1-1"
    assert [h.version.name for h in commits.versions.loaded] == ["1-2", "1-1"]


@pytest.mark.parametrize("others", [{}, {"shadow": TrafficSplit("previous", 0.1)}])
def test_a_restarted_process_loads_the_versions_that_its_settings_name(
    others: dict[str, TrafficSplit], commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    for seq in range(1, 6):
        commits.commit(seq, fill=seq / 10)
    routing = Routing(canary=TrafficSplit("1-2", 0.05), interleave=TrafficSplit("9-3", 0.1), **others)
    commits.versions = LoadedVersions(first_version(SCHEMA, MODEL, 0), routing=routing)
    follower = VersionFollower(commits.store, SCHEMA, commits.versions, 0)
    follower.poll()
    if others:  # `previous` must not become the version that another split names
        assert "1-2" not in [h.version.name for h in commits.versions.loaded]
    commits.commit(6)
    for _ in range(3):
        follower.poll()
    assert [h.version.name for h in commits.versions.loaded] == ["1-6", "1-5", "1-2"]
    assert commits.versions.served.version.name == "1-6"
    assert caplog.text.count("version 9-3, which") == 1, (
        "a version that the store does not have is named once"
    )


def test_a_version_knows_up_to_when_it_was_trained(commits: Commits) -> None:
    assert commits.versions.served.trained_up_to_ms == 0
    manifest = commits.commit(1)
    assert commits.follower.poll() and commits.versions.served.trained_up_to_ms == manifest.watermark_ms > 0


def test_a_new_version_scores_as_the_first_one_does(commits: Commits) -> None:
    for as_trained in (False, True):
        versions = LoadedVersions(first_version(SCHEMA, MODEL, 0, as_trained=as_trained))
        commits.commit(1 + as_trained)
        assert VersionFollower(commits.store, SCHEMA, versions, 0).poll()
        assert versions.newest.name != "0-0" and versions.newest.as_trained is as_trained


def test_requests_have_priority_over_loading_a_version(
    commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def record_step(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            steps.append(name)
            return work(*arguments)

        return step

    for name in ("read_weights", "build_version"):
        monkeypatch.setattr(dense_follower, name, record_step(name, getattr(dense_follower, name)))
    commits.follower.pause = lambda: steps.append("pause")
    commits.commit(1)
    assert commits.follower.poll() and steps == ["pause", "read_weights", "pause", "build_version"]


def test_after_a_pause_only_the_newest_version_is_loaded(commits: Commits) -> None:
    for seq in (1, 2, 3):
        commits.commit(seq)
    assert commits.follower.poll() and commits.installed == ["1-3"]


def _damage(store: FileStore, name: str) -> None:
    raw = bytearray(store.get(name))
    raw[len(raw) // 2] ^= 0x01
    store.put(name, bytes(raw))


@pytest.mark.parametrize("part", ["manifest", "dense"])
def test_g5_a_damaged_version_is_skipped_and_logged_once(
    commits: Commits, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    commits.commit(1, fill=0.25)
    manifest = commits.commit(2, fill=0.75)
    damaged = manifest.name if part == "manifest" else manifest.dense.name
    _damage(commits.store, damaged)
    assert commits.follower.poll() and commits.versions.newest.name == "1-1" and commits.value == 0.25
    assert not commits.follower.poll()
    assert caplog.text.count("refused") == 1 and damaged in caplog.text
    commits.commit(3)
    assert commits.follower.poll() and commits.versions.newest.name == "1-3"


def _model_config(model: dict[str, Any]) -> dict[str, Any]:
    return {**dataclasses.asdict(MODEL), **model}


UNSERVABLE = [
    ({"schema": "00000000000000aa"}, "serving waits for a commit of its schema", "schema", "another schema"),
    (
        {"model": _model_config({"width": 16})},
        "expected the parameters of its model",
        "model",
        "weights of another model",
    ),
    (
        {"model": _model_config({"depth": 16})},
        "expected the configuration of its model",
        "model",
        "a model of another build",
    ),
    (
        {"fill": float("nan")},
        "is not finite; the version is not served",
        "not_finite",
        "weights that no pass can use",
    ),
    (
        {"tensors": {"model.extra": np.ones(1, np.float32)}},
        "expected the parameters",
        "model",
        "a parameter too many",
    ),
]


@pytest.mark.parametrize(
    ("changes", "text", "reason"), [c[:3] for c in UNSERVABLE], ids=[c[3] for c in UNSERVABLE]
)
def test_an_unservable_version_leaves_the_current_one(
    commits: Commits, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], text: str, reason: str
) -> None:
    commits.commit(1)
    commits.follower.poll()
    commits.commit(2, **changes)
    assert not commits.follower.poll() and commits.versions.newest.name == "1-1"
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert text in line and "\n" not in line and commits.versions.num_refused == {reason: 1}


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b'{"body": {}, "checksum": 5}'], ids=repr)
def test_an_invalid_manifest_is_skipped(commits: Commits, raw: bytes) -> None:
    commits.commit(1)
    commits.store.create("manifests/00000002", raw)
    assert commits.follower.poll() and commits.versions.newest.name == "1-1"


def test_a_manifest_of_an_unknown_format_is_refused_with_the_format(
    commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    commits.store.create("manifests/00000001", encoded({"format": 9}))
    assert not commits.follower.poll()
    assert "got 9" in caplog.text


def test_an_invalid_dense_file_is_skipped(commits: Commits, caplog: pytest.LogCaptureFixture) -> None:
    manifest = commits.commit(1)
    changed = dataclasses.replace(
        manifest, seq=2, dense=store_file(commits.store, manifest.dense.name, b"not tensors")
    )
    commits.store.create(changed.name, changed.encode())
    assert not commits.follower.poll()
    assert "expected a safetensors file" in caplog.text


def test_each_outage_of_the_store_is_logged_once_with_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    class UnreliableStore(FileStore):
        list_fails = False

        def list(self, prefix: str) -> list[str]:
            if self.list_fails:
                raise UnavailableError("Input/output error")
            return super().list(prefix)

        def get(self, name: str) -> bytes:
            if self.get_fails:
                raise UnavailableError("Input/output error")
            return super().get(name)

        get_fails = False

    commits = Commits(tmp_path)
    store = UnreliableStore(tmp_path)
    commits.follower.store = store
    commits.commit(1)
    store.list_fails = True
    assert not commits.follower.poll() and not commits.follower.poll()
    store.list_fails, store.get_fails = False, True
    assert not commits.follower.poll()
    assert caplog.text.count("cannot read") == 1
    store.get_fails = False
    assert commits.follower.poll() and commits.versions.newest.name == "1-1"
    assert caplog.text.count("can be read again") == 1
    for outage in (2, 3):  # without a new commit in between
        store.list_fails = True
        assert not commits.follower.poll() and caplog.text.count("cannot read") == outage
        store.list_fails = False
        assert not commits.follower.poll() and caplog.text.count("can be read again") == outage


def test_a_manifest_of_another_model_shape_stops_serving(tmp_path: Path) -> None:
    config = config_of(tmp_path, shards=("127.0.0.1:1", "127.0.0.1:2"), buckets=128)
    commits = Commits(tmp_path / "store")
    commits.follower.check = partial(_check_shape, config)
    commits.commit(1)
    with pytest.raises(ConfigError, match="expected num_buckets = 64, got 128; use the committed value"):
        commits.follower.poll()
    assert commits.installed == []


def test_a_pattern_of_addresses_counts_as_many_shards_as_it_names(tmp_path: Path) -> None:
    config = config_of(tmp_path, shards=("roostream-shard-{2}.roostream-shard:7000",))
    commits = Commits(tmp_path / "store")
    commits.follower.check = partial(_check_shape, config)
    commits.commit(1)
    assert commits.follower.poll() and commits.versions.newest.name == "1-1"


def test_a_rollback_to_a_loaded_version_loads_nothing(commits: Commits) -> None:
    commits.commit(1, fill=0.25)
    commits.follower.poll()
    first = commits.versions.newest
    commits.commit(2, fill=0.75)
    commits.follower.poll()
    manifests.discard_after(commits.store, 1)
    assert commits.follower.poll() and commits.versions.newest is first and commits.value == 0.25
    assert [h.version.name for h in commits.versions.loaded] == ["1-1"]
    assert not commits.follower.poll()


def test_a_discarded_version_is_unloaded_although_the_store_failed_when_it_was_replaced(
    tmp_path: Path,
) -> None:
    class StoreWithAnOutage(FileStore):
        num_reads_left = 1 << 30

        def get(self, name: str) -> bytes:
            if name == "manifests/00000002":
                self.num_reads_left -= 1
                if self.num_reads_left == -1:
                    raise UnavailableError("Input/output error")
            return super().get(name)

    commits = Commits(tmp_path)
    for seq in (1, 2):
        commits.commit(seq)
        commits.follower.poll()
    manifests.discard_after(commits.store, 1)
    commits.commit(2, incarnation=2)
    commits.follower.store = store = StoreWithAnOutage(tmp_path)
    store.num_reads_left = 1  # enough for the new version, not for the comparison with the old one
    commits.follower.poll()
    assert commits.versions.newest.name == "2-2" and store.num_reads_left == -1
    commits.follower.poll()
    assert [h.version.name for h in commits.versions.loaded] == ["2-2"]


def test_a_rollback_to_an_unloaded_version_loads_it(commits: Commits) -> None:
    for seq, fill in ((1, 0.125), (2, 0.25), (3, 0.5), (4, 0.75)):
        commits.commit(seq, fill=fill)
        commits.follower.poll()
    manifests.discard_after(commits.store, 1)
    assert commits.follower.poll() and commits.versions.newest.name == "1-1" and commits.value == 0.125
    assert [h.version.name for h in commits.versions.loaded] == ["1-1"]
    commits.commit(5, incarnation=2, fill=0.625)
    assert commits.follower.poll() and commits.versions.newest.name == "2-5" and commits.value == 0.625


def test_a_commit_that_arrives_after_its_rollback_is_not_served(commits: Commits) -> None:
    incarnation = manifests.claim_incarnation(commits.store, 0)
    commits.commit(1, incarnation=incarnation)
    commits.follower.poll()
    manifests.discard_after(commits.store, 1)
    commits.commit(2, incarnation=incarnation, fill=0.75)
    assert not commits.follower.poll() and commits.versions.newest.name == "1-1"
    commits.commit(3, incarnation=incarnation + 2, fill=0.625)
    assert commits.follower.poll() and commits.versions.newest.name == "3-3"


def test_a_newer_incarnation_removes_withdrawn_versions(commits: Commits) -> None:
    for seq in (1, 2):
        commits.commit(seq)
        commits.follower.poll()
    manifests.discard_after(commits.store, 1)
    commits.commit(3, incarnation=2, fill=0.625)
    assert commits.follower.poll() and [h.version.name for h in commits.versions.loaded] == ["2-3"]


def test_a_new_commit_of_a_known_number_replaces_the_discarded_one(commits: Commits) -> None:
    for seq, fill in ((1, 0.125), (2, 0.25)):
        commits.commit(seq, fill=fill)
        commits.follower.poll()
    commits.store.delete("manifests/00000002")
    commits.commit(2, incarnation=3, fill=0.75)
    assert commits.follower.poll() and commits.versions.newest.name == "3-2" and commits.value == 0.75
    assert [h.version.name for h in commits.versions.loaded] == ["3-2"], "version 1-2 is unloaded"
    assert not commits.follower.poll()


def test_commits_of_known_numbers_after_a_rollback_between_two_polls_are_installed(commits: Commits) -> None:
    commits.versions.keep = 4
    for seq in (1, 2, 3):
        commits.commit(seq)
        commits.follower.poll()
    for seq in (2, 3):
        commits.store.delete(f"manifests/{seq:08d}")
        commits.commit(seq, incarnation=2, fill=0.1 * seq)
    assert commits.follower.poll() and commits.versions.newest.name == "2-3"
    assert [h.version.name for h in commits.versions.loaded] == ["2-3", "1-1"]
    commits.commit(4, incarnation=2)
    assert commits.follower.poll() and commits.versions.newest.name == "2-4"


def test_a_good_commit_in_place_of_a_refused_one_is_installed(commits: Commits) -> None:
    commits.commit(1)
    commits.follower.poll()
    commits.commit(2, fill=float("nan"))
    assert not commits.follower.poll()
    commits.store.delete("manifests/00000002")
    commits.commit(2, incarnation=2, fill=0.75)
    assert not any([commits.follower.poll() for _ in range(RECHECK_POLLS - 1)])
    assert commits.follower.poll() and commits.versions.newest.name == "2-2"


def test_refused_manifests_are_rarely_read_again(commits: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    commits.commit(1)
    for seq in range(2, 12):
        commits.commit(seq, schema=OTHER_SCHEMA)
    assert commits.follower.poll()
    read, get = list[str](), commits.store.get
    monkeypatch.setattr(commits.store, "get", lambda name: read.append(name) or get(name))
    for _ in range(RECHECK_POLLS):
        assert not commits.follower.poll()
    assert Counter(read) == {manifests.manifest_name(1): RECHECK_POLLS} | {
        manifests.manifest_name(seq): 1 for seq in range(2, 12)
    }


def test_a_commit_whose_file_becomes_visible_later_is_served(
    commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that another machine has written to a shared file system may appear after the manifest."""
    file = commits.commit(1).dense.name
    data = commits.store.get(file)
    commits.store.delete(file)
    assert not any([commits.follower.poll() for _ in range(2 * RECHECK_POLLS)])
    assert caplog.text.count("refused") == 1 and commits.follower.waiting_for
    commits.store.put(file, data)
    assert any([commits.follower.poll() for _ in range(RECHECK_POLLS)])
    assert commits.versions.newest.name == "1-1" and not commits.follower.waiting_for


def test_an_activated_version_survives_a_rollback(commits: Commits) -> None:
    for seq in (1, 2):
        commits.commit(seq)
        commits.follower.poll()
    commits.versions.activate("1-2")
    manifests.discard_after(commits.store, 1)
    assert commits.follower.poll()
    assert commits.versions.newest.name == "1-1" and commits.versions.served.version.name == "1-2"


def test_versions_deleted_from_the_store_stay_loaded(commits: Commits) -> None:
    for seq in (1, 2):
        commits.commit(seq)
        commits.follower.poll()
    commits.store.delete("manifests/00000001")
    commits.commit(3)
    commits.versions.keep = 3
    assert commits.follower.poll() and [h.version.name for h in commits.versions.loaded] == [
        "1-3",
        "1-2",
        "1-1",
    ]


def test_an_empty_store_changes_nothing_and_is_logged_once(
    commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    assert not commits.follower.poll() and not caplog.text
    commits.commit(1)
    commits.follower.poll()
    commits.store.delete("manifests/00000001")
    for _ in range(2):
        assert not commits.follower.poll() and commits.versions.newest.name == "1-1"
    assert caplog.text.count("lists no manifests") == 1


def test_a_version_that_fails_its_warm_up_is_refused_and_logged_once(
    commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    warmed_up: list[str] = []

    def warm_up(version: Version) -> None:
        warmed_up.append(version.name)
        if version.name == "1-2":
            raise VersionRefusedError("warm_up", "1-2: expected a score, got none")

    commits.follower.warm_up = warm_up
    commits.commit(1)
    assert commits.follower.poll()
    commits.commit(2)
    assert not commits.follower.poll() and not commits.follower.poll()
    assert commits.versions.newest.name == "1-1" and warmed_up == ["1-1", "1-2"]
    assert caplog.text.count("expected a score, got none") == 1
    refused = commits.versions.refused["manifests/00000002"]
    assert refused.reason == "warm_up" and commits.versions.num_refused == {"warm_up": 1}
    commits.commit(3)
    assert commits.follower.poll() and commits.versions.newest.name == "1-3"


def test_a_commit_of_other_transforms_is_refused(commits: Commits) -> None:
    """The fingerprint does not cover transforms, so weights would read other columns."""
    transformed = dataclasses.replace(
        SCHEMA, transforms=(Transform(input="age_h", op="rank", output="age_rank"),)
    )
    commits.commit(1, tensors={INPUT_NAMES: input_names_tensor(SCHEMA)})
    assert commits.follower.poll()
    commits.commit(2, tensors={INPUT_NAMES: input_names_tensor(transformed)})
    assert not commits.follower.poll() and commits.versions.newest.name == "1-1"
    refused = commits.versions.refused["manifests/00000002"]
    assert refused.reason == "schema" and "nro floats" in refused.message


def changed_feature(side: str, name: str, **settings: Any) -> Schema:
    features = [dataclasses.replace(f, **settings) if f.name == name else f for f in getattr(SCHEMA, side)]
    changes: dict[str, Any] = {side: tuple(features)}
    return dataclasses.replace(SCHEMA, **changes)


@pytest.mark.parametrize(
    "trained",
    [
        dataclasses.replace(SCHEMA, transforms=(Transform(input="age_h", op="log1p", output="age_h"),)),
        changed_feature("nro", "age_h", default=3.0),
        changed_feature("ro", "history", max_len=2),
        changed_feature("nro", "clicks", online="ctr_1h"),
    ],
    ids=["transform", "default", "max_len", "online"],
)
def test_a_commit_that_was_trained_on_other_values_of_the_same_features_is_refused(
    commits: Commits, trained: Schema
) -> None:
    """Names and fingerprint are equal, but serving would score other numbers than were trained."""
    assert trained.fingerprint == SCHEMA.fingerprint
    commits.commit(1, tensors={INPUT_NAMES: input_names_tensor(SCHEMA)})
    assert commits.follower.poll()
    commits.commit(2, tensors={INPUT_NAMES: input_names_tensor(trained)})
    assert not commits.follower.poll() and commits.versions.newest.name == "1-1"
    assert commits.versions.refused["manifests/00000002"].reason == "schema"


def test_a_commit_from_before_the_values_of_features_were_named_is_served(commits: Commits) -> None:
    older = {"ro floats", "nro floats", "ro lists", "nro lists"}
    names = {group: names for group, names in input_names(SCHEMA).items() if group in older}
    commits.commit(1, tensors={INPUT_NAMES: np.frombuffer(json.dumps(names).encode(), np.uint8)})
    assert commits.follower.poll() and commits.versions.newest.name == "1-1"


OTHER_SCHEMA = "00000000000000aa"


def test_of_the_commits_of_another_schema_only_the_newest_is_reported(
    commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    commits.store.create("manifests/00000001", b"{}")
    for seq in (2, 3, 4):
        commits.commit(seq, schema=OTHER_SCHEMA)
    assert not commits.follower.poll() and not commits.follower.poll()
    assert caplog.text.count(OTHER_SCHEMA) == 1 and "manifests/00000004" in caplog.text
    assert commits.versions.num_refused == {"schema": 1, "damaged": 1}


def test_refused_manifests_are_forgotten_when_the_store_has_deleted_them(
    commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    """While serving waits for a commit of its schema, the trainer commits for days."""
    caplog.set_level(logging.CRITICAL, dense_follower.log.name)  # records of the log would keep the manifests
    num_bytes, peaks = 200_000, list[int]()
    tracemalloc.start()
    for seq in range(1, 61):
        commits.store.create(manifests.manifest_name(seq), b"{" + seq.to_bytes(4) * (num_bytes // 4))
        if seq > 3:
            commits.store.delete(manifests.manifest_name(seq - 3))
        assert not commits.follower.poll()
        peaks.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert peaks[-1] - peaks[9] < 10 * num_bytes


def test_a_process_waits_for_a_commit_that_it_can_serve(commits: Commits) -> None:
    assert not commits.follower.poll() and commits.follower.waiting_for == "", (
        "a new deployment has no commits yet"
    )
    commits.commit(1, schema=OTHER_SCHEMA)
    commits.commit(2, schema=OTHER_SCHEMA)
    assert not commits.follower.poll()
    waiting_for = commits.follower.waiting_for
    assert "a commit that can be served" in waiting_for and "manifests/00000002" in waiting_for
    commits.commit(3)
    assert commits.follower.poll() and commits.follower.waiting_for == ""
    commits.commit(4, schema=OTHER_SCHEMA)
    assert not commits.follower.poll() and commits.follower.waiting_for == "", "version 3 is served"


def test_a_process_that_cannot_read_the_store_waits_for_it(
    commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(prefix: str) -> list[str]:
        raise UnavailableError("503")

    commits.commit(1)
    with monkeypatch.context() as patch:
        patch.setattr(commits.store, "list", fail)
        assert not commits.follower.poll()
        assert commits.follower.waiting_for == "the checkpoint store, which cannot be read"
    assert commits.follower.poll() and commits.follower.waiting_for == ""
