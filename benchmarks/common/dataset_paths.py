"""Folders of evaluation data beside the checkout; the data are not part of the project."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data"
EBNERD, MIND = _FOLDER / "ebnerd_week1", _FOLDER / "mind"
CRITEO = _FOLDER / "criteo"


def absent(folder: Path) -> str:
    """Why a log can't be read here; "" = it can."""
    return "" if folder.is_dir() else "the evaluation data (../shared/data) are not on this machine"
