"""Settings of `roostream next-item`; the defaults are those of the published comparison (Zhai et al. 2024,
§4.1.1)."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from roostream.schema.settings import MAX_SEED, Settings, setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextItemConfig(Settings):
    """Flags of the command."""

    data: str = setting(help="folder with MovieLens-1M")
    model: Literal["hstu", "sasrec"] = setting("hstu", "encoder of histories")
    epochs: int = setting(100, "passes over all users", ge=1, le=10_000)
    evaluate_every: int = setting(
        5, "epochs between two evaluations; the last epoch is always evaluated", ge=1
    )
    seed: int = setting(0, "seed of initial weights, order, negatives and dropout", ge=0, le=MAX_SEED)
    report: str = setting("", "file for the JSON report")
    layers: int = setting(2, "layers of the encoder", ge=1, le=64)
    heads: int = setting(1, "heads of each layer, a divisor of width", ge=1, le=4096)
    width: int = setting(50, "width of item vectors and layers", ge=1, le=4096)
    max_length: int = setting(200, "newest entries of a history that are used", ge=1, le=1 << 16)
    dropout: float = setting(0.2, "dropout of tokens and of the output of each layer", ge=0, lt=1)
    batch_users: int = setting(128, "users per step", ge=1)
    learning_rate: float = setting(1e-3, "learning rate of Adam with betas 0.9 and 0.98", gt=0)
    negatives: int = setting(128, "items drawn uniformly from the corpus for each entry", ge=1, le=1 << 16)
    temperature: float = setting(0.05, "divisor of the dot products of unit vectors", gt=0)
    corrected: bool = setting(
        False,
        "correct the loss for sampling, so that negatives represent all items; not in the published loss",
    )
    device: str = setting("cpu", "device: cpu | cuda | cuda:N")
    threads: int = setting(1, "torch threads on a CPU", ge=1, le=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise setting_error("device", "cpu, cuda or cuda:N", self.device)
        if self.width % self.heads:
            raise setting_error(
                "heads", f"a divisor of width = {self.width}", self.heads, "change one of them"
            )
