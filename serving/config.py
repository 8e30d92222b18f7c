"""Settings of `roostream serving`."""

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
    """Settings of a program that retrieves items from a catalogue."""

    items: str = setting(
        "", "catalogue file, one JSON object per line (docs/retrieval.md); '' = no retrieval"
    )
    items_index: Literal["exact", "ivf"] = setting(
        "exact", "exact compares all items, ivf those of the nearest lists (package extra retrieval)"
    )
    items_probed_share: float = setting(
        0.1, "ivf: share of the lists that a search looks through", gt=0, le=1
    )
    max_items_refreshed_per_s: int = setting(
        2000, "item vectors updated per second because rows changed", ge=1, le=1_000_000
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSourceSettings(Deployment):
    """Settings of a program that reads rows from the shards."""

    shards: tuple[str, ...] = setting(
        (), "host:port of every shard, in order, to load rows from; an address with {N} stands for N of them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_addresses("shards", *self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSettings(RowSourceSettings):
    """Settings of a program that scores with rows."""

    rows: Literal["replica", "cache"] = setting(
        "replica", "replica keeps all rows in this process, cache keeps the rows that requests use"
    )
    rows_cache_bytes: int = setting(256 << 20, "memory of the row cache", ge=1 << 16, le=1 << 40)
    rows_missing: Literal["read", "initial"] = setting(
        "read",
        "for a row that the cache lacks: read waits for its shard, initial uses its initial value and "
        "reads it afterwards",
    )
    rows_read_timeout_ms: int = setting(
        50,
        "how long a request waits for rows that the cache lacks before it uses initial values and is "
        "marked degraded",
        ge=1,
        le=10_000,
    )
    rows_buckets: tuple[int, ...] = setting((), "buckets that are kept completely in addition to the cache")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "cache" and not self.shards:
            raise SettingError("shards", 'expected the shards with rows = "cache", got none; name them')
        buckets_exist = set(self.rows_buckets) <= set(range(self.buckets))
        if self.rows_buckets and (self.rows != "cache" or not buckets_exist):
            expected = f'numbers below buckets = {self.buckets}, with rows = "cache"'
            raise setting_error("rows_buckets", expected, self.rows_buckets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig(RedisSettings, RetrievalSettings, RowsSettings):
    """`roostream serving`: scores and logs requests, and accepts engagements."""

    listen: str = setting("127.0.0.1:8080", "host:port of the HTTP interface; port 0 picks a free port")
    reuse_port: bool = setting(
        False, "share the port with other processes of this user; the kernel distributes connections"
    )
    model: str = setting("", "model TOML for the model before the first commit; '' = defaults")
    home: Path = setting(help="directory of the feature log; each process needs its own")
    threads: int = setting(1, "torch threads for scoring", ge=1, le=256)
    seed: int = setting(0, "seed of initial weights and rows; must be the trainer's", ge=0, le=MAX_SEED)
    exploration: float = setting(
        0.0, "probability that a slot of the answer is drawn at random (serving/ordering.py)", ge=0, le=1
    )
    join_window_ms: int = setting(
        0, "the joiner's window, to tell on the front page when a click is trained; 0 = unknown", ge=0
    )
    order_task: str = setting("", "label whose score decides the order; '' = the first label")
    keep_versions: int = setting(2, "newest model versions to keep loaded", ge=2, le=16)
    admin_listen: str = setting(
        "", "host:port of the admin interface (docs/operations/upgrade.md); '' = none"
    )
    admin_token_file: str = setting("", "file whose first line is the token of the admin interface")
    warm_up_requests: int = setting(
        32, "recent requests that a new version scores before it is served; 0 = none", ge=0, le=1000
    )
    canary: str = setting(
        "",
        "version for a share of users, such as newest@0.05; the other users get the version before it, until "
        "the next commit",
    )
    shadow: str = setting(
        "", "version that scores a share of requests after the answer, for comparison, such as previous@0.1"
    )
    interleave: str = setting(
        "",
        "version whose order is interleaved with the served version's for a share of users, such as "
        "previous@0.1",
    )
    heartbeat_ms: int = setting(
        1000, "interval of heartbeats to every partition of both event topics", ge=10, le=60_000
    )
    max_in_flight: int = setting(
        256,
        "requests in progress, of ranking, engagements and retrieval each; further ones, and those that "
        "would miss their deadline, are answered 429",
        ge=1,
        le=100_000,
    )
    scoring: Literal["kernel", "modules"] = setting(
        "kernel",
        "kernel: compiled forward pass, within 1e-5 of training's scores; modules: training's modules, "
        "each request alone, bit-equal, at two to three times the cost (docs/decisions)",
    )
    max_pass_requests: int = setting(16, "queued requests that are scored in one pass", ge=1, le=1024)
    max_pass_candidates: int = setting(
        2048, "candidates of a scoring pass; a request with more is scored alone", ge=1, le=1 << 20
    )
    deadline_ms: int = setting(
        1000,
        "deadline of a request; answered 408 if its body is incomplete by then, 504 if it is not scored; "
        "not logged then",
        ge=1,
        le=600_000,
    )
    max_body_bytes: int = setting(1 << 20, "size of a request body, also decompressed", ge=1024, le=1 << 30)
    max_reading_bytes: int = setting(
        64 << 20, "total size of the bodies that are being received; beyond it, 429", ge=1024, le=1 << 36
    )
    max_connections: int = setting(
        1000,
        "open connections; a new one replaces the one that was idle longest, or is answered 503",
        ge=1,
        le=100_000,
    )
    strict_actions: bool = setting(
        False,
        "answer 400 to engagements whose action the schema does not name, instead of counting them as unused",
    )
    tracing: bool = setting(
        False,
        "one OpenTelemetry span per call, continuing the caller's traceparent (package extra opentelemetry)",
    )
    keys_file: str = setting(
        "", "file of bearer keys, made by `roostream keys`; reloaded when it changes; '' = no keys needed"
    )
    max_log_bytes: int = setting(
        256 << 20, "size of the feature log; while it is full, requests are answered 503", le=1 << 40
    )
    log_segment_bytes: int = setting(8 << 20, "size of a file of the feature log", ge=1 << 20, le=1 << 30)
    status_page: str = setting("", "URL of the controller's status page, for a link on the front page")
    drain_ms: int = setting(
        1000,
        "at a stop, how long open connections get one more answer before they are closed",
        ge=0,
        le=600_000,
    )
    stop_ms: int = setting(
        20_000,
        "time for a whole stop: requests in flight, threads, and sending the feature log to Kafka",
        ge=0,
        le=600_000,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listen("listen", self.listen, insecure=self.insecure, authenticated=self.is_authenticated)
        if self.status_page and not re.fullmatch(r"https?://[^\s<>\"']+", self.status_page):
            raise setting_error("status_page", "a URL such as http://127.0.0.1:9100/", self.status_page)
        if self.max_log_bytes < 2 * self.log_segment_bytes:
            expected = f"at least 2 x log_segment_bytes = {2 * self.log_segment_bytes}"
            raise setting_error("max_log_bytes", expected, self.max_log_bytes)
        if self.items and self.rows == "cache":
            expected = '"replica" with items: retrieval reads all their rows every second'
            raise setting_error("rows", expected, self.rows)
        self.routing()
        if self.admin_listen:
            check_listen(
                "admin_listen",
                self.admin_listen,
                insecure=self.insecure,
                authenticated=bool(self.tls_certificate),  # the port always requires its token or a key
                by="tls_certificate",
            )
            if not self.keys_file:
                self.require("admin_token_file")

    @property
    def is_authenticated(self) -> bool:
        """Whether clients of `listen` must authenticate, over an encrypted connection."""
        return bool(self.tls_certificate) and (bool(self.keys_file) or self.tls_client_required)

    def routing(self) -> Routing:
        """How requests are routed to versions. Raises SettingError."""
        return Routing(
            canary=parse_split("canary", self.canary),
            shadow=parse_split("shadow", self.shadow),
            interleave=parse_split("interleave", self.interleave),
        )
