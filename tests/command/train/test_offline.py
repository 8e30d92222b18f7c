"""`roostream train`: a model from files alone, that a stack can go on with, whatever interrupts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command.train.config import TrainConfig
from command.train.offline import train_offline
from roo.errors import ConfigError, UnavailableError
from roo.schema_registry import to_toml
from runtime import manifest as manifests
from runtime import tensor_file
from runtime.checkpoint_store import open_store
from runtime.manifest import Manifest
from runtime.program import Stop
from tests.trainer import samples
from tests.warehouse.readers.test_table_session import archive
from trainer.config import LoopConfig

EXACT = LoopConfig(exact=True, batch_requests=4, first_batch_requests=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    (folder / "schema.toml").write_text(to_toml(samples.schema()))
    archive(folder / "warehouse", samples.records(list(range(1, 61))))
    return folder


def config(place: Path, home: str, **more: Any) -> TrainConfig:
    given = {"warehouse": str(place / "warehouse"), "schema": str(place / "schema.toml"), **more}
    return TrainConfig(home=str(place / home), commit_interval_ms=100, partitions=given.pop("partitions", 2), **given)


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


def trained(place: Path, home: str, stop: Stop | None = None, **more: Any) -> dict[str, Any]:
    return train_offline(config(place, home, **more), EXACT, stop or Stop(), lambda done, rows, rate: None)


def test_all_samples_are_trained_once_and_what_is_committed_begins_a_stream(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = trained(place, "a")
    assert "the worker is stopping" not in caplog.text, "it hears of the last commit"
    assert (report["requests"], report["rows"], report["steps"]) == (60, 60, 16)
    assert report["metrics"]["requests"] == 60 and report["requests_s"] > 0
    manifest = last(place, "a")
    assert manifest.input is None and manifest.kafka == {}
    assert {number: at for (_, number), at in manifest.offsets.items()} == {0: 0, 1: 0}


def test_a_home_with_a_trained_model_is_left_alone(place: Path) -> None:
    trained(place, "b")
    with pytest.raises(ConfigError, match="has a model that is trained; give another --home, or go on with `roostream up`"):
        trained(place, "b")


class StopsAfter(Stop):
    """Set once so many turns have looked at it."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_g11_training_that_was_interrupted_goes_on_at_its_last_commit_and_ends_with_the_same_bits(place: Path) -> None:
    trained(place, "c")
    for looks in (8, 16, 24, 40):
        with pytest.raises(UnavailableError, match="the same command goes on from the last commit"):
            trained(place, "d", StopsAfter(looks))
    trained(place, "d")
    assert last(place, "d").workers[0].metrics["requests"] == 60
    mine, undisturbed = last(place, "d"), last(place, "c")
    assert mine.step == undisturbed.step
    assert same_bits(place, "c", "d")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"days": "2001-01-01"}, "expected samples of 2001-01-01, got none"),
        ({"partitions": 1}, "expected partitions = 2 or more, got 1: the archive has as many"),
    ],
)
def test_what_can_not_be_trained_is_told(place: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(place, "e", **more)


def test_a_schema_that_is_not_there_is_refused_before_anything_is_opened(place: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; expected a schema TOML"):
        config(place, "g", schema="nowhere.toml")


@pytest.mark.parametrize("readers", [1, 3])
def test_g11_readers_as_programs_change_no_bit(place: Path, readers: int) -> None:
    trained(place, f"local-{readers}")
    report = trained(place, f"read-{readers}", readers=readers)
    assert report["reading"]["fetched_requests"] >= 60 and last(place, f"read-{readers}").workers[0].metrics["requests"] == 60
    assert same_bits(place, f"read-{readers}", f"local-{readers}")
