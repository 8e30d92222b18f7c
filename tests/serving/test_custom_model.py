"""Custom models in serving: a version is served only with the code that it was trained with, and errors of
that code become answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from roostream.models.build import build_model, load_model_config
from roostream.models.config import ModelConfig
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.manifest import dense_name, store_file
from serving.errors import RequestError
from serving.request_batch import read_request
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.version_follower import VersionFollower
from tests.models.custom.test_loading import write_model
from tests.models.custom.test_model_checks import CODE
from tests.models.model_cases import make_schema
from tests.models.model_checks import make_request_blocks
from tests.runtime.manifest_cases import a_manifest

SCHEMA = make_schema("everything")


def follow_commit(folder: Path, config: ModelConfig, **changed: str) -> tuple[bool, LoadedVersions]:
    """Commit a model of this configuration. Return whether it is served, and the loaded versions."""
    store, versions = FileStore(folder), LoadedVersions(first_version(SCHEMA, config, 0))
    state = build_model(SCHEMA, config, 5).state_dict()
    file = store_file(
        store, dense_name(1, 1), tensor_file.encode({f"model.{k}": v.numpy() for k, v in state.items()}, {})
    )
    model = {**dataclasses.asdict(config), **changed}
    manifest = a_manifest(1, incarnation=1, schema=f"{SCHEMA.fingerprint:016x}", dense=file, model=model)
    assert store.create(manifest.name, manifest.encode())
    return VersionFollower(store, SCHEMA, versions, 0).poll(), versions


def test_the_served_model_code_is_that_of_training(tmp_path: Path) -> None:
    served, versions = follow_commit(tmp_path / "store", load_model_config(write_model(tmp_path, CODE)))
    assert served and versions.newest.name == "1-1"


def test_a_version_with_other_code_is_skipped_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, versions = follow_commit(
        tmp_path / "store", load_model_config(write_model(tmp_path, CODE)), code="0" * 64
    )
    assert not served and versions.newest.name == "0-0"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "model 'shop.py:build': expected code of digest 000000000000, got" in warning
    assert "use the file that it was trained with" in warning


def test_a_commit_of_the_code_that_this_code_replaces_is_served(tmp_path: Path) -> None:
    path = write_model(tmp_path, CODE, f'replaces = ["{"0" * 12}"]')
    served, versions = follow_commit(tmp_path / "store", load_model_config(path), code="0" * 64)
    assert served and versions.newest.name == "1-1"


def test_a_commit_with_other_weights_than_the_code_that_replaces_it_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    committed = load_model_config(write_model(tmp_path / "committed", CODE))
    digest = dataclasses.asdict(committed)["code"][:12]
    corrected = CODE.replace("# more", "self.last = torch.nn.Linear(2, 2)")
    load_model_config(write_model(tmp_path / "corrected", corrected, f'replaces = ["{digest}"]'))
    # A process of serving has loaded the corrected code only.
    served, versions = follow_commit(tmp_path / "store", committed, code=digest + "0" * 52)
    assert not served and versions.newest.name == "0-0"
    assert "use the code that wrote this commit" in caplog.text


def test_an_error_of_custom_code_is_logged_and_answered_without_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_model_config(
        write_model(tmp_path, CODE.replace("return z_BT", "return z_BT.no_such_thing"))
    )
    ro, nro, item_n = make_request_blocks(SCHEMA, 3, seed=1)
    with pytest.raises(
        RequestError, match="the code of model version 0-0 failed; serving's log says where"
    ) as refused:
        first_version(SCHEMA, config, 0).score(
            ZeroRows(), read_request(SCHEMA, ro, nro, item_n, 1_700_000_000_000)
        )
    assert refused.value.status == 500 and "shop.py:15: AttributeError" in caplog.text


class ZeroRows:
    """Fake rows that are all 0."""

    def gather(self, lookup: object) -> dict[str, np.ndarray]:
        parts = lookup.stacks  # type: ignore[attr-defined]
        return {s: np.zeros((len(p.id_U), SCHEMA.stacks[s][0].dim), np.float32) for s, p in parts.items()}
