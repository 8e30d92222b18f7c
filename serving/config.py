"""Settings of serving."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from roostream.runtime.address import check_listen
from roostream.runtime.deployment import RedisSettings
from roostream.schema.settings import MAX_SEED, setting, setting_error
from serving.retrieval.config import ServesItems
from serving.rows.config import ServesRows
from serving.versions.split import Routing, split_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig(RedisSettings, ServesItems, ServesRows):
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
        0.0, "probability that a slot of the answer is drawn at random (serving/explore.py)", ge=0, le=1
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
        1000,
        "how often a heartbeat is written to every partition of both event topics",
        ge=10,
        le=60_000,
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
        64 << 20,
        "of bodies that are being read, all together; more are answered 429",
        ge=1024,
        le=1 << 36,
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
        1000,
        "of a stop, how long open connections may take leave with their next answer",
        ge=0,
        le=600_000,
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
            canary=split_of("canary", self.canary),
            shadow=split_of("shadow", self.shadow),
            interleave=split_of("interleave", self.interleave),
        )
