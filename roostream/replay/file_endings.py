"""What the name of an input file says about its content, in any case: `LOG.CSV.GZ` means `log.csv.gz`."""

from __future__ import annotations

from pathlib import PurePath

FORMS = {
    ".parquet": "parquet",
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
}
"""Ending of a name → form: `parquet`, `csv` (any separated text) or `jsonl`."""
_PACKED = (".gz", ".zst")


def packing_of(path: str) -> str:
    """`.gz`, `.zst`, or "" for a file that is not compressed."""
    ending = PurePath(path).suffix.lower()
    return ending if ending in _PACKED else ""


def ending_of(path: str) -> str:
    """The ending of a name without .gz and .zst, in lower case, such as `.csv`; "" if it has none."""
    while packing_of(path):
        path = path[: path.rindex(".")]
    return PurePath(path).suffix.lower()
