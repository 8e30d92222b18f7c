"""Whether there is a CUDA device, told without importing torch: what a question skips where there is none."""

from __future__ import annotations

from pathlib import Path

ABSENT = "this machine shows no CUDA device"


def no_device(nodes: Path = Path("/dev")) -> str:
    """Why rows on a device can't be asked here; "" = they can, by the driver's device nodes. Those of a device that torch then
    can't use end in torch's own words."""
    return "" if any(nodes.glob("nvidia[0-9]*")) or (nodes / "dxg").exists() else ABSENT
