"""Windows, slices and the frozen copy as gauges, from what a beat carries of them (`watch.quality_of`); so as bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.monitoring.cells import LIVE, SHADOW
from trainer.monitoring.windowed import SLICE_WINDOW

_OF_WINDOW = ("candidates", "base_rate", "ne", "ne_online", "auc", "calibration")
_OF_SLICE = ("candidates", "ne", "auc", "calibration")
MAX_TASKS_OF_SLICES = 2  # exported; a beat has more

QUALITY_LABELS: dict[str, str | tuple[str, ...]] = {
    **{f"window_{name}": ("window", "task") for name in _OF_WINDOW},
    **{f"slice_{name}": ("slice", "value", "task") for name in _OF_SLICE},
    **{f"shadow_{name}": ("of", "task") for name in _OF_SLICE},
    "shadow_version": "version",
}
"""Label of each gauge."""


def quality_gauges(quality: Mapping[str, Any]) -> dict[str, Any]:
    """Of slices and the copy: the last hour. `of`: "shadow", or "live" for the model on the same candidates."""
    windows = {
        (window, task): numbers
        for window, tasks in quality["windows"].items()
        for task, numbers in tasks.items()
    }
    slices = {
        (slice_, value, task): numbers
        for slice_, values in quality["slices"].items()
        for value, told in values.items()
        for task, numbers in list(told.get(SLICE_WINDOW, {}).items())[:MAX_TASKS_OF_SLICES]
    }
    shadow = quality["shadow"] or {}
    copies = {
        (name, task): numbers
        for name in (SHADOW, LIVE)
        for task, numbers in shadow.get(name, {}).get(SLICE_WINDOW, {}).items()
    }
    return {
        **{f"window_{name}": {key: numbers[name] for key, numbers in windows.items()} for name in _OF_WINDOW},
        **{f"slice_{name}": {key: numbers[name] for key, numbers in slices.items()} for name in _OF_SLICE},
        **{f"shadow_{name}": {key: numbers[name] for key, numbers in copies.items()} for name in _OF_SLICE},
        "shadow_version": {shadow["version"]: 1} if shadow else {},
    }
