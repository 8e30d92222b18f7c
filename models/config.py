"""What a model looks like; kept in every manifest, so that serving builds the model that the trainer trained."""

from __future__ import annotations

import dataclasses

from roo.config import setting
from roo.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every kind of model has; a kind's own class adds its settings."""

    kind: str = setting("ranker", "which kind of model, a row of models/build.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig(ModelConfig):
    """All widths are numbers of float32; the defaults train in a few ms a batch on one core."""

    request_layers: tuple[int, ...] = setting((64, 32), "layers of the tower that runs once a request")
    history_attention: bool = setting(True, "each candidate attends to the request's sequences")
    history_width: int = setting(32, "width of that attention")
    history_heads: int = setting(2, "its heads")
    time_buckets: int = setting(64, "buckets of ln(seconds since the entry) / 0.301 in a sequence with a time column")
    cross_layers: int = setting(2, "DCNv2 layers; 0 = none")
    cross_rank: int = setting(32, "rank of a cross layer's matrix; 0 = full")
    width: int = setting(64, "width of a candidate after the interaction")
    list_layers: int = setting(1, "attention blocks over the candidates of a request; 0 = candidates don't see each other")
    list_heads: int = setting(4, "their heads")
    deep_layers: tuple[int, ...] = setting((64,), "layers shared by all tasks")
    task_layers: tuple[int, ...] = setting((32,), "layers of each task's own tower")
    prior: float = setting(0.1, "probability that an untrained model predicts")

    def __post_init__(self) -> None:
        for name in ("history_width", "history_heads", "time_buckets", "width", "list_heads"):
            _expect_range(name, getattr(self, name), 1, 4096)
        for name in ("cross_layers", "list_layers"):
            _expect_range(name, getattr(self, name), 0, 16)
        _expect_range("cross_rank", self.cross_rank, 0, 4096)
        for name in ("request_layers", "deep_layers", "task_layers"):
            for width in getattr(self, name):
                _expect_range(name, width, 1, 4096)
        for name, divisor in (("history_width", "history_heads"), ("width", "list_heads")):
            width, heads = getattr(self, name), getattr(self, divisor)
            if width % heads:
                raise ConfigError(f"{divisor}: expected a divisor of {name} = {width}, got {heads}; change one of them")
        if not 0 < self.prior < 1:
            raise ConfigError(f"prior: expected a probability between 0 and 1, got {self.prior}")


def _expect_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: expected {low}..{high}, got {value}")
