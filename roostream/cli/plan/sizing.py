"""Capacity planning: the sizes that a load needs and the load at which each part reaches its limit, from
measured figures.

    R requests per second · K candidates · U rows that a request touches · W workers · S shards · B requests
    in a step

Costs are CPU seconds on the measured core (docs/benchmarks names it), times `core` for another one.
Quantities without a committed benchmark are settings of `Load` whose help says "assumed".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from roostream.cli.plan.measured import SOURCES
from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.rpc.server import MAX_CONNECTIONS
from roostream.schema.settings import Settings, setting

MAX_PARTITIONS, MAX_BUCKETS = 1024, 1 << 16
MAX_UPDATERS = MAX_AUDITORS = 64
MAX_CANDIDATES = 200
"""Of a request in the benchmarks behind the figures."""
MAX_TASK_MANAGERS = 128  # joiner.flink_job.MAX_PARALLELISM, which needs Flink to be imported
_COMMIT_SHARE = 0.01  # of the time
_MAX_DISK_SHARE = 0.8
_ID_BYTES = 130  # trainer/dedupe.py
_USER_BYTES, _ITEM_BYTES = 25_000, 171  # serving/online_features/store.py
_SEAL_KEY_BYTES = 200  # of a sample, while its day is sealed: roostream/warehouse/compact.py
_SEAL_BYTES = 5 * (128 << 20) + 300e6  # for `merge_bytes`, and for an idle compactor
_READ_OF_UPDATER = 0.4  # what another updater adds to a request's read of Redis (docs/decisions/0118)
_SPARE_CONNECTIONS = 32
_ARCHIVE_TIME, _COMPACT_TIME = "archive_us", "compact_us"  # names of measured figures, each of a sample
_S, _MS, _MB, _GB, _GBIT = 1e-6, 1e-3, 1e6, 1e9, 1e9 / 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load(Settings):
    """The load and the hardware."""

    requests_per_s: float = setting(help="requests per second at the peak", gt=0)
    candidates: int = setting(20, "candidates of a request", ge=1)
    rows: int = setting(1_000_000, "embedding rows in all tables", ge=1)
    dim: int = setting(16, "floats in a row", ge=1, le=1024)
    engagements: float = setting(1.0, "engagements per request", ge=0)
    history: int = setting(30, "entries in the lists of a request", ge=0)
    candidate_bytes: int = setting(
        80, "bytes of a candidate's features in a sample; 80 = schema of the demo", ge=1
    )
    candidate_ids: int = setting(2, "ids of each candidate", ge=0)
    distinct: float = setting(
        0.5, "assumed share of a request's ids that are not in its batch already", gt=0, le=1
    )
    batch_requests: int = setting(4096, "requests in a step of all workers together", ge=1)
    window_s: float = setting(600.0, "window of the join in seconds", gt=0)
    retention_h: float = setting(
        72.0, "retention time of Kafka in hours; must exceed the longest catch-up", gt=0
    )
    replication: int = setting(3, "replicas of a record in Kafka", ge=1, le=9)
    commit_interval_s: float = setting(10.0, "seconds between commits", gt=0)
    core: float = setting(1.0, "assumed time of this core for one second of the measured core", gt=0)
    busy: float = setting(0.6, "share of a core that may be used at the peak", gt=0, le=1)
    flink_share: float = setting(
        3.0, "assumed cost of an event in Flink and the Kafka client, as a multiple of the join", ge=1
    )
    network_gbit: float = setting(10.0, "network bandwidth of a machine in Gbit/s", gt=0)
    machine_gb: float = setting(64.0, "memory of a machine in GB", gt=0)
    machine_cores: int = setting(16, "cores of a machine", ge=1)
    users: int = setting(100_000, "users with events within 30 days, whose state Redis keeps", ge=0)
    items: int = setting(100_000, "items with events within 30 days, whose counters Redis keeps", ge=0)
    redis_us: float = setting(
        25.0, "assumed microseconds of Redis for a read of a request or a write of an event", gt=0
    )
    updater_us: float = setting(180.0, "assumed microseconds of a feature updater for an event", gt=0)
    auditor_us: float = setting(50.0, "assumed microseconds of an auditor for a record", gt=0)
    compare_us: float = setting(
        32.0,
        "assumed microseconds of an auditor for the comparison of a request with baselines, 320 times its "
        "compare_share, here of 0.1",
        ge=0,
    )
    dedupe_h: float = setting(1.0, "hours for which workers remember sample ids (dedupe_horizon_ms)", ge=0)
    task_manager_disk_gb: float = setting(20.0, "disk of a task manager for its state", gt=0)
    broker_disk_gb: float = setting(16_000.0, "disks of a broker", gt=0)
    broker_mb: float = setting(
        100.0, "assumed MB per second that one broker accepts, including replicas", gt=0
    )

    @property
    def touched(self) -> float:
        """Rows that a request adds to a step."""
        return self.distinct * (1 + self.history + self.candidates * self.candidate_ids)

    @property
    def sample_bytes(self) -> float:
        """Bytes of a sample, encoded and not compressed: a fixed part, 24 bytes for each entry of the history
        (id, action, time), and the candidates."""
        return 130 + 24 * self.history + self.candidates * self.candidate_bytes


class Need(NamedTuple):
    """One part of a plan."""

    what: str
    amount: float
    unit: str
    # Requests per second above which more of it does not help or is not allowed; inf = no limit
    ends_at: float
    why: str


class Costs:
    """What a load costs, in seconds of one core. They are linear in the number of candidates,
    through two measured points."""

    def __init__(self, load: Load, figures: Mapping[str, float]) -> None:
        self.load, self.figures = load, figures

    def of(self, name: str, unit: float = _S) -> float:
        return self.figures[name] * unit * self.load.core

    def _line(self, at: int, low: str, high_at: int, high: str) -> float:
        slope = (self.of(high) - self.of(low)) / (high_at - at)
        return max(self.of(low) + slope * (self.load.candidates - at), slope * self.load.candidates)

    @property
    def serve_s(self) -> float:
        return self._line(20, "serve_20_us", MAX_CANDIDATES, "serve_200_us")

    @property
    def decode_s(self) -> float:
        return self._line(11, "decode_11_us", MAX_CANDIDATES, "decode_200_us")

    @property
    def join_event_s(self) -> float:
        return self.of("join_event_us") * self.load.flink_share

    @property
    def train_s(self) -> float:
        """Training a request, in proportion to its candidates: the more expensive of two measured steps."""
        a, b = self.of("step_64_of_11_us") / (64 * 11), self.of("step_512_of_5_us") / (512 * 5)
        return max(a, b) * self.load.candidates

    @property
    def turn_s(self) -> float:
        """Fixed cost of a step for each worker: calls, the sum of gradients, waiting for the others."""
        return max(self.of("four_workers_ms", _MS) - self.of("one_worker_ms", _MS), 0.0) / 3

    @property
    def call_s(self) -> float:
        """One side of a call."""
        return self.of("call_us")

    @property
    def row_s(self) -> float:
        """Pulling and pushing a row."""
        return self.of("pull_row_us") + self.of("push_row_us")

    @property
    def freeze_row_s(self) -> float:
        return self.of("freeze_ms", _MS) / 1e6


def step_s(costs: Costs, batch: float, workers: int, shards: int) -> float:
    """Time of a step: each worker trains its part, calls every shard twice and joins the sum; shards apply
    the rows."""
    load = costs.load
    own = batch / workers * costs.train_s + 2 * shards * costs.call_s + (costs.turn_s if workers > 1 else 0.0)
    applied = batch * load.touched * costs.row_s / shards + 2 * workers * costs.call_s
    return own + applied


def workers_for(costs: Costs, shards: int) -> int:
    """The smallest number of workers that keeps up; 0 = even the maximum does not."""
    wanted_s = costs.load.batch_requests / costs.load.requests_per_s * costs.load.busy
    fits = (
        w
        for w in range(1, MAX_WORKERS + 1)
        if step_s(costs, costs.load.batch_requests, w, shards) <= wanted_s
    )
    return next(fits, 0)


def trained_at_max(costs: Costs, shards: int) -> float:
    """Maximum training rate in requests per second, over all numbers of workers."""
    batch = costs.load.batch_requests
    return max(batch / step_s(costs, batch, w, shards) for w in range(1, MAX_WORKERS + 1)) * costs.load.busy


def row_bytes(load: Load) -> float:
    """Memory of a row in a shard: values, equally wide optimizer state, key and timestamps; arrays grow by
    half."""
    return (8 * load.dim + 61) * 1.5


def replica_bytes(load: Load) -> float:
    """Memory of one row in a replica."""
    return (4 * load.dim + 40) * 1.5


def delta_bytes(load: Load) -> float:
    """Size of a published row: values, id and table."""
    return 4 * load.dim + 16


def changed_rows(load: Load, seconds: float) -> float:
    """Upper bound of the distinct rows that training changes in this time."""
    return min(load.requests_per_s * load.touched * seconds, load.rows)


def plan(load: Load, figures: Mapping[str, float]) -> list[Need]:
    """The needs of every part; see `bottleneck`."""
    costs = Costs(load, figures)
    shards = shards_for(load, costs)
    return [
        *_kafka(load, costs),
        *_joining(costs),
        *_training(load, costs, shards),
        _dedupe(load, costs, shards),
        _controller(load, costs),
        *_rows(load, costs, shards),
        *_serving(load, costs),
        *_online_features(load),
        *_warehouse(load, costs),
        _auditors(load),
        _network(load),
    ]


def bottleneck(needs: list[Need]) -> Need:
    """The part that reaches its limit first as the load grows."""
    return min(needs, key=lambda need: need.ends_at)


def shards_for(load: Load, costs: Costs) -> int:
    """Shards by memory, by the time to apply rows, and so that commits take 1 % of the time.

    More shards cost more calls, because every worker calls every shard.
    """
    by_memory = load.rows * row_bytes(load) / (load.machine_gb * _GB * load.busy)
    by_time = load.requests_per_s * load.touched * costs.row_s / load.busy
    by_pause = (
        changed_rows(load, load.commit_interval_s)
        * costs.freeze_row_s
        / (load.commit_interval_s * _COMMIT_SHARE)
    )
    return max(1, math.ceil(max(by_memory, by_time, by_pause)))


def _kafka(load: Load, costs: Costs) -> list[Need]:
    rate, samples = load.requests_per_s, load.requests_per_s * load.sample_bytes
    events = samples + rate * load.engagements * 100
    deltas = changed_rows(load, 1.0) * delta_bytes(load)
    written = (events + samples + deltas) * load.replication
    kept = (events + samples) * load.retention_h * 3600 * load.replication
    partitions = partitions_for(load, costs)
    of_a_broker = (
        f"{written / _MB:,.0f} MB/s written, including replicas; {load.broker_mb:g} MB/s per broker is "
        "assumed; at least one for each replica"
    )
    brokers = max(
        math.ceil(written / _MB / load.broker_mb),
        math.ceil(kept / _GB / load.broker_disk_gb / _MAX_DISK_SHARE),
        load.replication,
    )
    why = (
        f"events and samples of {load.retention_h:g} h, {load.replication} replicas, uncompressed; "
        f"{load.broker_disk_gb:g} GB per broker, 80 % full"
    )
    return [
        Need(
            "partitions",
            min(partitions, MAX_PARTITIONS),
            "per topic",
            MAX_PARTITIONS / partitions_needed(load, costs) * rate,
            "two per task manager, one per worker and per other process that shares them, and the keys of a "
            f"day of each in the compactor's memory; at most {MAX_PARTITIONS}",
        ),
        Need("brokers", brokers, "", math.inf, of_a_broker),
        Need("Kafka's disks", kept / 1e12, "TB", math.inf, why),
    ]


def partitions_needed(load: Load, costs: Costs) -> float:
    """Partitions of each topic, in proportion to the load: at least two per task manager, and enough that a
    day of one partition fits in the compactor's memory, which is the share `busy` of a machine's."""
    key_bytes, room = load.requests_per_s * 86_400 * _SEAL_KEY_BYTES, _seal_room_bytes(load)
    return max(2 * _managers(costs), key_bytes / room if room else 0.0)


def _seal_room_bytes(load: Load) -> float:
    """Memory of a compactor for the keys of a day; 0 = a machine has too little for any number of
    partitions."""
    return max(load.machine_gb * _GB * load.busy - _SEAL_BYTES, 0.0)


def partitions_for(load: Load, costs: Costs) -> int:
    """The next power of two, from 4, and one at least for each process that shares the partitions; not
    limited."""
    workers = workers_for(costs, shards_for(load, costs)) or MAX_WORKERS
    sharing = max(workers, min(updaters_for(load), MAX_UPDATERS), min(auditors_for(load), MAX_AUDITORS))
    sample_s = max(costs.of(_ARCHIVE_TIME), costs.of(_COMPACT_TIME))
    by_sample = load.requests_per_s * sample_s / load.busy
    return 1 << math.ceil(math.log2(max(partitions_needed(load, costs), sharing, by_sample, 4)))


def _managers(costs: Costs) -> float:
    """Task managers by the time of the join, or by the disk that its state takes."""
    load = costs.load
    by_time = load.requests_per_s * (1 + load.engagements) * costs.join_event_s / load.busy
    return max(by_time, join_state_bytes(load) / (load.task_manager_disk_gb * _GB * load.busy))


def _joining(costs: Costs) -> list[Need]:
    why = (
        f"{costs.join_event_s / _S:.0f} µs per event: {SOURCES['join_event_us']}; times the assumed "
        "flink_share"
    )
    state, load = join_state_bytes(costs.load), costs.load
    holds = (
        f"{state / load.requests_per_s / _MB:,.1f} MB per request/s: bytes a request, docs/decisions/0012; "
        f"open for {load.window_s:g} s, then closed and expired for ten windows each (late_horizon_ms); "
        "on a heap about 2.5 times as much"
    )
    return [
        Need(
            "task managers",
            min(math.ceil(_managers(costs)), MAX_TASK_MANAGERS),
            "with one slot",
            MAX_TASK_MANAGERS / _managers(costs) * load.requests_per_s,
            f"{why}; or {load.task_manager_disk_gb:g} GB of disk each for the state; at most "
            f"{MAX_TASK_MANAGERS}, the maximum parallelism of the job",
        ),
        Need("joiner's state", state / _GB, "GB, serialized", math.inf, holds),
    ]


def join_state_bytes(load: Load) -> float:
    """Serialized state of the join, from bytes measured for each phase of a request (docs/decisions/0012)."""
    request = 176 + 8 * load.candidates + 43  # its entry, due time and counts
    is_open = request + load.sample_bytes + 300 + 202 * load.engagements
    is_closed = request + 63 * load.engagements
    is_expired = 118
    horizon_s = 10 * load.window_s
    seconds = is_open * load.window_s + (is_closed + is_expired) * horizon_s
    return load.requests_per_s * seconds


def _training(load: Load, costs: Costs, shards: int) -> list[Need]:
    workers, max_rate = workers_for(costs, shards), trained_at_max(costs, shards)
    readers = load.requests_per_s * costs.decode_s / load.busy
    trains = (
        f"{costs.train_s / _S:.0f} µs per request: {SOURCES['step_64_of_11_us']}; plus "
        f"{costs.turn_s / _MS:.1f} ms per step: {SOURCES['four_workers_ms']}; at most {MAX_WORKERS}, in "
        f"steps of {load.batch_requests} requests"
    )
    decodes = (
        f"{costs.decode_s / _S:.0f} µs per request, included in the workers' figure: "
        f"{SOURCES['decode_11_us']}"
    )
    return [
        Need("workers", workers or MAX_WORKERS, "with one core", max_rate, trains),
        Need("readers", math.ceil(readers), "with one core", math.inf, decodes),
    ]


def _rows(load: Load, costs: Costs, shards: int) -> list[Need]:
    changed = changed_rows(load, load.commit_interval_s)
    pause_s = changed / shards * costs.freeze_row_s + costs.of("cut_ms", _MS)
    rows = (
        f"1 % of the time in commits, {costs.row_s / _S:.2f} µs per row: {SOURCES['pull_row_us']}; "
        f"{SOURCES['push_row_us']}"
    )
    memory = (
        f"{row_bytes(load):.0f} bytes per row: values, equally wide state, key and timestamps, plus half "
        "for growth"
    )
    pause = (
        f"{costs.freeze_row_s * 1e9:.0f} ns per changed row of a shard, and the cut: "
        f"{SOURCES['freeze_ms']}; {SOURCES['cut_ms']}"
    )
    disk = f"{costs.figures['committed_mb']:.0f} bytes per changed row: {SOURCES['committed_mb']}"
    return [
        Need("shards", shards, "", MAX_BUCKETS / shards * load.requests_per_s, rows),
        Need("shards' memory", load.rows * row_bytes(load) / _GB, "GB in total", math.inf, memory),
        Need("a commit's pause", pause_s / _MS, "ms", math.inf, pause),
        Need("a commit's bytes", changed * costs.figures["committed_mb"] / _MB, "MB", math.inf, disk),
    ]


def _serving(load: Load, costs: Costs) -> list[Need]:
    full = load.network_gbit * _GBIT * load.busy
    processes = load.requests_per_s * costs.serve_s / load.busy
    machines = serving_machines(load, costs)
    deltas_bytes = changed_rows(load, 1.0) * delta_bytes(load)
    ends_at = full / (load.touched * delta_bytes(load)) if load.rows * delta_bytes(load) > full else math.inf
    brokers_at = _limit(load, lambda at: _delta_bytes_of_a_broker(at, costs) <= full)
    each = min(math.ceil(processes / machines), load.machine_cores)
    memory = load.rows * replica_bytes(load) / _GB * each
    fits = memory <= load.machine_gb * load.busy
    why = (
        f"a copy in each of {each} processes (rows = replica)"
        if fits
        else f"a copy in each of {each} processes is more than a machine has: rows = cache"
    )
    served = f"{costs.serve_s / _S:,.0f} µs per request: {SOURCES['serve_20_us']}; {SOURCES['serve_200_us']}"
    deltas = f"each row that changes in a second, to every serving machine with {load.network_gbit:g} Gbit/s"
    return [
        Need("serving processes", math.ceil(processes), "with one core", math.inf, served),
        Need("serving machines", machines, f"of {load.machine_cores} cores", math.inf, "of these processes"),
        Need("a serving machine's memory", memory, "GB", math.inf, why),
        Need("row deltas", deltas_bytes / _MB, "MB/s", ends_at, deltas),
        Need(
            "row deltas from Kafka",
            deltas_bytes * machines / _MB,
            f"MB/s to {machines} serving machines",
            brokers_at,
            f"the same to each of them, from all brokers together, each with {load.network_gbit:g} Gbit/s",
        ),
    ]


def serving_machines(load: Load, costs: Costs) -> int:
    """Each has all rows, or a cache of them, and as many processes as cores."""
    return math.ceil(load.requests_per_s * costs.serve_s / load.busy / load.machine_cores)


def _delta_bytes_of_a_broker(load: Load, costs: Costs) -> float:
    brokers = next(need.amount for need in _kafka(load, Costs(load, costs.figures)) if need.what == "brokers")
    at = Costs(load, costs.figures)
    return changed_rows(load, 1.0) * delta_bytes(load) * serving_machines(load, at) / brokers


def _limit(load: Load, fits: Callable[[Load], bool]) -> float:
    """The highest rate at which `fits` holds, to 0.1 %; inf beyond 10^9 requests/s. `fits` holds at no rate
    above one at which it does not."""

    def at(rate: float) -> bool:
        return fits(dataclasses.replace(load, requests_per_s=rate))

    low, high = 1e-3, 1e9
    if at(high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle) else (low, middle)
    return low


def _dedupe(load: Load, costs: Costs, shards: int) -> Need:
    """Sample ids that workers remember (trainer/dedupe.py)."""
    ids = load.requests_per_s * load.dedupe_h * 3600
    workers = workers_for(costs, shards) or MAX_WORKERS
    limit = MAX_WORKERS * load.machine_gb * _GB * load.busy / _ID_BYTES
    ends_at = limit / (load.dedupe_h * 3600) if load.dedupe_h else math.inf
    why = (
        f"{_ID_BYTES} bytes an id (trainer/dedupe.py) for {load.dedupe_h:g} h; a commit writes the new ones, "
        "and a smaller file now and then again"
    )
    return Need("dedupe ids", ids * _ID_BYTES / workers / _GB, "GB in each worker", ends_at, why)


def _controller(load: Load, costs: Costs) -> Need:
    """Each member keeps two connections: for heartbeats, which the controller holds, and for results."""

    def connections(at: Load) -> int:
        costs_at = Costs(at, costs.figures)
        shards = shards_for(at, costs_at)
        return 2 * (shards + (workers_for(costs_at, shards) or MAX_WORKERS))

    return Need(
        "controller",
        connections(load),
        "connections",
        _limit(load, lambda at: connections(at) <= MAX_CONNECTIONS - _SPARE_CONNECTIONS),
        f"two for each shard and worker; one controller, which accepts {MAX_CONNECTIONS}, "
        f"{_SPARE_CONNECTIONS} of them for readers and commands",
    )


def _online_features(load: Load) -> list[Need]:
    events = 1 + load.engagements
    state = load.users * _USER_BYTES + load.items * _ITEM_BYTES
    fits = state <= load.machine_gb * _GB * load.busy
    updaters = updaters_for(load)

    memory = (
        f"at most {_USER_BYTES} bytes a user and {_ITEM_BYTES} an item (serving/online_features/store.py), "
        "without declared counters"
    )
    return [
        Need(
            "feature updaters",
            min(updaters, MAX_UPDATERS),
            "with one core",
            MAX_UPDATERS * load.busy / (events * load.updater_us * _S * load.core),
            f"{load.updater_us:g} µs per event are assumed (updater_us); at most {MAX_UPDATERS}",
        ),
        Need(
            "Redis",
            _redis_cores(load),
            "cores of one thread",
            _limit(load, lambda at: _redis_cores(at) <= at.busy),
            f"a read per request and a write per event; {load.redis_us:g} µs each are assumed (redis_us), "
            f"a read {_READ_OF_UPDATER:g} times more for each further updater",
        ),
        Need("Redis' memory", state / _GB, "GB", math.inf if fits else 0.0, memory),
    ]


def updaters_for(load: Load) -> int:
    """Feature updaters that keep up, without a limit."""
    return math.ceil(
        load.requests_per_s * (1 + load.engagements) * load.updater_us * _S * load.core / load.busy
    )


def _redis_cores(load: Load) -> float:
    """Every request reads what each updater counted of its candidates."""
    reads = 1 + _READ_OF_UPDATER * (min(updaters_for(load), MAX_UPDATERS) - 1)
    return load.requests_per_s * (reads + 1 + load.engagements) * load.redis_us * _S * load.core


def _by_partition(what: str, figure: str, load: Load, costs: Costs) -> Need:
    """Processes that share the partitions; `figure`: what a sample costs one of them."""
    processes = load.requests_per_s * costs.of(figure) / load.busy
    return Need(
        what,
        min(math.ceil(processes), MAX_PARTITIONS),
        "with one core",
        MAX_PARTITIONS / processes * load.requests_per_s,
        f"{costs.of(figure) / _S:.0f} µs per sample: {SOURCES[figure]}; at most one per partition",
    )


def _warehouse(load: Load, costs: Costs) -> list[Need]:
    partitions = min(partitions_for(load, costs), MAX_PARTITIONS)
    keys = load.requests_per_s * 86_400 * _SEAL_KEY_BYTES / partitions
    room = _seal_room_bytes(load)
    return [
        _by_partition("archivers", _ARCHIVE_TIME, load, costs),
        _by_partition("compactors", _COMPACT_TIME, load, costs),
        Need(
            "a compactor's memory",
            (keys + _SEAL_BYTES) / _GB,
            "GB",
            room * MAX_PARTITIONS / keys / partitions * load.requests_per_s,
            f"{_SEAL_KEY_BYTES} bytes for each sample of a day of one of {partitions} partitions, and "
            f"{_SEAL_BYTES / _GB:.2g} GB for what it merges at once (merge_bytes)",
        ),
    ]


def _auditor_limit(load: Load) -> float:
    """Requests per second of the most auditors. They read impressions, engagements, samples and predictions,
    and the first one compares the model."""
    request_us = (3 + load.engagements) * load.auditor_us + load.compare_us
    return MAX_AUDITORS * load.busy / (request_us * _S * load.core)


def auditors_for(load: Load) -> int:
    """Auditors that keep up, a power of two because they divide the partitions; not limited."""
    number = math.ceil(load.requests_per_s / _auditor_limit(load) * MAX_AUDITORS)
    return 1 << (number - 1).bit_length()


def _auditors(load: Load) -> Need:
    return Need(
        "auditors",
        min(auditors_for(load), MAX_AUDITORS),
        "with one core",
        _auditor_limit(load),
        f"{load.auditor_us:g} µs per record (auditor_us) and {load.compare_us:g} per request (compare_us) "
        f"are assumed; a divisor of the partitions, at most {MAX_AUDITORS}. Behind, they delay no training",
    )


def _network(load: Load) -> Need:
    """Joiner, feature updater and auditor read events; workers and auditor read samples."""
    events = load.sample_bytes + load.engagements * 100
    topics = events * (load.replication + 3) + load.sample_bytes * (load.replication + 2)
    rows = 2 * load.touched * (4 * load.dim + 12)
    why = (
        f"{topics:,.0f} bytes per request for topics, including replicas and readers, and {rows:,.0f} "
        "for rows pulled and pushed"
    )
    return Need(
        "network",
        load.requests_per_s * (topics + rows) / _MB,
        "MB/s in total, without row deltas",
        math.inf,
        why,
    )
