"""Settings of the trainer's programs: worker and controller."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal, Self

from roostream.errors import SetupError
from roostream.models.config import LossName
from roostream.runtime.address import (
    check_addresses,
    check_listen,
    is_http_url,
    is_wildcard,
    parse_address,
)
from roostream.runtime.deployment import MAX_WORKERS, Deployment
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.settings import MAX_SEED, Settings, setting, setting_error
from roostream.warehouse.readers.config import ReaderCountConfig, ReadersConfig
from roostream.warehouse.sessions.session import Labels, SessionSpec, is_day
from trainer.selection.config import DeferralConfig, RehearsalConfig, SelectionConfig

_SCRAPE_TARGET = re.compile(r"[a-z0-9][a-z0-9-]*(\*(?P<number>\d{1,3}))?=(?P<url>https?://[^\s=]+)")
_FULLY_GROWN = math.log(1 << 16)


def missing_device(device: str, num_cuda: int) -> str:
    """Why a machine with `num_cuda` CUDA devices lacks `device`; "" if it has it."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or int(index or 0) < num_cuda:
        return ""
    found = f"{num_cuda}, from cuda:0 on; choose one of them, or cpu" if num_cuda else "none; set cpu"
    return f"device: expected a CUDA device for {device!r} on this machine, got {found}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig(Settings):
    """Settings of the training loop. A replay in one process needs only these."""

    device: str = setting("cpu", "device of the dense part: cpu | cuda | cuda:N")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32",
        "precision of the dense part's matrix products; stored weights and serving use float32",
    )
    attention: Literal["reference", "triton"] = setting(
        "reference",
        "HSTU attention: plain torch, or Triton kernels for CUDA; serving uses the reference",
    )
    compile: bool = setting(
        False, "compile modules with torch.compile; takes some seconds per module at each start"
    )
    threads: int = setting(1, "torch threads of the dense part; exact mode uses one", ge=1, le=256)
    batch_requests: int = setting(64, "maximum requests per batch; batches grow up to it", ge=1, le=1 << 16)
    first_batch_requests: int = setting(8, "requests of the first batch, at most batch_requests", ge=1)
    batch_growth_requests: int = setting(
        1024, "the batch grows by one request for this many trained requests", ge=1
    )
    initial_batch_requests: int = setting(
        0,
        "batch_requests during initial training of history (initial_workers); 0 = the same",
        ge=0,
        le=1 << 16,
    )
    max_batch_wait_ms: int = setting(
        500, "maximum wait for a full batch; not used in exact mode", ge=0, le=3_600_000
    )
    seed: int = setting(0, "seed of initial weights; shards use the same one for rows", ge=0, le=MAX_SEED)
    learning_rate: float = setting(
        2e-3,
        "Adam's learning rate of the dense weights for full batches; smaller batches use less",
        ge=0,
        le=10,
    )
    average_steps: int = setting(
        100,
        "score with dense weights averaged over about this many steps; 0 = no averaging",
        ge=0,
        le=1 << 20,
    )
    clip_norm: float = setting(10.0, "maximum global norm of the dense gradients", gt=0, le=1e15)
    clip_row_norm: float = setting(1.0, "maximum norm of a row's gradient", gt=0, le=1e15)
    expand: Literal["off", "impressions"] = setting(
        "off", "train impressions in batches of batch_impressions (docs/bring-your-torchrec-model.md)"
    )
    batch_impressions: int = setting(
        640, "impressions per batch with expand; the rest waits for the next requests", ge=1, le=1 << 20
    )
    dedupe_horizon_ms: int = setting(
        3_600_000, "duplicate sample ids within this close time are skipped", ge=0
    )
    exact: bool = setting(
        False, "bit-equal results after any crash: full batches, one partition after the other"
    )
    deduplicate: bool = setting(
        False,
        "deduplicate features shared by requests of a batch; for data clustered by user (inspect dedupe)",
    )
    corrections: Literal["off", "on", "downgrades"] = setting(
        "off", "train label changes after the close: all, or only positives that became negative"
    )
    loss: LossName = setting("log", "loss for delayed labels (roostream/models/loss.py)")
    label_delay_ms: int = setting(
        0,
        "dfm, es_dfm: mean delay from a request to its engagements, assumed exponential",
        ge=0,
    )
    freeze_at_ms: int = setting(
        0, "requests from this event time on are scored but not trained; 0 = never", ge=0
    )

    selection: SelectionConfig = setting(
        factory=SelectionConfig, help="selection of requests to train (docs/selection.md)"
    )
    deferral: DeferralConfig = setting(
        factory=DeferralConfig, help="deferral of gradients at the worker (docs/selection.md)"
    )
    rehearsal: RehearsalConfig = setting(
        factory=RehearsalConfig, help="training on earlier batches again (docs/rehearsal.md)"
    )
    slices: tuple[str, ...] = setting(
        ("surface",), "also report progressive metrics by: surface, candidate_age, features"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise setting_error("device", "cpu, cuda or cuda:N", self.device)
        if self.attention == "triton":
            if self.device == "cpu":
                error = "its kernels are for CUDA devices"
                raise setting_error("attention", "reference with device = cpu", self.attention, error)
            if self.exact:
                error = "its kernels add bias gradients in a varying order"
                raise setting_error("attention", "reference with exact = true", self.attention, error)
        if self.compile and self.exact:
            error = "the compiled code, and so the last bits, depend on the batches that a process has seen"
            raise setting_error("compile", "false with exact = true", self.compile, error)
        if self.loss in ("dfm", "es_dfm") and not self.label_delay_ms:
            expected = f"a duration above 0 with loss = {self.loss}"
            raise setting_error("label_delay_ms", expected, 0, "or choose fnw, which needs no delay")
        if self.exact and self.corrections != "off":
            error = "exact mode trains full batches in turns, and corrections are distributed unevenly"
            raise setting_error("corrections", "off with exact = true", self.corrections, error)
        if self.exact and self.selection.refill:
            error = "chunk sizes depend on recently skipped requests, which are in no commit"
            raise setting_error("selection.refill", "false with exact = true", self.selection.refill, error)
        self._check_rehearsal()
        self._check_expansion()

    def _check_expansion(self) -> None:
        if self.expand == "off":
            return
        for key, value, is_on in (
            ("selection.policy", self.selection.policy, self.selection.is_on),
            ("deferral.share", self.deferral.share, self.deferral.is_on),
            ("rehearsal.batches", self.rehearsal.batches, self.rehearsal.is_on),
            ("corrections", self.corrections, self.corrections != "off"),
            ("deduplicate", self.deduplicate, self.deduplicate),
        ):
            if is_on:
                error = "these need batches of requests"
                raise setting_error(key, "the default with expand = impressions", value, error)

    def _check_rehearsal(self) -> None:
        if not self.rehearsal.is_on:
            return
        if self.corrections != "off":
            error = "rehearsed batches would use labels from before the correction"
            raise setting_error("corrections", "off with rehearsal", self.corrections, error)
        if self.selection.is_on:
            error = "selection trains less and rehearsal more"
            raise setting_error("selection.policy", "off with rehearsal", self.selection.policy, error)
        if self.deferral.is_on:
            error = "deferral depends on how often rows are visited, which rehearsal changes"
            raise setting_error("deferral.share", "0 with rehearsal", f"{self.deferral.share:g}", error)

    @property
    def trained_topics(self) -> tuple[str, ...]:
        return (SAMPLES,) if self.corrections == "off" else (SAMPLES, CORRECTIONS)

    def batch_after(self, num_requests: int) -> int:
        """Batch size after `num_requests` trained requests. Early training benefits from many steps, later
        training from less noise. It depends only on what is trained, so it is the same after a restore."""
        return min(
            self.first_batch_requests + num_requests // self.batch_growth_requests, self.batch_requests
        )

    def rate_after(self, num_steps: int) -> float:
        """Adam's learning rate after `num_steps` steps: `learning_rate` · √(batch size / full batch size),
        because a small batch has a noisier gradient (Malladi et al. 2022).

        The batch size is computed as if all batches were full: first · e^(steps / growth). So it is the same
        for all workers, and after a restore. With rehearsal, every other step has no new batch. Batches of
        impressions do not grow."""
        if self.expand != "off":
            return self.learning_rate
        num_steps = num_steps // 2 if self.rehearsal.is_on else num_steps
        first = min(self.first_batch_requests, self.batch_requests) / self.batch_requests
        grown = first * math.exp(min(num_steps / self.batch_growth_requests, _FULLY_GROWN))
        return self.learning_rate * math.sqrt(min(grown, 1.0))

    def in_phase(self, *, initial: bool) -> Self:
        """Settings for initial training of history, or for the stream."""
        if not initial or not self.initial_batch_requests:
            return self
        return dataclasses.replace(self, batch_requests=self.initial_batch_requests)

    def check_device(self) -> None:
        """Raises SetupError: the device is not available. Imports torch."""
        import torch

        if problem := missing_device(self.device, torch.cuda.device_count()):
            raise SetupError(problem)
        needs_bfloat16 = self.device.startswith("cuda") and self.precision == "bfloat16"
        if needs_bfloat16 and not torch.cuda.is_bf16_supported():
            raise SetupError(
                f'precision: expected a device with bfloat16, got {self.device!r} without; set "float32"'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig(LoopConfig, Deployment):
    """`roostream worker --config FILE`."""

    model: str = setting("", "path of the model TOML; empty = defaults")
    controller: str = setting(help="host:port of the controller")
    shards: tuple[str, ...] = setting(
        help="host:port of shards 0..N-1, in order; an address with {N} expands to N shards"
    )
    index: int = setting(0, "index of this worker, from 0", ge=0)
    read_ahead: int = setting(
        2,
        "chunks to read and decode ahead, with pushes in the background; 0 = one thread",
        ge=0,
        le=16,
    )
    staleness: int = setting(
        0,
        "maximum pushes between the pull of a chunk's rows and its training; 0 = as in one thread",
        ge=0,
        le=8,
    )
    readers: ReadersConfig = setting(
        factory=ReadersConfig, help="table: how warehouse sessions are read (docs/warehouse.md)"
    )
    profile_share: float = setting(
        0.03,
        "share of batches whose lookups are counted for placement in the initial phase (docs/placement.md)",
        ge=0,
        le=1,
    )
    initial_rows: Literal["shards", "torchrec"] = setting(
        "shards",
        "owners of the rows in the initial phase: the shards, or the workers with TorchRec's sharded "
        "collections (extra torchrec)",
    )
    initial_placement: str = setting(
        "",
        "initial_rows = torchrec: where the workers hold each table; empty = spread by rows, planner = "
        "TorchRec's planner with the profiles in the store, or a file of `placement plan --write-torchrec`",
    )
    profile_stream: bool = setting(False, "count batches of the stream for placement, too")
    home: str = setting("", "folder for batches at which training failed; '' = not saved")
    caught_up_lag_ms: int = setting(5000, "event-time lag below which training counts as caught up", ge=0)
    shadow: str = setting("", "committed version (incarnation-seq) whose dense weights score as a shadow")
    shadow_every: int = setting(4, "the shadow scores every Nth step", ge=1)
    caught_up_hold_ms: int = setting(10_000, "how long the lag must stay below caught_up_lag_ms", ge=0)
    rendezvous_address: str = setting(
        "127.0.0.1:0", "host:port at which worker 0 listens for the other workers; port 0 picks a free port"
    )
    reduce_timeout_ms: int = setting(
        20_000, "maximum wait for the other workers in a step", ge=100, le=600_000
    )
    wait_on_hold: bool = setting(
        False, "wait for the end of a hold instead of ending with exit code 75; for Kubernetes"
    )
    controller_timeout_ms: int = setting(
        30_000, "training stops without the controller for this long; use 3 x commit_interval_ms", ge=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("shards")
        check_addresses("shards", *self.shards)
        check_addresses("controller", self.controller)
        if self.staleness and self.exact:
            raise setting_error(
                "staleness", "0 with exact = true", self.staleness, "repeated batches would see other rows"
            )
        if self.staleness and not self.read_ahead:
            raise setting_error(
                "staleness", "0 with read_ahead = 0", self.staleness, "one thread pulls no rows ahead"
            )
        if self.staleness and self.expand != "off":
            error = "a chunk then has any number of pushes"
            raise setting_error("staleness", "0 with expand = impressions", self.staleness, error)
        if self.staleness and self.rehearsal.is_on:
            error = "each batch then has two pushes"
            raise setting_error("staleness", "0 with rehearsal", self.staleness, error)
        if self.initial_rows == "torchrec" and (
            self.staleness or self.expand != "off" or self.rehearsal.is_on
        ):
            raise setting_error(
                "initial_rows",
                "shards with staleness, expand or rehearsal",
                self.initial_rows,
                "workers that hold rows pull once and push once in a step",
            )
        if self.initial_placement and self.initial_rows != "torchrec":
            error = "set initial_rows = torchrec"
            raise setting_error(
                "initial_placement", "'' with initial_rows = shards", self.initial_placement, error
            )
        check_listen("rendezvous_address", self.rendezvous_address, insecure=self.insecure)
        if is_wildcard(parse_address(self.rendezvous_address)[0]):
            raise setting_error(
                "rendezvous_address",
                "an address at which other workers reach this machine",
                self.rendezvous_address,
                "worker 0 tells it to the others",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerConfig(Deployment):
    """`roostream controller --config FILE`."""

    listen: str = setting(help="host:port to listen on; port 0 picks a free port")
    num_shards: int = setting(help="number of parameter server shards", ge=1)
    num_workers: int = setting(
        1,
        "number of workers, at most the partitions; `roostream scale` changes it at run time",
        ge=1,
        le=MAX_WORKERS,
    )
    follow_workers: bool = setting(
        False,
        "train the stream with all connected workers instead of the number of `roostream scale`, where "
        "something else starts and stops them; a change counts after 30 s",
    )
    initial_workers: int = setting(
        0,
        "workers for initial training of history; 0 = history is read as part of the stream",
        ge=0,
        le=MAX_WORKERS,
    )
    unit_records: int = setting(
        1 << 16, "maximum records of a partition between two commits of history", ge=1
    )
    export_offsets: tuple[str, ...] = setting(
        (),
        "PARTITION=OFFSET of samples where history ends; default: the end when training begins",
    )
    warehouse: str = setting(
        "", "directory or s3://bucket/prefix of archived samples; a new model is trained from it first"
    )
    warehouse_from: str = setting("", "first day of the warehouse to train, as 2024-05-01; '' = all days")
    warehouse_labels: Labels = setting(
        "latest", "labels of archived samples: latest, with corrections, or as_streamed, at the close"
    )
    readers: ReaderCountConfig = setting(
        factory=ReaderCountConfig,
        help="table: number of `reader` programs while the warehouse is trained",
    )
    handover_records: int = setting(
        100_000,
        "continue with a further warehouse session if more samples than this were archived meanwhile",
        ge=0,
    )
    lost_after_ms: int = setting(
        3000,
        "a shard or worker that sends no heartbeat for this long is lost, and everyone is restored",
        ge=1000,
    )
    commit_interval_ms: int = setting(10_000, "time between commits", ge=100)
    seed: int = setting(
        0, "seed of initial weights and rows; workers and shards use the same one", ge=0, le=MAX_SEED
    )
    idle_hold_ms: int = setting(0, "release workers after this time without input; 0 = never", ge=0)
    idle_release_records: int = setting(100, "unread records that call released workers back at once", ge=1)
    idle_release_ms: int = setting(10_000, "fewer unread records call them back after this time", ge=0)
    idle_min_ms: int = setting(30_000, "minimum time that workers stay released", ge=0)
    scrape_targets: tuple[str, ...] = setting(
        (),
        "NAME=URL of /metrics of other programs for the status page; workers report theirs. NAME*NUMBER=URL "
        "with {index} in the URL names NUMBER programs, NAME, NAME-1 and so on",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_link_port(self.listen)
        for text in self.scrape_targets:
            found = _SCRAPE_TARGET.fullmatch(text)
            if (
                found is None
                or bool(found["number"]) != ("{index}" in found["url"])
                or not is_http_url(found["url"].replace("{index}", "0"))
            ):
                expected = (
                    "NAME=URL, such as serving=http://127.0.0.1:9100/metrics, or NAME*NUMBER=URL with "
                    "{index} in the URL"
                )
                raise setting_error("scrape_targets", expected, text)
        self.check_shards(self.num_shards)
        for name in ("num_workers", "initial_workers"):
            if getattr(self, name) > self.partitions:
                limit = f"at most partitions = {self.partitions}"
                raise setting_error(
                    name, limit, getattr(self, name), "each worker trains at least one partition"
                )
        for text in self.export_offsets:
            if not re.fullmatch(r"\d{1,4}=\d{1,18}", text) or int(text.partition("=")[0]) >= self.partitions:
                raise setting_error(
                    "export_offsets", f"PARTITION=OFFSET with partitions 0..{self.partitions - 1}", text
                )
        if self.warehouse_from and not is_day(self.warehouse_from):
            raise setting_error("warehouse_from", "a day as 2024-05-01", self.warehouse_from)
        if self.warehouse and self.export_offsets:
            error = "the warehouse's table version says where history ends"
            raise setting_error("export_offsets", "none with a warehouse", self.export_offsets[0], error)
        if self.export_offsets and not self.initial_workers:
            expected, error = "none with initial_workers = 0", "or set initial_workers"
            raise setting_error("export_offsets", expected, self.export_offsets[0], error)

    @property
    def export(self) -> dict[int, int]:
        """Partition of `samples` → chosen end of its history."""
        points = (text.split("=") for text in self.export_offsets)
        return {int(number): int(offset) for number, offset in points}

    @property
    def session(self) -> SessionSpec:
        """The part of the warehouse to train."""
        return SessionSpec(
            table=self.warehouse,
            version=0,
            first_day=self.warehouse_from,
            shuffle_seed=self.seed,
            labels=self.warehouse_labels,
        )

    @property
    def scrape_urls(self) -> dict[str, str]:
        """Program → URL of its /metrics."""
        urls: dict[str, str] = {}
        for text in self.scrape_targets:
            name, _, url = text.partition("=")
            name, _, number = name.partition("*")
            for index in range(int(number or 1)):
                urls[f"{name}-{index}" if index else name] = url.replace("{index}", str(index))
        return urls
