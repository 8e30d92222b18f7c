"""Settings of the trainer's two programs."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal, Self

from roostream.errors import SetupError
from roostream.models.config import LossName
from roostream.runtime.address import LINK_ASKS, check_addresses, check_listen
from roostream.runtime.deployment import MAX_WORKERS, Deployment
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.settings import MAX_SEED, Settings, setting, setting_error
from roostream.warehouse.readers.config import ReaderCountConfig, ReadersConfig
from roostream.warehouse.sessions.session import DAY, Labels, SessionSpec
from trainer.selection.config import DeferralConfig, RehearsalConfig, SelectionConfig

_FULLY_GROWN = math.log(1 << 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig(Settings):
    """What the training loop itself depends on; a replay in one process needs no more."""

    device: str = setting("cpu", "where the dense part runs: cpu | cuda | cuda:N")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32",
        "of the matrix products of the dense part, by torch's autocast; whatever is kept, and serving, is float32",
    )
    attention: Literal["reference", "triton"] = setting(
        "reference", "HSTU's: plain torch, or kernels for a CUDA device; serving takes the reference"
    )
    compile: bool = setting(
        False, "torch.compile for modules from rows to rows: some seconds each, whenever a worker starts"
    )
    threads: int = setting(1, "of torch in the dense part; exact mode takes one", ge=1, le=256)
    batch_requests: int = setting(64, "requests a batch, at most; what it grows to", ge=1, le=1 << 16)
    first_batch_requests: int = setting(
        8, "requests a batch at the beginning, if not more than batch_requests", ge=1
    )
    batch_growth_requests: int = setting(1024, "requests trained until the batch is one request larger", ge=1)
    initial_batch_requests: int = setting(
        0,
        "batch_requests while the controller hands out history (its initial_workers); 0 = the same",
        ge=0,
        le=1 << 16,
    )
    max_batch_wait_ms: int = setting(
        500, "a batch is cut short after this wait (not in exact mode)", ge=0, le=3_600_000
    )
    seed: int = setting(0, "of initial weights; the shards' rows use the same", ge=0, le=MAX_SEED)
    learning_rate: float = setting(
        2e-3,
        "Adam's, of the dense weights, once batches are full; less while they are smaller",
        ge=0,
        le=10,
    )
    average_steps: int = setting(
        100,
        "what scores is an average of the dense weights over about so many last steps; 0 = the weights",
        ge=0,
        le=1 << 20,
    )
    clip_norm: float = setting(
        10.0, "gradients of the dense weights together are scaled down to this norm", gt=0, le=1e15
    )
    clip_row_norm: float = setting(1.0, "a row's gradient is scaled down to this norm", gt=0, le=1e15)
    dedupe_horizon_ms: int = setting(
        3_600_000, "a sample id is trained once within this much close time", ge=0
    )
    exact: bool = setting(
        False, "bit-equal parameters whatever is killed: whole batches of one partition after the other"
    )
    deduplicate: bool = setting(
        False,
        "find what requests of a batch share, and compute it once: for batches that are clustered by user (inspect dedupe)",
    )
    corrections: Literal["off", "on", "downgrades"] = setting(
        "off", "what labels become behind the close is trained: all of it, or only what is no longer positive"
    )
    loss: LossName = setting("log", "how labels that come late are met: a row of roostream/models/loss.py")
    label_delay_ms: int = setting(
        0,
        "dfm, es_dfm: from a request to its engagements on average; delays are taken as exponential",
        ge=0,
    )
    freeze_at_ms: int = setting(
        0, "requests from this event time on are scored, not trained; 0 = never", ge=0
    )

    selection: SelectionConfig = setting(
        factory=SelectionConfig, help="which requests are trained (docs/selection.md)"
    )
    deferral: DeferralConfig = setting(
        factory=DeferralConfig, help="whose gradients wait at the worker (docs/selection.md)"
    )
    rehearsal: RehearsalConfig = setting(
        factory=RehearsalConfig, help="what is trained once more (docs/rehearsal.md)"
    )
    slices: tuple[str, ...] = setting(
        ("surface",), "progressive metrics by these, too: surface, candidate_age, features"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise setting_error("device", "cpu, cuda or cuda:N", self.device)
        if self.attention == "triton":
            if self.device == "cpu":
                raise setting_error(
                    "attention",
                    "reference with device = cpu",
                    self.attention,
                    "its kernels are for CUDA devices",
                )
            if self.exact:
                error = "its kernels add the gradients of biases in whatever order they come"
                raise setting_error("attention", "reference with exact = true", self.attention, error)
        if self.compile and self.exact:
            error = "which compiled code runs depends on the batches that a process has seen, and so do the last bits"
            raise setting_error("compile", "false with exact = true", self.compile, error)
        if self.loss in ("dfm", "es_dfm") and not self.label_delay_ms:
            raise setting_error(
                "label_delay_ms",
                f"a duration above 0 with loss = {self.loss}",
                0,
                "or choose fnw, which needs none",
            )
        if self.exact and self.corrections != "off":
            error = "exact mode takes whole batches of one partition after the other, and corrections come unevenly"
            raise setting_error("corrections", "off with exact = true", self.corrections, error)
        if self.exact and self.selection.refill:
            error = "how much a chunk is read for follows from what was skipped lately, which no commit has"
            raise setting_error("selection.refill", "false with exact = true", self.selection.refill, error)
        self._check_rehearsal()

    def _check_rehearsal(self) -> None:
        if not self.rehearsal.is_on:
            return
        if self.corrections != "off":
            error = "what is trained once more would have the labels that were corrected"
            raise setting_error("corrections", "off with rehearsal", self.corrections, error)
        if self.selection.is_on:
            raise setting_error(
                "selection.policy",
                "off with rehearsal",
                self.selection.policy,
                "one trains less, the other more",
            )
        if self.deferral.is_on:
            error = "gradients that wait are pushed by how often a row is visited"
            raise setting_error("deferral.share", "0 with rehearsal", f"{self.deferral.share:g}", error)

    @property
    def trained_topics(self) -> tuple[str, ...]:
        return (SAMPLES,) if self.corrections == "off" else (SAMPLES, CORRECTIONS)

    def batch_after(self, num_requests: int) -> int:
        """Requests of the next batch when so many are trained.

        A small log learns from many steps, a large one from quiet ones; the same after a restore, since it
        depends on what is trained alone."""
        return min(
            self.first_batch_requests + num_requests // self.batch_growth_requests, self.batch_requests
        )

    def rate_after(self, num_steps: int) -> float:
        """Adam's behind so many of its steps: `learning_rate` times √(size of a batch / size of a full one),
        since a small batch says less of where to go (Malladi et al. 2022). A batch's size is what it would be
        had all been whole: so many steps make it first · e^(steps / growth). So it is the same for all
        workers, and after a restore. With rehearsal every other step is one that brings no new batch."""
        num_steps = num_steps // 2 if self.rehearsal.is_on else num_steps
        first = min(self.first_batch_requests, self.batch_requests) / self.batch_requests
        grown = first * math.exp(min(num_steps / self.batch_growth_requests, _FULLY_GROWN))
        return self.learning_rate * math.sqrt(min(grown, 1.0))

    def in_phase(self, *, initial: bool) -> Self:
        """Settings while history is trained, or the stream is."""
        return (
            dataclasses.replace(self, batch_requests=self.initial_batch_requests)
            if initial and self.initial_batch_requests
            else self
        )

    def check_device(self) -> None:
        """Raises SetupError: the device isn't there. Imports torch."""
        import torch

        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise SetupError(
                f'device: expected a CUDA device for {self.device!r}, this machine shows none; set device = "cpu"'
            )
        if (
            self.device.startswith("cuda")
            and self.precision == "bfloat16"
            and not torch.cuda.is_bf16_supported()
        ):
            raise SetupError(
                f'precision: expected a device that knows bfloat16, {self.device!r} doesn\'t; set "float32"'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig(LoopConfig, Deployment):
    """`roostream worker --config FILE`."""

    model: str = setting("", "path of the model TOML; empty = defaults")
    controller: str = setting(help="the controller's host:port")
    shards: tuple[str, ...] = setting(
        help="host:port of shards 0..N-1, in order; one with {N} stands for N of them"
    )
    index: int = setting(0, "which worker this is, from 0", ge=0)
    read_ahead: int = setting(
        2,
        "chunks read and decoded ahead of training, pushes made behind it, in threads; 0 = one thread",
        ge=0,
        le=16,
    )
    staleness: int = setting(
        0,
        "pushes that may come between the pull of a chunk's rows and its training; 0 = as in one thread",
        ge=0,
        le=8,
    )
    readers: ReadersConfig = setting(
        factory=ReadersConfig, help="table: who reads sessions of the warehouse (docs/warehouse.md)"
    )
    profile_share: float = setting(
        0.0,
        "of the batches, of which what they look up is counted for placement (docs/placement.md)",
        ge=0,
        le=1,
    )
    home: str = setting("", "folder of its own, for the batches at which training ended; '' = none is kept")
    caught_up_lag_ms: int = setting(5000, "event-time lag below which training counts as live", ge=0)
    shadow: str = setting(
        "", "a committed version (incarnation-seq) whose dense weights score beside those in training"
    )
    shadow_every: int = setting(4, "steps of which one is scored by the shadow", ge=1)
    caught_up_hold_ms: int = setting(
        10_000, "for how long the lag must have been below it to count as live", ge=0
    )
    rendezvous_address: str = setting(
        "127.0.0.1:0", "host:port at which worker 0 listens for the other workers; port 0 picks a free port"
    )
    reduce_timeout_ms: int = setting(
        20_000, "a worker waits for the others of a step for this long", ge=100, le=600_000
    )
    controller_timeout_ms: int = setting(
        30_000, "without the controller for this long training stops: 3 x commit_interval_ms", ge=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("shards")
        check_addresses("shards", *self.shards)
        check_addresses("controller", self.controller)
        if self.staleness and self.exact:
            raise setting_error(
                "staleness", "0 with exact = true", self.staleness, "what is repeated would see other rows"
            )
        if self.staleness and not self.read_ahead:
            raise setting_error(
                "staleness", "0 with read_ahead = 0", self.staleness, "no row is pulled ahead in one thread"
            )
        if self.staleness and self.rehearsal.is_on:
            raise setting_error(
                "staleness",
                "0 with rehearsal",
                self.staleness,
                "each batch then has two pushes, and this counts one",
            )
        check_listen("rendezvous_address", self.rendezvous_address, insecure=self.insecure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerConfig(Deployment):
    """`roostream controller --config FILE`."""

    listen: str = setting(help="host:port to serve on; port 0 = draw")
    num_shards: int = setting(help="parameter server shards", ge=1)
    num_workers: int = setting(
        1,
        "trainer workers, partitions at most; `roostream scale` changes it while they run",
        ge=1,
        le=MAX_WORKERS,
    )
    initial_workers: int = setting(
        0,
        "workers while history is trained, up to the export point; 0 = history is read as the stream is",
        ge=0,
        le=MAX_WORKERS,
    )
    unit_records: int = setting(
        1 << 16, "of each partition handed out between two commits, while history is trained", ge=1
    )
    export_offsets: tuple[str, ...] = setting(
        (),
        "PARTITION=OFFSET of samples at which history ends, instead of where it ends when its training begins",
    )
    warehouse: str = setting(
        "", "of samples, a directory or s3://bucket/prefix: a new model is trained from it first"
    )
    warehouse_from: str = setting("", "the first day of it that is trained, as 2024-05-01; '' = all days")
    warehouse_labels: Labels = setting(
        "latest", "of its samples: with corrections until then, or as_streamed at the close"
    )
    readers: ReaderCountConfig = setting(
        factory=ReaderCountConfig,
        help="table: how many `reader` programs there are to be while it is trained",
    )
    handover_records: int = setting(
        100_000,
        "so many samples archived while the warehouse is trained are trained from it too, before the stream",
        ge=0,
    )
    commit_interval_ms: int = setting(10_000, "between commits", ge=100)
    seed: int = setting(0, "of initial weights and rows; workers and shards use the same", ge=0, le=MAX_SEED)
    idle_hold_ms: int = setting(
        0, "workers are released when nothing is there to read for this long; 0 = never", ge=0
    )
    idle_release_records: int = setting(
        100, "so many unread records call released workers back at once", ge=1
    )
    idle_release_ms: int = setting(10_000, "fewer call them back when they are there for this long", ge=0)
    idle_min_ms: int = setting(30_000, "released workers are not called back before this", ge=0)
    neighbours: tuple[str, ...] = setting(
        (),
        "NAME=URL of the /metrics of programs whose figures the controller's page shows; workers tell it themselves",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listen(
            "listen", self.listen, insecure=self.insecure, authenticated=self.link.asks, by=LINK_ASKS
        )
        for text in self.neighbours:
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]*=https?://[^\s=]+", text):
                raise setting_error(
                    "neighbours", "NAME=URL, such as serving=http://127.0.0.1:9100/metrics", text
                )
        self.check_shards(self.num_shards)
        for name in ("num_workers", "initial_workers"):
            if getattr(self, name) > self.partitions:
                most = f"at most partitions = {self.partitions}"
                raise setting_error(
                    name, most, getattr(self, name), "each worker trains one partition at least"
                )
        for text in self.export_offsets:
            if not re.fullmatch(r"\d{1,4}=\d{1,18}", text) or int(text.partition("=")[0]) >= self.partitions:
                raise setting_error(
                    "export_offsets", f"PARTITION=OFFSET with partitions 0..{self.partitions - 1}", text
                )
        if self.warehouse_from and not DAY.fullmatch(self.warehouse_from):
            raise setting_error("warehouse_from", "a day as 2024-05-01", self.warehouse_from)
        if self.warehouse and self.export_offsets:
            error = "the warehouse's version says where its history ends"
            raise setting_error("export_offsets", "none with a warehouse", self.export_offsets[0], error)
        if self.export_offsets and not self.initial_workers:
            raise setting_error(
                "export_offsets",
                "none with initial_workers = 0",
                self.export_offsets[0],
                "or say how many train history",
            )

    @property
    def export(self) -> dict[int, int]:
        """Partition of `samples` → where its history ends, where that is chosen."""
        return {
            int(number): int(offset)
            for number, _, offset in (text.partition("=") for text in self.export_offsets)
        }

    @property
    def session(self) -> SessionSpec:
        """What of the warehouse is trained."""
        return SessionSpec(
            table=self.warehouse,
            version=0,
            first_day=self.warehouse_from,
            shuffle_seed=self.seed,
            labels=self.warehouse_labels,
        )

    @property
    def neighbour_urls(self) -> dict[str, str]:
        """Program → URL of its /metrics."""
        return {name: url for name, _, url in (text.partition("=") for text in self.neighbours)}
