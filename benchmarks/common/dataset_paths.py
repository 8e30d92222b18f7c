"""Folders of evaluation data, beside the checkout or in BENCH_DATA; the data are not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(os.environ.get("BENCH_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
EBNERD, MIND = _FOLDER / "ebnerd_week1", _FOLDER / "mind"
CRITEO, KUAIRAND = _FOLDER / "criteo", _FOLDER / "kuairand_partial"


def absent(folder: Path) -> str:
    """Why a log can't be read here; "" = it can."""
    return "" if folder.is_dir() else "the evaluation data (../shared/data) are not on this machine"
