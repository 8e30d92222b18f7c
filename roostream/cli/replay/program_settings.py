"""Settings of the programs that a replay runs, from its flags and `--set`; the same for both engines."""

from __future__ import annotations

import dataclasses
from typing import Any

from joiner.config import JoinerConfig
from joiner.rules import Rules
from roostream.cli.options import parse_overrides, toml_value
from roostream.errors import ConfigError
from roostream.replay.config import ReplayConfig
from roostream.schema.settings import from_dict
from roostream.schema.toml_file import SourceLocation
from trainer.config import LoopConfig
from trainer.selection.config import RehearsalConfig

_MODEL = "model."
_HAVE_FLAGS = {
    "joiner.window_ms": "--window",
    "joiner.lateness_ms": "--lateness",
    "joiner.early_close_ms": "--early-close",
    "worker.freeze_at_ms": "--freeze-weights-at",
    "worker.model": "--model",
    "worker.seed": "--seed",
    "worker.threads": "--threads",
    "controller.seed": "--seed",
    "shard.seed": "--seed",
}
_EXCLUDES_REHEARSAL = {
    "rehearsal",
    "corrections",
    "selection",
    "deferral",
    "staleness",
    "expand",
    "num_workers",
    "initial_workers",
}
"""If one of these is set, the dataset's default for `rehearsal` is not used, because not all combinations are
allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSettings:
    """Settings of each program that differ from its defaults; `model` holds keys of the model's TOML."""

    joiner: dict[str, Any]
    worker: dict[str, Any]
    model: dict[str, Any]
    others: dict[str, dict[str, Any]]


def program_settings(config: ReplayConfig) -> ProgramSettings:
    """Combine flags, `--set` and the dataset's defaults, and check them.

    Raises:
        ConfigError: an invalid assignment, an unknown key, a value out of range, a key that has a flag, or a
            key that the engine does not support.
    """
    model = [text.removeprefix(_MODEL) for text in config.set if text.startswith(_MODEL)]
    sets = parse_overrides(text for text in config.set if not text.startswith(_MODEL))
    for program, table in sets.items():
        for key in table:
            _check_key(config, f"{program}.{key}")
    worker: dict[str, Any] = {
        "seed": config.seed,
        "freeze_at_ms": config.freeze_weights_at_ms,
        "threads": config.threads,
    }
    worker |= {"corrections": "on"} if config.early_close_ms else {}
    worker |= {
        name: getattr(config, name) for name in ("batch_requests", "learning_rate") if getattr(config, name)
    }
    worker |= sets.pop("worker", {})
    if config.options.rehearsed_batches and not any(
        key in _EXCLUDES_REHEARSAL for key in (*worker, *sets.get("controller", ()))
    ):
        worker["rehearsal"] = RehearsalConfig(batches=config.options.rehearsed_batches)
    chosen = ProgramSettings(
        joiner=joiner_settings(config) | sets.pop("joiner", {}),
        worker=worker,
        model=_of_model(config, dict(map(_assignment, model))),
        others=sets,
    )
    for name, cls, table in (("joiner", JoinerConfig, chosen.joiner), ("worker", LoopConfig, chosen.worker)):
        known = {f.name for f in dataclasses.fields(cls)}
        given = {k: v for k, v in table.items() if k in known}
        from_dict(cls, {}, SourceLocation(prefix=f"{name}."), **given)
    return chosen


def _of_model(config: ReplayConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The dataset's defaults apply to the default ranker only."""
    return given if config.model or "kind" in given else {**config.options.ranker, **given}


def joiner_settings(config: ReplayConfig) -> dict[str, Any]:
    """Settings of the joiner with limits that are never reached, because results at a limit depend on the
    order of events."""
    limits = {
        "max_open_requests": 1 << 20,
        "max_requests": 1 << 20,
        "max_orphans": 1 << 20,
        "max_engagements": 1 << 20,
    }
    early = {"early_close_ms": config.early_close_ms} if config.early_close_ms else {}
    return {
        "window_ms": config.window_ms,
        "lateness_ms": config.lateness_ms,
        "replay": True,
        **early,
        **limits,
    }


def with_model_settings(base: Any, sets: dict[str, Any]) -> Any:
    """Change a model's configuration by `--set model.KEY=VALUE`.

    Raises:
        ConfigError: an unknown key or an invalid value.
    """
    given = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return from_dict(type(base), sets, SourceLocation(prefix=_MODEL), **given)


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name):
        raise ConfigError(f"--set: expected model.KEY=VALUE such as model.width=32, got {_MODEL + text!r}")
    return name, toml_value(value)


def _check_key(config: ReplayConfig, key: str) -> None:
    if key in _HAVE_FLAGS:
        raise ConfigError(f"--set {key}: use the flag {_HAVE_FLAGS[key]} instead")
    program, _, name = key.partition(".")
    here = {"joiner": Rules, "worker": LoopConfig}.get(program)
    known = {f.name for f in dataclasses.fields(here)} - {"exact"} if here else set()
    if config.engine == "local" and name not in known:
        raise ConfigError(
            f"--set {key}: --engine local has no such setting; use --engine stack, or remove it"
        )
