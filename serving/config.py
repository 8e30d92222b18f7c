"""Settings of retrieval."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from roostream.runtime.address import check_addresses, check_listen
from roostream.runtime.deployment import Deployment, RedisSettings
from roostream.schema.settings import MAX_SEED, SettingError, Settings, setting, setting_error
from serving.versions.routing import Routing, parse_split


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalSettings(Settings):
    """A program that finds items in a catalogue."""

    items: str = setting("", "catalogue, a JSON line an item (docs/retrieval.md); '' = no retrieval")
    items_index: Literal["exact", "ivf"] = setting(
        "exact", "every item is compared, or those of the nearest lists (package extra retrieval)"
    )
    items_probed: float = setting(0.1, "ivf: share of the lists that are looked through", gt=0, le=1)
    items_refreshed: int = setting(
        2000, "items a second, at most, whose vectors are made anew because rows changed", ge=1, le=1_000_000
    )


# ---- Settings that say where a serving process keeps embedding rows and how it follows them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSourceSettings(Deployment):
    """A program that reads rows of the shards."""

    shards: tuple[str, ...] = setting(
        (), "host:port of every shard, in order, to bootstrap rows from; one with {N} stands for N of them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_addresses("shards", *self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSettings(RowSourceSettings):
    """A program that scores with them."""

    rows: Literal["replica", "cache"] = setting(
        "replica", "replica keeps all rows in this process, cache keeps the rows that requests ask for"
    )
    rows_bytes: int = setting(256 << 20, "of memory for a cache's rows", ge=1 << 16, le=1 << 40)
    rows_missing: Literal["read", "initial"] = setting(
        "read",
        "a row that a cache lacks: the request waits for its shard, or takes its initial value while it is read beside",
    )
    rows_read_ms: int = setting(
        50,
        "a request waits so long for rows that a cache lacks, then takes their initial values and is degraded",
        ge=1,
        le=10_000,
    )
    rows_buckets: tuple[int, ...] = setting((), "buckets that are held whole beside a cache")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "cache" and not self.shards:
            raise SettingError("shards", 'expected the shards with rows = "cache", got none; name them')
        if self.rows_buckets and (
            self.rows != "cache" or not set(self.rows_buckets) <= set(range(self.buckets))
        ):
            raise setting_error(
                "rows_buckets",
                f'numbers below buckets = {self.buckets}, with rows = "cache"',
                self.rows_buckets,
            )


# ---- Settings of serving.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig(RedisSettings, RetrievalSettings, RowsSettings):
    """`roostream serving`: scores requests, logs them, takes engagements."""

    listen: str = setting("127.0.0.1:8080", "host:port of the HTTP interface; port 0 = draw one")
    reuse_port: bool = setting(
        False, "share the port with other processes of this user: the kernel spreads connections"
    )
    model: str = setting("", "model TOML for the model before the first commit; '' = defaults")
    home: Path = setting(help="directory of the feature log; one a process")
    threads: int = setting(1, "of torch while scoring", ge=1, le=256)
    seed: int = setting(0, "of initial weights and rows; the trainer's", ge=0, le=MAX_SEED)
    exploration: float = setting(
        0.0, "probability that a slot of the answer is drawn at random (serving/ordering.py)", ge=0, le=1
    )
    order_task: str = setting("", "label that the order is by; '' = the first")
    keep_versions: int = setting(2, "newest dense versions that requests can be scored with", ge=2, le=16)
    admin_listen: str = setting(
        "", "host:port of the admin interface (docs/operations/versions.md); '' = none"
    )
    admin_token_file: str = setting(
        "", "file whose first line is the token that the admin interface asks for"
    )
    warm_up_requests: int = setting(
        32, "recent requests that a new version scores before it is served; 0 = none", ge=0, le=1000
    )
    canary: str = setting(
        "",
        "version for a share of users, e.g. newest@0.05; the others get the one before, until the next commit",
    )
    shadow: str = setting(
        "",
        "version that scores a share of requests beside the answer, e.g. previous@0.1; it is only compared",
    )
    interleave: str = setting(
        "", "version whose order is interleaved with the served one's for a share of users, e.g. previous@0.1"
    )
    heartbeat_ms: int = setting(
        1000, "how often a heartbeat is written to every partition of both event topics", ge=10, le=60_000
    )
    max_in_flight: int = setting(
        256,
        "requests in work at once; more, and those that can't keep the deadline, are answered 429",
        ge=1,
        le=100_000,
    )
    scoring: Literal["kernel", "modules"] = setting(
        "kernel",
        "kernel: the ranker's forward pass as one, within 1e-5 of training's; modules: those that training runs, each request "
        "alone, with the same bits, at two to three times the cost (docs/decisions/0051)",
    )
    pass_requests: int = setting(
        16, "requests that waited together and are scored in one pass", ge=1, le=1024
    )
    pass_candidates: int = setting(
        2048, "candidates of such a pass; a request with more goes alone", ge=1, le=1 << 20
    )
    deadline_ms: int = setting(
        1000,
        "a request whose body isn't there by then is answered 408, one that isn't scored 504; neither is logged",
        ge=1,
        le=600_000,
    )
    max_body_bytes: int = setting(1 << 20, "size of a request's body, also inflated", ge=1024, le=1 << 30)
    max_reading_bytes: int = setting(
        64 << 20, "of bodies that are being read, all together; more are answered 429", ge=1024, le=1 << 36
    )
    max_connections: int = setting(
        1000,
        "open at once; the one that was idle longest is closed for a new one, or it is answered 503",
        ge=1,
        le=100_000,
    )
    strict_actions: bool = setting(
        False,
        "answer 400 to an engagement whose action nothing in the schema names, instead of taking and counting it",
    )
    tracing: bool = setting(
        False,
        "a span a call by OpenTelemetry, continuing the caller's traceparent (package extra opentelemetry)",
    )
    keys_file: str = setting(
        "", "file of bearer keys, made by `roostream keys`; read anew when it changes; '' = nobody is asked"
    )
    log_bytes: int = setting(
        256 << 20, "size of the feature log; when it is full, requests are answered 503", le=1 << 40
    )
    segment_bytes: int = setting(8 << 20, "size of one of its files", ge=1 << 20, le=1 << 30)
    status_page: str = setting("", "URL of the controller's page, which the front page links to")
    drain_ms: int = setting(
        1000, "of a stop, how long open connections may take leave with their next answer", ge=0, le=600_000
    )
    stop_ms: int = setting(
        20_000,
        "time for a whole stop: requests in flight, threads, and the log's way to Kafka",
        ge=0,
        le=600_000,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listen("listen", self.listen, insecure=self.insecure, authenticated=self.is_authenticated)
        if self.status_page and not re.fullmatch(r"https?://[^\s<>\"']+", self.status_page):
            raise setting_error("status_page", "a URL such as http://127.0.0.1:9100/", self.status_page)
        if self.log_bytes < 2 * self.segment_bytes:
            raise setting_error(
                "log_bytes", f"at least 2 x segment_bytes = {2 * self.segment_bytes}", self.log_bytes
            )
        if self.items and self.rows == "cache":
            raise setting_error(
                "rows", '"replica" or "shared" with items: their rows are read every second', self.rows
            )
        self.routing()
        if self.admin_listen:
            check_listen(
                "admin_listen",
                self.admin_listen,
                insecure=self.insecure,
                authenticated=bool(self.tls_certificate),  # it always asks, by its token or by keys
                by="tls_certificate",
            )
            if not self.keys_file:
                self.require("admin_token_file")

    @property
    def is_authenticated(self) -> bool:
        """Whether `listen` asks who calls, and nobody on the way can read the proof."""
        return bool(self.tls_certificate) and (bool(self.keys_file) or self.tls_client_required)

    def routing(self) -> Routing:
        """Raises SettingError."""
        return Routing(
            canary=parse_split("canary", self.canary),
            shadow=parse_split("shadow", self.shadow),
            interleave=parse_split("interleave", self.interleave),
        )
