"""Settings of simulated traffic and of replays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from roostream.errors import ConfigError
from roostream.replay.datasets import DatasetOptions, load_dataset
from roostream.replay.parse_time import parse_time_ms
from roostream.runtime.deployment import ProgramSettings
from roostream.schema.settings import MAX_SEED, SettingError, Settings, setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig(ProgramSettings):
    """`roostream simulate`: users over HTTP against serving."""

    serving: str = setting("http://127.0.0.1:8080", "where serving answers")
    rate: float = setting(25.0, "requests a second", ge=0.01, le=10_000)
    users: int = setting(500, "simulated users", ge=1, le=10_000_000)
    items: int = setting(300, "items alive at a time", ge=2, le=1_000_000)
    item_life_ms: int = setting(
        1_800_000, "mean life of an item; a new one takes its place", ge=1000, le=1 << 50
    )
    candidates: int = setting(20, "candidates a request, on average", ge=2, le=500)
    seed: int = setting(0, "the hidden world is a function of it", ge=0, le=MAX_SEED)
    seconds: float = setting(0.0, "stop after this long; 0 = run until stopped", ge=0, le=1e9)
    max_in_flight: int = setting(
        64,
        "requests waiting for serving at once; arrivals beyond are dropped and counted",
        ge=1,
        le=10_000,
    )
    report: str = setting("", "file that gets the JSON report, every 10 s and at the end; '' = none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.serving.startswith(("http://", "https://")):
            raise setting_error("serving", "http://host:port", self.serving)
        if self.items < self.candidates:
            raise setting_error(
                "items", f"at least candidates = {self.candidates}", self.items, "raise items"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(Settings):
    """`roostream replay DATASET`: a log through the whole loop, in event time."""

    dataset: str = setting(help="a row of roostream/replay/datasets.py")
    options: DatasetOptions = setting(help="the dataset's own settings")
    schema: str = setting("", "schema TOML; '' = the dataset's own")
    model: str = setting("", "model TOML; '' = the default ranker")
    engine: Literal["stack", "local"] = setting(
        "stack", "stack = Kafka, Flink and processes; local = all in this process"
    )
    speed: str = setting("max", "'max', or a multiple of event time such as '60x'")
    measure_from: str = setting("", "metrics.measured covers requests from this time on; '' = all")
    freeze_at: str = setting(
        "", "requests from this time on are scored only: weights and counters stand still; '' = never"
    )
    freeze_weights_at: str = setting("", "the same for weights only: counters go on")
    archived_until: str = setting(
        "",
        "stack: what comes before is archived, a fresh model is trained from that, then the rest comes live; '' = all does",
    )
    label_delay_ms: int = setting(0, "counters see every event this much later than it happened", ge=0)
    engagement_delay_ms: int = setting(
        0, "actions come later than the log says, by this much on average; 0 = they don't", ge=0
    )
    window_ms: int = setting(1_800_000, "the join window", ge=1000)
    early_close_ms: int = setting(
        0,
        "requests are trained so long after their time, and put right by corrections to the window's end; 0 = off",
        ge=0,
    )
    as_served: bool = setting(
        False, "local: also score every request at its own time, by the weights of then"
    )
    lateness_ms: int = setting(2000, "the joiner's bound on disorder", ge=0)
    batch_requests: int = setting(0, "requests a training batch; 0 = the trainer's own", ge=0)
    learning_rate: float = setting(0.0, "Adam's, of the dense weights; 0 = the trainer's own", ge=0, le=10)
    set: tuple[str, ...] = setting(
        (), "any other setting of what runs: joiner.KEY=VALUE, worker.KEY=VALUE, model.KEY=VALUE, …"
    )
    threads: int = setting(1, "of torch in training", ge=1, le=256)
    seed: int = setting(0, "of initial weights and rows", ge=0, le=MAX_SEED)
    num_shards: int = setting(2, "parameter server shards", ge=1)
    report: str = setting(
        "", "F.json, or a folder that gets report.json and report.html; '' = only the table"
    )
    home: str = setting(
        "", "stack: directory to keep, for `up --home`; '' = a temporary one, removed at the end"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schema and self.options.default_schema is None:
            raise ConfigError(
                f"replay {self.dataset} needs --schema FILE: the TOML that declares the log's features "
                "(docs/bring-your-own-data.md)"
            )
        for path in filter(None, (self.schema, self.model)):
            if not Path(path).is_file():
                raise ConfigError(f"{path}: no such file; check the path")
        if self.home and self.engine != "stack":
            raise setting_error(
                "home",
                "--engine stack, which alone keeps what it learns",
                self.home,
                "change the engine or leave it out",
            )
        if self.as_served and self.engine != "local":
            raise setting_error(
                "as_served",
                "--engine local, which alone knows when what was trained",
                True,
                "change the engine",
            )
        if self.freeze_at and self.freeze_weights_at:
            raise ConfigError(
                "expected freeze_at or freeze_weights_at, got both; freeze_at freezes the weights too"
            )
        if self.archived_until and self.engine != "stack":
            raise setting_error(
                "archived_until",
                "--engine stack, which alone archives",
                self.archived_until,
                "change the engine",
            )
        for name in ("measure_from", "freeze_at", "freeze_weights_at", "archived_until"):
            self._time_ms(name)
        _ = self.speed_factor

    def _time_ms(self, name: str) -> int:
        text = getattr(self, name)
        try:
            return parse_time_ms(text) if text else 0
        except ValueError as error:
            raise SettingError(name, str(error)) from None

    @property
    def measure_from_ms(self) -> int:
        return self._time_ms("measure_from")

    @property
    def archived_until_ms(self) -> int:
        """0 = nothing is."""
        return self._time_ms("archived_until")

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
            raise setting_error("speed", "'max' or a multiple such as '60x'", self.speed)
        return factor

    @property
    def schema_path(self) -> Path:
        path = self.schema or self.options.default_schema
        assert path, "checked when made"
        return Path(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig(Settings):
    """`roostream check`: what a replay would be told, without training."""

    schema: str = setting(help="schema TOML")
    log: tuple[str, ...] = setting((), "JSON lines, as of `replay jsonl`")
    impressions: tuple[str, ...] = setting(
        (), "or tables (.parquet or .csv, packed or not), as of `replay parquet` and `replay csv`"
    )
    engagements: tuple[str, ...] = setting((), "tables of engagements")
    ignore: tuple[str, ...] = setting((), "columns of tables to be left out")
    window_ms: int = setting(1_800_000, "the join window", ge=1000)
    lateness_ms: int = setting(2000, "the joiner's bound on disorder", ge=0)
    label_delay_ms: int = setting(0, "counters see every event this much later than it happened", ge=0)
    report: str = setting("", "file that gets the JSON report; '' = only the table")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.log) == bool(self.impressions):
            raise ConfigError(
                "expected --log FILES, or --impressions FILES with --engagements FILES; give one of the two"
            )
        self.replay()

    def replay(self) -> ReplayConfig:
        """The replay that would be made of it, bad lines left out and counted.

        Raises:
            ConfigError: a file isn't there, or it can't be told which form it has.
        """
        dataset, names = (
            ("jsonl", ("log",)) if self.log else (self._form(), ("impressions", "engagements", "ignore"))
        )
        settings: dict[str, Any] = {"skip_bad": True, **{name: getattr(self, name) for name in names}}
        return ReplayConfig(
            dataset=dataset,
            options=load_dataset(dataset).Options(**settings),
            schema=self.schema,
            engine="local",
            window_ms=self.window_ms,
            lateness_ms=self.lateness_ms,
            label_delay_ms=self.label_delay_ms,
        )

    def _form(self) -> str:
        forms = {
            Path(path.removesuffix(".gz").removesuffix(".zst")).suffix
            for path in (*self.impressions, *self.engagements)
        }
        if len(forms) != 1 or not forms <= {".parquet", ".csv"}:
            raise setting_error(
                "impressions",
                "files that all end in .parquet, or all in .csv (or .gz, .zst of these)",
                sorted(forms),
            )
        return forms.pop().removeprefix(".")
