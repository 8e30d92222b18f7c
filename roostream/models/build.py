"""Build a model from a schema, a configuration and a seed: the same bits in the trainer and in serving.

A kind of model is a row of KINDS with its configuration and `Model` class, or a custom model (models/custom).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roostream.errors import ConfigError, nearest, needs_extra
from roostream.models.config import (
    CascadeConfig,
    CustomModelConfig,
    DcnConfig,
    DlrmConfig,
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
    user_errors_as_config_errors,
)
from roostream.models.layers import init_parameters
from roostream.models.model import Model
from roostream.models.ranker import Ranker
from roostream.models.two_tower.models import Cascade, EarlyRanker, Retrieval
from roostream.schema.schema import Schema
from roostream.schema.settings import from_dict, load
from roostream.schema.toml_file import NO_LOCATION, SourceLocation, TomlFile, read_toml


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """How models of a kind are configured and built."""

    config: type[ModelConfig]
    build: Callable[[Schema, Any], Model]  # the second is a `config`


ADDED_PARTS = ("first_order", "linear", "linear_knots", "scale_rates")
"""Settings of parts that rankers got later. Manifests of before lack them and mean false."""


def _two_tower(schema: Schema, config: TwoTowerConfig) -> Model:
    return Retrieval(schema, config) if config.stage == "retrieval" else EarlyRanker(schema, config)


def _dlrm(schema: Schema, config: DlrmConfig) -> Model:
    with needs_extra(f"kind = {config.kind!r} in worker and serving", "torchrec"):
        from roostream.models.dlrm import Dlrm  # imports TorchRec: seconds and 200 MiB
    return Dlrm(schema, config)


KINDS = {
    "ranker": ModelKind(RankerConfig, Ranker),
    "hstu": ModelKind(HstuConfig, Ranker),
    "two_tower": ModelKind(TwoTowerConfig, _two_tower),
    "cascade": ModelKind(CascadeConfig, Cascade),
    "dlrm": ModelKind(DlrmConfig, _dlrm),
    "dcn": ModelKind(DcnConfig, _dlrm),
}


def build_model(schema: Schema, config: ModelConfig, seed: int, *, is_loaded: bool = False) -> Model:
    """Build a model whose parameters depend only on the arguments. The global random state does not change.

    `is_loaded`: all parameters will be loaded, so they are not initialized.

    Raises:
        SchemaError: the schema declares no feature that the kind needs.
        ConfigError: a custom model failed, or its code is missing; names file and line. Or TorchRec is not
            installed.
    """
    if isinstance(config, CustomModelConfig):
        return _build_custom(loaded_code({"kind": config.kind, "code": config.code}), schema, config, seed)
    with torch.random.fork_rng(devices=[]):
        model = KINDS[config.kind].build(schema, config)
    if not is_loaded:
        init_parameters(model, seed)
    return model


def _build_custom(code: CustomCode, schema: Schema, config: CustomModelConfig, seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        model = CustomModel(code, schema, config)
        with user_errors_as_config_errors(code, "adjust_initial_parameters"):
            init_parameters(model, seed)
    return model


def load_model_config(path: str = "") -> ModelConfig:
    """Read the TOML at `path`; the default ranker if it is empty. Custom code is loaded relative to the
    TOML's folder.

    Raises:
        ConfigError: names key, value, file and line.
    """
    if not path:
        return RankerConfig()
    if path.endswith(".py"):
        name = Path(path).name
        raise ConfigError(f"{path}: expected a TOML, got Python; write one beside it: kind = '{name}:build'")
    file = read_toml(path)
    if is_custom(file.raw.get("kind")):
        return custom_model_config(file, Path(path).parent)
    return load(_kind_of(file.raw, file.location).config, file)


def load_model_config_or_code(file: str) -> ModelConfig:
    """Read a TOML, or custom code with its default settings: `FILE.py` (function `build`), `FILE.py:FUNCTION`
    or `PACKAGE.MODULE:FUNCTION`.

    Raises:
        ConfigError: as `load_model_config`.
    """
    kind = f"{file}:build" if file.endswith(".py") else file
    if not is_custom(kind) or kind.endswith(".toml"):
        return load_model_config(file)
    return custom_model_config(TomlFile({"kind": kind}, NO_LOCATION), Path())


def custom_model_config(file: TomlFile, folder: Path) -> CustomModelConfig:
    """Settings of a custom model, with `kind` as in manifests and `code` filled in.

    Raises:
        ConfigError: as `load_model_config`.
    """
    try:
        raw = dict(file.raw)
        code = load_custom_code(raw["kind"], folder, str(raw.get("code", "")), raw.pop("replaces", ()))
    except ConfigError as error:
        raise ConfigError(f"{file.location.describe('kind')}{error}") from None
    if code.config is CustomModelConfig and (settings := sorted(raw.keys() - {"kind", "code"})):
        raise ConfigError(
            f"{file.location.describe(settings[0])}key {settings[0]!r}: expected a class Config with this "
            f"field in {code.files[0]}, got no such class; call the class of the model's settings Config"
        )
    with user_errors_as_config_errors(code, "Config"):
        config = load(code.config, TomlFile({**raw, "kind": code.kind, "code": code.digest}, file.location))
        json.dumps(dataclasses.asdict(config), allow_nan=False)  # as manifests store it, and NaN != NaN
    return config


def model_config_from_dict(raw: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `dataclasses.asdict`, for manifests; without `kind` it is a ranker, without
    the settings in ADDED_PARTS one without these parts. Of custom code that was replaced, `code` is that of
    the code that replaces it.

    Raises:
        ConfigError: an unknown key or value, or custom code that this process was not given.
    """
    if is_custom(raw.get("kind")):
        code = loaded_code(raw)
        return from_dict(code.config, {**raw, "code": code.digest})
    config = _kind_of(raw).config
    before = dict.fromkeys(ADDED_PARTS, False) if issubclass(config, RankerConfig | DlrmConfig) else {}
    return from_dict(config, {**before, **raw})


def _kind_of(raw: Mapping[str, Any], location: SourceLocation = NO_LOCATION) -> ModelKind:
    name = raw.get("kind", "ranker")
    if not isinstance(name, str) or name not in KINDS:
        near = nearest(str(name), KINDS)
        raise ConfigError(
            f"{location.describe('kind')}key 'kind': expected one of {', '.join(KINDS)}, or "
            f"FILE.py:FUNCTION, got {name!r}{near}"
        )
    return KINDS[name]
