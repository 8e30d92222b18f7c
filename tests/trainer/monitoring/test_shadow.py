"""A shadow is a frozen copy of a committed model that scores during training. It must not change training."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.models.build import build_model
from roostream.runtime import tensor_file
from tests.trainer import samples
from tests.trainer.loops import Built, build
from tests.trainer.memory_store import MemoryStore
from trainer.monitoring.shadow import ShadowModel, load_shadow_model

NUMBERS = list(range(1, 41))
NAME = "shadows/1-3.safetensors"


def build_with_shadow(every: int) -> Built:
    built = build(samples.records(NUMBERS))
    schema = samples.schema()
    built.loop.shadow = ShadowModel(build_model(schema, samples.MODEL, built.loop.config.seed), "1-3", every)
    return built


def store_with_model(schema: str = "") -> MemoryStore:
    model = build_model(samples.schema(), samples.MODEL, 7)
    tensors = {f"model.{name}": value.numpy() for name, value in model.state_dict().items()}
    metadata = {
        "schema": schema or f"{samples.schema().fingerprint:016x}",
        "model": json.dumps(dataclasses.asdict(samples.MODEL)),
    }
    store = MemoryStore()
    store.create(NAME, tensor_file.encode(tensors, metadata))
    return store


def test_a_shadow_does_not_change_training() -> None:
    alone, with_shadow = build(samples.records(NUMBERS)).train_all(), build_with_shadow(1).train_all()
    for name, value in alone.loop.snapshot().shared.items():
        np.testing.assert_array_equal(value, with_shadow.loop.snapshot().shared[name], err_msg=name)
    assert with_shadow.predicted == alone.predicted


@pytest.mark.parametrize(("every", "candidates"), [(1, 120), (2, 60)])
def test_a_shadow_is_counted_on_the_steps_that_it_scores(every: int, candidates: int) -> None:
    loop = build_with_shadow(every).train_all().loop
    report = loop.partitions.windowed.report(loop.watermark_ms)["shadow"]
    assert (
        report["shadow"]["all"]["click"]["candidates"]
        == report["live"]["all"]["click"]["candidates"]
        == candidates
    )
    assert report["shadow"]["all"]["click"]["ne"] != report["live"]["all"]["click"]["ne"], (
        "the shadow is not trained, so its scores must differ"
    )


def test_a_shadow_has_the_committed_weights() -> None:
    copy = load_shadow_model(store_with_model(), "1-3", samples.schema(), "cpu", 2)
    expected = build_model(samples.schema(), samples.MODEL, 7).state_dict()
    assert (copy.version, copy.every) == ("1-3", 2)
    for name, value in copy.model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), expected[name].numpy(), err_msg=name)


def test_an_unknown_version_or_another_schema_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"expected shadow to name a committed version \(there is none\), got '9-9'"
    ):
        load_shadow_model(MemoryStore(), "9-9", samples.schema(), "cpu", 1)
    with pytest.raises(ConfigError, match="expected a shadow of schema"):
        load_shadow_model(store_with_model("0" * 16), "1-3", samples.schema(), "cpu", 1)


class UnreadableManifests(MemoryStore):
    """A store that lists its manifests but cannot read them now."""

    def get(self, name: str) -> bytes:
        if name.startswith("manifests/"):
            raise UnavailableError(f"{name} cannot be read now")
        return super().get(name)


def test_a_version_is_not_called_unknown_while_manifests_cannot_be_read() -> None:
    store = UnreadableManifests()
    store.create("manifests/00000001", b"{}")
    with pytest.raises(UnavailableError, match="manifests/00000001"):
        load_shadow_model(store, "9-9", samples.schema(), "cpu", 1)


def test_a_rollback_restores_windows_and_slices() -> None:
    built = build(samples.records(NUMBERS), slices=("surface", "user"))
    for _ in range(4):
        built.loop.step()
    at, before = built.loop.snapshot(), built.loop.partitions.windowed.report(built.loop.watermark_ms)
    built.train_all()
    full_report = built.loop.partitions.windowed.report(built.loop.watermark_ms)
    built.loop.restore(at)
    assert built.loop.partitions.windowed.report(built.loop.watermark_ms) == before
    built.train_all()
    report_after_restore = built.loop.partitions.windowed.report(built.loop.watermark_ms)
    assert counts(report_after_restore) == counts(full_report), "nothing is counted twice"
    assert (
        full_report["windows"]["all"]["click"]["candidates"] == 120 and len(counts(full_report)["user"]) == 13
    )


def counts(report: dict[str, Any]) -> dict[str, Any]:
    """Extract candidates and base rates. They do not depend on the rows, which a fake shard cannot roll
    back."""
    results = {
        slice_: {v: windows["all"]["click"] for v, windows in values.items()}
        for slice_, values in report["slices"].items()
    }
    results["windows"] = {window: tasks["click"] for window, tasks in report["windows"].items()}
    return {
        name: {v: (n["candidates"], n["base_rate"]) for v, n in values.items()}
        for name, values in results.items()
    }
