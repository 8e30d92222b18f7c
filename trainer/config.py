"""Settings of the trainer's two programs."""

from __future__ import annotations

import dataclasses

from roo.config import setting
from roo.errors import ConfigError, SetupError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What the training loop itself depends on; a replay in one process needs no more."""

    device: str = setting("cpu", "where the dense part runs: cpu | cuda | cuda:N")
    batch_requests: int = setting(64, "requests a batch")
    max_batch_wait_ms: int = setting(500, "a batch is cut short after this wait (not in exact mode)")
    seed: int = setting(0, "of initial weights; the shards' rows use the same")
    learning_rate: float = setting(2e-3, "Adam's, of the dense weights")
    dedupe_horizon_ms: int = setting(3_600_000, "a sample id is trained once within this much close time")
    exact: bool = setting(False, "bit-equal parameters whatever is killed: whole batches of one partition after the other")
    freeze_at_ms: int = setting(0, "requests from this event time on are scored, not trained; 0 = never")

    def __post_init__(self) -> None:
        for name, low, high in (("batch_requests", 1, 1 << 16), ("max_batch_wait_ms", 0, 3_600_000), ("learning_rate", 0, 10)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name}: expected {low}..{high}, got {getattr(self, name)}")
        if self.dedupe_horizon_ms < 0 or self.freeze_at_ms < 0:
            raise ConfigError(
                f"dedupe_horizon_ms, freeze_at_ms: expected 0 or more, got {self.dedupe_horizon_ms}, {self.freeze_at_ms}"
            )
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {self.device!r}")

    def check_device(self) -> None:
        """Raises SetupError: the device isn't there. Imports torch."""
        import torch

        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise SetupError(f'device: expected a CUDA device for {self.device!r}, this machine shows none; set device = "cpu"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig(LoopConfig):
    """`roostream worker --config FILE`."""

    bootstrap: str = setting(help="Kafka's host:port")
    prefix: str = setting("", "of topic names")
    schema: str = setting(help="path of the schema TOML")
    model: str = setting("", "path of the model TOML; empty = defaults")
    store: str = setting(help="directory of the checkpoint store")
    controller: str = setting(help="the controller's host:port")
    shards: tuple[str, ...] = setting(help="host:port of shards 0..N-1, in order")
    index: int = setting(0, "which worker this is, from 0")
    caught_up_lag_ms: int = setting(5000, "event-time lag below which training counts as live")
    controller_timeout_ms: int = setting(30_000, "without the controller for this long training stops: 3 x commit_interval_ms")
    metrics_port: int = setting(0, "of /metrics; 0 = draw")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shards:
            raise ConfigError("shards: expected at least one host:port, got none")
        if self.index < 0:
            raise ConfigError(f"index: expected 0 or more, got {self.index}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """`roostream controller --config FILE`."""

    listen: str = setting(help="host:port to serve on; port 0 = draw")
    store: str = setting(help="directory of the checkpoint store")
    num_shards: int = setting(help="parameter server shards")
    num_workers: int = setting(1, "trainer workers")
    commit_interval_ms: int = setting(10_000, "between commits")
    bootstrap: str = setting(help="Kafka's host:port")
    prefix: str = setting("", "of topic names")
    schema: str = setting(help="path of the schema TOML")
    seed: int = setting(0, "of initial weights and rows; workers and shards use the same")
    metrics_port: int = setting(0, "of /metrics; 0 = draw")

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"num_shards: expected 1 or more, got {self.num_shards}")
        if self.num_workers != 1:
            raise ConfigError(
                f"num_workers: expected 1, got {self.num_workers}; this version does not reduce dense gradients between workers"
            )
        if self.commit_interval_ms < 100:
            raise ConfigError(f"commit_interval_ms: expected 100 or more, got {self.commit_interval_ms}")
