"""What a stack was made with, kept in its home, so that `up --home` goes on with the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from infra.options import StackOptions
from infra.programs import plain
from roostream.errors import ConfigError
from roostream.schema.settings import from_dict

FILE = "options.json"
_KEPT = (
    "schema",
    "prefix",
    "replay",
    "num_shards",
    "num_workers",
    "serving_processes",
    "num_task_managers",
    "partitions",
    "buckets",
    "seed",
    "overrides",
)


def keep(home: Path, options: StackOptions) -> None:
    """Raises OSError: it can't be written."""
    table = {name: plain(getattr(options, name)) for name in _KEPT}
    (home / FILE).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def kept(home: Path) -> StackOptions | None:
    """None where nothing was kept.

    Raises:
        ConfigError: the file can't be used.
    """
    file = home / FILE
    if not file.is_file():
        return None
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        overrides = raw.pop("overrides")
        found = from_dict(StackOptions, raw)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ConfigError) as error:
        raise ConfigError(f"{file}: can't be used ({error}); delete it and give `up` its options") from None
    return dataclasses.replace(found, overrides=overrides)
