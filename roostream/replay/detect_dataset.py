"""Find the dataset (roostream/replay/datasets.py) that can read some files, from their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roostream.errors import ConfigError
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import load_dataset
from roostream.replay.file_endings import FORMS, ending_of


def detect_replay(
    paths: Sequence[str], schema: str = "", *, engagements: Sequence[str] = (), skip_bad: bool = False
) -> ReplayConfig:
    """Settings of a local replay of `paths`: files of one format, or the folder (or behaviors.parquet) of
    EB-NeRD. `engagements`: of tables, the files with engagements, in the same format. `skip_bad`: skip and
    count lines that cannot be used; False: the first one ends the replay.

    Raises:
        ConfigError: a file does not exist, the format is unknown, or a schema is required.
    """
    if not paths:
        text = "expected log files that end in .jsonl, .parquet or .csv, or a folder with behaviors.parquet"
        raise ConfigError(text)
    first = Path(paths[0])
    if len(paths) == 1 and first.is_dir():
        return _ebnerd(first, schema)
    if len(paths) == 1 and first.name == "behaviors.parquet":
        return _ebnerd(first.parent, schema)
    files = [*paths, *engagements]
    forms = {FORMS.get(ending_of(path), "") for path in files}
    if len(forms) != 1 or not (form := forms.pop()):
        raise ConfigError(
            f"{', '.join(files)}: expected files that all end in .jsonl, all in .parquet or all in .csv "
            "(or .gz, .zst of these), or a folder with behaviors.parquet"
        )
    paths_setting = "log" if form == "jsonl" else "impressions"
    settings: dict[str, Any] = {paths_setting: tuple(paths), "skip_bad": skip_bad}
    if form != "jsonl":
        settings["engagements"] = tuple(engagements)
    elif engagements:
        raise ConfigError("--engagements: expected tables; lines of JSON hold engagements and impressions")
    return ReplayConfig(
        dataset=form, options=load_dataset(form).Options(**settings), schema=schema, engine="local"
    )


def input_paths(replay: ReplayConfig) -> list[str]:
    """The input files of a replay, in a fixed order."""
    named = (
        vars(replay.options).get(name, ())
        for name in ("log", "impressions", "engagements", "behaviors", "history")
    )
    return [path for paths in named for path in paths]


def _ebnerd(folder: Path, schema: str) -> ReplayConfig:
    behaviors, history = folder / "behaviors.parquet", folder / "history.parquet"
    if not behaviors.is_file():
        text = f"{folder}: expected a folder with behaviors.parquet (EB-NeRD), got another; name the files"
        raise ConfigError(text)
    settings: dict[str, Any] = {"behaviors": (str(behaviors),)}
    settings |= {"history": (str(history),)} if history.is_file() else {}
    return ReplayConfig(
        dataset="ebnerd", options=load_dataset("ebnerd").Options(**settings), schema=schema, engine="local"
    )
