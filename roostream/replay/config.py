"""Settings of `roostream simulate`, `roostream replay` and `roostream check`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from roostream.errors import ConfigError
from roostream.replay.datasets import DatasetOptions, load_dataset
from roostream.replay.file_endings import FORMS, ending_of
from roostream.replay.parse_time import parse_time_ms
from roostream.runtime.deployment import ProgramSettings
from roostream.schema.settings import MAX_SEED, SettingError, Settings, setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig(ProgramSettings):
    """Settings of `roostream simulate`, which sends requests of simulated users to serving."""

    serving: str = setting("http://127.0.0.1:8080", "URL of serving")
    key_file: str = setting("", "file with the API key that serving requires; '' = none")
    rate: float = setting(25.0, "requests per second", ge=0.01, le=10_000)
    users: int = setting(500, "simulated users", ge=1, le=10_000_000)
    items: int = setting(300, "items alive at a time", ge=2, le=1_000_000)
    item_life_ms: int = setting(
        1_800_000, "mean life of an item, which a new one then replaces", ge=1000, le=1 << 50
    )
    candidates: int = setting(20, "mean number of candidates of a request", ge=2, le=500)
    seed: int = setting(0, "seed of the hidden model of users and items", ge=0, le=MAX_SEED)
    seconds: float = setting(0.0, "stop after this many seconds; 0 = run until stopped", ge=0, le=1e9)
    max_in_flight: int = setting(
        64,
        "maximum number of requests that wait for serving; further arrivals are dropped and counted",
        ge=1,
        le=10_000,
    )
    report: str = setting("", "file for the JSON report, written every 10 s and at the end; '' = none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.serving.startswith(("http://", "https://")):
            raise setting_error("serving", "http://host:port", self.serving)
        if self.items < self.candidates:
            text = f"at least candidates = {self.candidates}"
            raise setting_error("items", text, self.items, "raise items")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(Settings):
    """Settings of `roostream replay DATASET`, which sends a log through the whole loop in event time."""

    dataset: str = setting(help="name of a dataset in roostream/replay/datasets.py")
    options: DatasetOptions = setting(help="settings of this dataset")
    schema: str = setting("", "schema TOML; '' = the dataset's own")
    model: tuple[str, ...] = setting(
        (), "model TOML; several (local only) learn from the same samples in one pass and are compared"
    )
    engine: Literal["stack", "local"] = setting(
        "stack", "stack = Kafka, Flink and processes; local = all in this process"
    )
    speed: str = setting("max", "'max', or a multiple of event time such as '60x'")
    measure_from: str = setting("", "metrics.measured covers requests from this time on; '' = all")
    freeze_at: str = setting(
        "", "from this time on requests are only scored: weights and counters no longer change; '' = never"
    )
    freeze_weights_at: str = setting("", "from this time on weights no longer change; '' = never")
    archived_until: str = setting(
        "",
        "stack: archive the log before this time, train a new model from the archive, then send "
        "the rest; '' = off",
    )
    label_delay_ms: int = setting(
        0, "delay after which an engagement changes the online counters; requests change them at once", ge=0
    )
    engagement_delay_ms: int = setting(0, "mean delay added to the engagements of the log; 0 = none", ge=0)
    window_ms: int = setting(1_800_000, "the join window", ge=1000)
    early_close_ms: int = setting(
        0,
        "train requests this long after their time, and correct their labels until the window ends; 0 = off",
        ge=0,
    )
    as_served: bool = setting(
        False, "local: also score every request at its own time, with the weights of that time"
    )
    streaming_window_ms: int = setting(
        0,
        "local: train on a window of this length, then score the next window before it is trained; 0 = off",
        ge=0,
    )
    lateness_ms: int = setting(2000, "how far events may be out of order in the joiner", ge=0)
    batch_requests: int = setting(0, "requests in a training batch; 0 = the default of the trainer", ge=0)
    learning_rate: float = setting(
        0.0, "learning rate of Adam for the dense weights; 0 = the default of the trainer", ge=0, le=10
    )
    set: tuple[str, ...] = setting(
        (), "any other setting: joiner.KEY=VALUE, worker.KEY=VALUE, model.KEY=VALUE, …"
    )
    threads: int = setting(1, "threads of torch in training", ge=1, le=256)
    seed: int = setting(0, "seed of initial weights and rows", ge=0, le=MAX_SEED)
    num_shards: int = setting(2, "parameter server shards", ge=1)
    report: str = setting(
        "", "FILE.json, or a directory for report.json and report.html; '' = print only the table"
    )
    home: str = setting(
        "", "stack: directory that is kept for `up --home`; '' = a temporary one, deleted at the end"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schema and self.options.default_schema is None:
            raise ConfigError(
                f"replay {self.dataset} needs --schema FILE: the TOML that declares the log's features "
                "(docs/bring-your-own-data.md)"
            )
        for path in filter(None, (self.schema, *self.model)):
            if Path(path).is_dir():
                raise ConfigError(f"{path}: expected a TOML file, got a folder; name the file in it")
            if not Path(path).is_file():
                raise ConfigError(f"{path}: no such file; check the path")
        if self.home and self.engine != "stack":
            text = "--engine stack, the only engine that keeps its model"
            raise setting_error("home", text, self.home, "change the engine or leave it out")
        if len(self.model) > 1:
            self._check_models()
        if self.as_served and self.engine != "local":
            text = "--engine local, the only engine that controls the order of scoring and training"
            raise setting_error("as_served", text, True, "change the engine")
        if self.streaming_window_ms:
            self._check_streaming_window()
        if self.freeze_at and self.freeze_weights_at:
            text = "expected freeze_at or freeze_weights_at, got both; freeze_at freezes the weights too"
            raise ConfigError(text)
        if self.archived_until and self.engine != "stack":
            text = "--engine stack, the only engine with an archiver"
            raise setting_error("archived_until", text, self.archived_until, "change the engine")
        for name in ("measure_from", "freeze_at", "freeze_weights_at", "archived_until"):
            self._time_ms(name)
        _ = self.speed_factor

    def _check_models(self) -> None:
        if self.engine != "local":
            text = "one file, or --engine local for several"
            raise setting_error("model", text, ", ".join(self.model), "change the engine")
        if self.as_served:
            text = "expected one --model with --as-served, got several; leave --as-served out"
            raise ConfigError(text)
        if len(set(self.model)) < len(self.model):
            raise ConfigError(f"expected different files for --model, got {', '.join(self.model)}")

    def _check_streaming_window(self) -> None:
        if self.engine != "local":
            text = "--engine local, the only engine that controls the order of scoring and training"
            raise setting_error("streaming_window_ms", text, self.streaming_window_ms, "change the engine")
        for name in ("as_served", "early_close_ms"):
            if getattr(self, name):
                flag = name.removesuffix("_ms").replace("_", "-")
                text = f"expected --streaming-window or --{flag}, got both; leave one out"
                raise ConfigError(text)

    @property
    def first_model(self) -> str:
        """Its predictions are those of the report; '' = the default ranker."""
        return self.model[0] if self.model else ""

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
        """0 = no archive."""
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
        """Event time per wall time; 0 = as fast as possible."""
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
        assert path, "checked in __post_init__"
        return Path(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig(Settings):
    """Settings of `roostream check`, which reads a log with its schema without training."""

    schema: str = setting(help="schema TOML")
    log: tuple[str, ...] = setting((), "JSON lines, as for `replay jsonl`")
    impressions: tuple[str, ...] = setting(
        (), "or tables (.parquet or .csv, compressed or not), as for `replay parquet` and `replay csv`"
    )
    engagements: tuple[str, ...] = setting((), "tables of engagements")
    ignore: tuple[str, ...] = setting((), "columns of the tables to ignore")
    window_ms: int = setting(1_800_000, "the join window", ge=1000)
    lateness_ms: int = setting(2000, "how far events may be out of order in the joiner", ge=0)
    label_delay_ms: int = setting(
        0, "delay after which an engagement changes the online counters; requests change them at once", ge=0
    )
    report: str = setting("", "file for the JSON report; '' = print only the table")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.log) == bool(self.impressions):
            raise ConfigError(
                "expected --log FILES, or --impressions FILES with --engagements FILES; give one of the two"
            )
        for name in ("engagements", "ignore"):
            if self.log and getattr(self, name):
                raise ConfigError(f"--{name} is about tables; remove it, or replace --log by --impressions")
        self.replay()

    def replay(self) -> ReplayConfig:
        """The settings of a replay of this log, in which bad lines are skipped and counted.

        Raises:
            ConfigError: a file does not exist, or its format cannot be determined.
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
        endings = {ending_of(path) for path in (*self.impressions, *self.engagements)}
        forms = {FORMS.get(ending) for ending in endings}
        if forms not in ({"csv"}, {"parquet"}):
            text = "files that all end in .parquet, or all in .csv, .tsv or .txt (or .gz, .zst of these)"
            raise setting_error("impressions", text, sorted(endings))
        return str(forms.pop())
