"""Settings of simulated traffic and of replays."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Literal

from roo.config import Refusal, Settings, refusal, setting
from roo.errors import ConfigError
from runtime.deployment import Watched


def parse_time_ms(text: str) -> int:
    """`"2023-05-23"`, `"2023-05-23T12:00:00"` (naive = UTC), one with an offset, or ms since 1970 → ms; `""` → 0.

    Raises:
        ConfigError: none of these.
    """
    if not text:
        return 0
    if text.lstrip("-").isdigit():
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"expected a time such as '2023-05-23', '2023-05-23T12:00:00' (UTC) or ms since 1970, got {text!r}"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round(moment.timestamp() * 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig(Watched):
    """`roostream simulate`: users over HTTP against serving."""

    serving: str = setting("http://127.0.0.1:8080", "where serving answers")
    rate: float = setting(25.0, "requests a second", least=0.01, most=10_000)
    users: int = setting(500, "simulated users", least=1, most=10_000_000)
    items: int = setting(300, "items alive at a time", least=2, most=1_000_000)
    item_life_ms: int = setting(1_800_000, "mean life of an item; a new one takes its place", least=1000, most=1 << 50)
    candidates: int = setting(20, "candidates a request, on average", least=2, most=500)
    seed: int = setting(0, "the hidden world is a function of it")
    seconds: float = setting(0.0, "stop after this long; 0 = run until stopped", least=0, most=1e9)
    max_in_flight: int = setting(
        64, "requests waiting for serving at once; arrivals beyond are dropped and counted", least=1, most=10_000
    )
    report: str = setting("", "file that gets the JSON report, every 10 s and at the end; '' = none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.serving.startswith(("http://", "https://")):
            raise refusal("serving", "http://host:port", self.serving)
        if self.items < self.candidates:
            raise refusal("items", f"at least candidates = {self.candidates}", self.items, "raise items")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(Settings):
    """`roostream replay DATASET`: a log through the whole loop, in event time."""

    dataset: Literal["ebnerd", "jsonl"] = setting(help="ebnerd | jsonl")
    behaviors: tuple[str, ...] = setting((), "ebnerd: behaviors.parquet files")
    history: tuple[str, ...] = setting((), "ebnerd: history.parquet files")
    log: tuple[str, ...] = setting((), "jsonl: log files, one impression or engagement a line")
    schema: str = setting("", "schema TOML; '' = the dataset's own (traffic/schemas/ebnerd.toml)")
    model: str = setting("", "model TOML; '' = defaults")
    engine: Literal["stack", "local"] = setting("stack", "stack = Kafka, Flink and processes; local = all in this process")
    speed: str = setting("max", "'max', or a multiple of event time such as '60x'")
    measure_from: str = setting("", "metrics.measured covers requests from this time on; '' = all")
    freeze_at: str = setting("", "requests from this time on are scored only: weights and counters stand still; '' = never")
    freeze_weights_at: str = setting("", "the same for weights only: counters go on")
    label_delay_ms: int = setting(0, "counters see every event this much later than it happened", least=0)
    window_ms: int = setting(1_800_000, "the join window", least=1000)
    lateness_ms: int = setting(2000, "the joiner's bound on disorder", least=0)
    batch_requests: int = setting(64, "requests a training batch", least=1)
    seed: int = setting(0, "of initial weights and rows")
    num_shards: int = setting(2, "parameter server shards", least=1)
    skip_bad: bool = setting(False, "jsonl: count bad lines and go on instead of stopping at the first")
    report: str = setting("", "file that gets the JSON report; '' = only the table")
    home: str = setting("", "stack: directory to keep; '' = a temporary one, removed at the end")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_files()
        if self.freeze_at and self.freeze_weights_at:
            raise ConfigError("expected freeze_at or freeze_weights_at, got both; freeze_at freezes the weights too")
        for name in ("measure_from", "freeze_at", "freeze_weights_at"):
            self._time_ms(name)
        _ = self.speed_factor

    def _check_files(self) -> None:
        needed, alien = (("behaviors", "history"), ("log",)) if self.dataset == "ebnerd" else (("log",), ("behaviors", "history"))
        for name in needed[:1]:
            if not getattr(self, name):
                raise ConfigError(f"replay {self.dataset} needs --{name} FILE…; give at least one")
        for name in alien:
            if getattr(self, name):
                raise ConfigError(f"replay {self.dataset} takes no --{name}; it is for the other dataset kind")
        if self.dataset == "jsonl" and not self.schema:
            raise ConfigError(
                "replay jsonl needs --schema FILE: the TOML that declares the log's features (docs/bring-your-own-data.md)"
            )
        for path in (*self.behaviors, *self.history, *self.log, *filter(None, (self.schema, self.model))):
            if not Path(path).is_file():
                raise ConfigError(f"{path}: no such file; check the path")

    def _time_ms(self, name: str) -> int:
        try:
            return parse_time_ms(getattr(self, name))
        except ConfigError as error:
            raise Refusal(name, str(error)) from None

    @property
    def measure_from_ms(self) -> int:
        return self._time_ms("measure_from")

    @property
    def freeze_counters_at_ms(self) -> int:
        """0 = never."""
        return self._time_ms("freeze_at")

    @property
    def freeze_weights_at_ms(self) -> int:
        """0 = never."""
        return self._time_ms("freeze_at") or self._time_ms("freeze_weights_at")

    @property
    def speed_factor(self) -> float:
        """Event time per wall time; 0 = as fast as it goes."""
        if self.speed == "max":
            return 0.0
        try:
            factor = float(self.speed.removesuffix("x"))
        except ValueError:
            factor = 0.0
        if not 0 < factor < 1e9:
            raise refusal("speed", "'max' or a multiple such as '60x'", self.speed)
        return factor

    @property
    def schema_path(self) -> Path:
        return Path(self.schema) if self.schema else Path(__file__).parent / "schemas" / "ebnerd.toml"
