"""From a schema, a configuration and a seed to a model: the same bits in the trainer and in serving.

A kind of model is a module with its configuration and its `Model`, and a row of KINDS; or a user's own (models/own).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roostream.errors import ConfigError, nearest
from roostream.models.config import (
    CascadeConfig,
    CustomModelConfig,
    HstuConfig,
    ModelConfig,
    RankerConfig,
    TwoTowerConfig,
)
from roostream.models.custom.loading import (
    CustomCode,
    CustomModel,
    is_custom,
    load_custom_code,
    loaded_code,
    telling,
)
from roostream.models.layers import init_parameters
from roostream.models.model import Model
from roostream.models.ranker import Ranker
from roostream.models.two_tower.cascade import Cascade
from roostream.models.two_tower.early_ranker import EarlyRanker
from roostream.models.two_tower.retrieval import Retrieval
from roostream.schema.schema import Schema
from roostream.schema.settings import from_dict, load
from roostream.schema.toml_file import NO_LOCATION, SourceLocation, TomlFile, read_toml


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """How the models of a kind are configured and made."""

    config: type[ModelConfig]
    build: Callable[[Schema, Any], Model]  # the second is a `config`


def _two_tower(schema: Schema, config: TwoTowerConfig) -> Model:
    return Retrieval(schema, config) if config.stage == "retrieval" else EarlyRanker(schema, config)


KINDS = {
    "ranker": ModelKind(RankerConfig, Ranker),
    "hstu": ModelKind(HstuConfig, Ranker),
    "two_tower": ModelKind(TwoTowerConfig, _two_tower),
    "cascade": ModelKind(CascadeConfig, Cascade),
}


def build_model(schema: Schema, config: ModelConfig, seed: int, *, is_loaded: bool = False) -> Model:
    """A model whose parameters are a function of the arguments; the global random state is left as it was.
    `is_loaded`: all of them are about to be loaded, and those of our models are nothing in particular until then.

    Raises:
        SchemaError: the schema declares no feature.
        ConfigError: a user's own code failed, or isn't there; names its file and line.
    """
    if isinstance(config, CustomModelConfig):
        return _build_own(loaded_code({"kind": config.kind, "code": config.code}), schema, config, seed)
    with torch.random.fork_rng(devices=[]):
        model = KINDS[config.kind].build(schema, config)
    if not is_loaded:
        init_parameters(model, seed)
    return model


def _build_own(code: CustomCode, schema: Schema, config: CustomModelConfig, seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        model = CustomModel(code, schema, config)
        with telling(code, "adjust_initial_parameters"):
            init_parameters(model, seed)
    return model


def load_model_config(path: str = "") -> ModelConfig:
    """The TOML at `path`; a ranker with its defaults if it is empty. A user's own code is loaded, a file from the TOML's folder.

    Raises:
        ConfigError: names key, value, file and line.
    """
    if not path:
        return RankerConfig()
    file = read_toml(path)
    if is_custom(file.raw.get("kind")):
        return custom_model_config(file, Path(path).parent)
    return load(_kind_of(file.raw, file.location).config, file)


def load_model_config_or_code(file: str) -> ModelConfig:
    """Of a TOML, or of a user's own code with its defaults: `FILE.py`, whose function is called `build`, `FILE.py:FUNCTION` or
    `PACKAGE.MODULE:FUNCTION`.

    Raises:
        ConfigError: as `load_model_config`.
    """
    kind = f"{file}:build" if file.endswith(".py") else file
    if not is_custom(kind) or kind.endswith(".toml"):
        return load_model_config(file)
    return custom_model_config(TomlFile({"kind": kind}, NO_LOCATION), Path())


def custom_model_config(file: TomlFile, folder: Path) -> CustomModelConfig:
    """Settings of a user's own model: `kind` as a manifest names it, `code` filled in.

    Raises:
        ConfigError: as `load_model_config`.
    """
    try:
        code = load_custom_code(file.raw["kind"], folder, str(file.raw.get("code", "")))
    except ConfigError as error:
        raise ConfigError(f"{file.location.describe('kind')}{error}") from None
    return load(code.config, TomlFile({**file.raw, "kind": code.kind, "code": code.digest}, file.location))


def model_config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """What `dataclasses.asdict` gave, as a manifest keeps it; one without `kind` is a ranker's.

    Raises:
        ConfigError: a key or value that this version does not know, or a user's own code that this process wasn't given.
    """
    config = loaded_code(raw).config if is_custom(raw.get("kind")) else _kind_of(raw).config
    return from_dict(config, raw)


def _kind_of(raw: Mapping[str, Any], location: SourceLocation = NO_LOCATION) -> ModelKind:
    name = raw.get("kind", "ranker")
    if name not in KINDS:
        near = nearest(str(name), KINDS)
        raise ConfigError(
            f"{location.describe('kind')}key 'kind': expected one of {', '.join(KINDS)}, got {name!r}{near}"
        )
    return KINDS[name]
