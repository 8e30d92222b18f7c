"""Shadow model: what would a committed version predict for the candidates that are trained now?

Its dense weights are frozen, but it uses the rows that training pulls. So it shows what training the dense
part brought since then, not what the rows brought; reports have `rows: "live"`.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import nn

from roostream.errors import CheckpointError, ConfigError
from roostream.models.build import build_model, model_config_from_dict
from roostream.models.inputs import Inputs, changed_inputs
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.schema import Schema

_PREFIX = "model."


class ShadowModel:
    """A frozen model that scores every `every`-th step."""

    def __init__(self, model: nn.Module, version: str, every: int = 1) -> None:
        self.model, self.version, self.every = model.eval(), version, every

    def scores(self, inputs: Inputs, step: int) -> np.ndarray | None:
        """Probabilities [B, T]; None if this step is skipped or a score is not finite."""
        if step % self.every:
            return None
        with torch.no_grad():
            score_BT: np.ndarray = torch.sigmoid(self.model(inputs)).cpu().numpy()
        return score_BT if bool(np.isfinite(score_BT).all()) else None


def load_shadow_model(
    store: CheckpointStore, version: str, schema: Schema, device: str, every: int
) -> ShadowModel:
    """Load the dense weights of a committed version, `<incarnation>-<seq>`.

    They are copied to `shadows/<version>.safetensors`, so a later start finds them after their commit is
    retired.

    Raises:
        ConfigError: no such version, or one of another schema; lists the available ones.
        CheckpointError: the file is damaged.
        UnavailableError: the store cannot be reached.
    """
    copy = f"shadows/{version}.safetensors"
    try:
        data = store.get(copy)
    except CheckpointError:
        data = _committed(store, version)
        store.create(copy, data)
    tensors, metadata = tensor_file.decode(data)
    if metadata.get("schema") != f"{schema.fingerprint:016x}":
        raise ConfigError(
            f"expected a shadow of schema {schema.fingerprint:016x}, {version} is of "
            f"{metadata.get('schema')}; leave `shadow` out until there are commits of this schema"
        )
    if changed := changed_inputs(tensors, schema):
        raise ConfigError(
            f"expected a shadow of this schema, {version} has other {' and '.join(sorted(changed))}; "
            "leave `shadow` out until there are commits of these"
        )
    model = build_model(schema, model_config_from_dict(json.loads(metadata["model"])), 0).to(device)
    weights = {
        n.removeprefix(_PREFIX): torch.from_numpy(a.copy())
        for n, a in tensors.items()
        if n.startswith(_PREFIX)
    }
    model.load_state_dict(weights)
    return ShadowModel(model, version, every)


def _committed(store: CheckpointStore, version: str) -> bytes:
    """The dense part of a version; damaged manifests are left out. Raises as `load_shadow_model`."""
    versions = []
    for name in store.list("manifests"):
        try:
            manifest = manifests.load(store, name).manifest
        except CheckpointError:
            continue
        if manifest.version == version:
            return manifests.read_file(store, manifest.dense)
        versions.append(manifest.version)
    raise ConfigError(
        f"expected shadow to name a committed version ({', '.join(sorted(versions)) or 'there is none'}), "
        f"got {version!r}"
    )
