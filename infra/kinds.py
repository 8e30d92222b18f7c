"""The table of our programs: what each is called, reads, needs, and when it stops. A new program is one row here.

The command makes a sub-command of each row, `--set` checks keys against its settings, the stack starts, probes and stops by it.
Settings and bodies are named as text and imported only when they are asked for: a shard never pays for torch.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from infra import ports, restore_points
from infra.child import StopRank
from infra.flink_cluster import JOB_MANAGER, task_manager
from infra.home import Home
from infra.options import StackOptions
from infra.places import Endpoints
from roostream.errors import ConfigError, UnavailableError, nearest
from roostream.runtime.flink_rest import FlinkRest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One program of one stack: `name` is unique there, `index` counts those of its kind from 0."""

    name: str
    index: int
    home: Home
    options: StackOptions
    at: Endpoints
    metrics: str = ""  # host:port of its /metrics and probes; "" before ports are drawn


def _one(options: StackOptions) -> int:
    return 1


def _kafka(options: StackOptions) -> tuple[str, ...]:
    return ("kafka",)


def _is_ready(site: Site) -> bool:
    return ports.responds(f"http://{site.metrics}/readyz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """`own` gives the settings beyond what all programs share; `ready` is a probe of at most a second or so."""

    name: str  # the sub-command
    help: str
    config: str  # "module:class" of the settings
    run: str  # "module:function": settings → exit code
    own: Callable[[Site], dict[str, Any]]
    stop_rank: StopRank
    ready: Callable[[Site], bool] = _is_ready
    needs: Callable[[StackOptions], tuple[str, ...]] = (
        _kafka  # are wanted with it; it waits for them by itself
    )
    after: tuple[str, ...] = ()  # are ready before it is started
    count: Callable[[StackOptions], int] | None = None  # how many; None = one, without a number in its name
    first_plain: bool = False  # the first has no number in its name, since most stacks have one only
    shared: bool = True  # reads what all programs share (Kafka, prefix, schema)
    restarted: bool = True  # False: it ends by itself

    def names(self, options: StackOptions) -> list[str]:
        """The programs of this kind in a stack."""
        return [self.name] if self.count is None else [self.name_of(i) for i in range(self.count(options))]

    def name_of(self, index: int) -> str:
        """Of the program with this number, of a kind that can be many."""
        return self.name if self.first_plain and index == 0 else f"{self.name}-{index}"

    def settings(self) -> type[Any]:
        """The class of its settings."""
        return _named(self.config)

    def body(self) -> Callable[[Any], int]:
        """What it does with its settings until a signal; gives the exit code."""
        return _named(self.run)


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


def _seeded(site: Site, **own: Any) -> dict[str, Any]:
    return {**own, "store": site.home.store, "seed": site.options.seed}


def _shard(site: Site) -> dict[str, Any]:
    own = _seeded(
        site,
        listen=site.at.shards[site.index],
        controller=site.at.controller,
        home=site.home.root / site.name,
    )
    return {**own, "index": site.index, "num_shards": site.options.num_shards}


def _controller(site: Site) -> dict[str, Any]:
    others = [
        f"{name}={url}" for name, url in site.at.metrics.items() if name != site.name and not is_reader(name)
    ]
    own: dict[str, Any] = {
        "num_shards": site.options.num_shards,
        "num_workers": site.options.num_workers,
        "neighbours": others,
    }
    if least := site.options.min_readers:
        own["readers"] = {"least": least, "most": max(least, site.options.max_readers)}
    return _seeded(site, listen=site.at.controller, **own)


def _worker(site: Site) -> dict[str, Any]:
    own: dict[str, Any] = {"home": site.home.root / site.name}
    if site.options.min_readers:
        own["readers"] = {"by": "programs"}
    return _seeded(site, controller=site.at.controller, shards=site.at.shards, index=site.index, **own)


def _serving(site: Site) -> dict[str, Any]:
    listen = site.at.serving.removeprefix("http://")
    own = _seeded(
        site, listen=listen, shards=site.at.shards, redis=_redis(site), home=site.home.root / site.name
    )
    if site.options.serving_processes > 1:
        own |= {"reuse_port": True}
    return {**own, "status_page": site.at.metrics.get("controller", "").removesuffix("metrics")}


def _features(site: Site) -> dict[str, Any]:
    return {"redis": _redis(site)}


def _auditor(site: Site) -> dict[str, Any]:
    """Of a replay it remembers all ids: times of events and of dead letters are years apart."""
    settle_ms = site.options.settle_ms
    own = {"home": site.home.root / site.name, "settle_ms": settle_ms}
    return {**own, "horizon_ms": 0 if site.options.replay else max(2 * settle_ms, 1_800_000)}


def _archiver(site: Site) -> dict[str, Any]:
    own = {"store": site.home.store, "warehouse": site.home.root / "warehouse", "index": site.index}
    return {**own, "num_archivers": site.options.num_archivers}


def _compactor(site: Site) -> dict[str, Any]:
    return {"warehouse": site.home.root / "warehouse"}


def _reader(site: Site) -> dict[str, Any]:
    return {"controller": site.at.controller}


def _joiner(site: Site) -> dict[str, Any]:
    """A job that runs already is watched; a new one goes on from the newest savepoint or checkpoint."""
    own = {
        "store": site.home.store,
        "home": site.home.root / site.name,
        "flink": site.at.flink,
        "replay": site.options.replay,
    }
    return {**own, "parallelism": site.options.num_task_managers}


def _simulate(site: Site) -> dict[str, Any]:
    return {"serving": site.at.serving, "seed": site.options.seed, "report": site.home.root / "simulate.json"}


def _redis(site: Site) -> str:
    return f"redis://{site.at.redis}/0"


def joins_on_flink(options: StackOptions) -> bool:
    return options.overrides.get("joiner", {}).get("engine", "flink") == "flink"


def restore_point(site: Site) -> str:
    """Where a new joiner job goes on from; "" = none, or a job runs already. Deletes what is older."""
    flink = site.home.root / "flink"
    if _has_job(site.at.flink):
        return ""
    restore_points.clean(flink)
    return str(restore_points.newest(flink) or "")


def _has_job(url: str) -> bool:
    try:
        return FlinkRest(url).live_job() is not None
    except UnavailableError:  # a job manager that is away runs none
        return False


def _joiner_needs(options: StackOptions) -> tuple[str, ...]:
    if not joins_on_flink(options):
        return ("kafka",)
    return ("kafka", JOB_MANAGER, *(task_manager(i) for i in range(options.num_task_managers)))


def _joiner_ready(site: Site) -> bool:
    return FlinkRest(site.at.flink).is_running() if joins_on_flink(site.options) else _is_ready(site)


KINDS = (  # in order of starting
    Kind(
        name="shard",
        help="Hold a part of the embedding rows.",
        config="param_server.config:ShardConfig",
        run="param_server.main:run",
        own=_shard,
        count=lambda options: options.num_shards,
        ready=lambda site: ports.answers(site.at.shards[site.index]),
        stop_rank=StopRank.SHARD,
    ),
    Kind(
        name="controller",
        help="Commit, restore and watch workers and shards.",
        config="trainer.config:ControllerConfig",
        run="trainer.main:run_controller",
        own=_controller,
        stop_rank=StopRank.CONTROLLER,
    ),
    Kind(
        name="worker",
        help="Train on samples as they come.",
        config="trainer.config:WorkerConfig",
        run="trainer.main:run_worker",
        own=_worker,
        count=lambda options: options.num_workers,
        first_plain=True,
        stop_rank=StopRank.WORKER,
    ),
    Kind(
        name="serving",
        help="Score requests over HTTP and log what was scored.",
        config="serving.config:ServingConfig",
        run="serving.main:run",
        own=_serving,
        count=lambda options: options.serving_processes,
        first_plain=True,
        stop_rank=StopRank.SERVING,
    ),
    Kind(
        name="features",
        help="Keep user histories and item counters in Redis.",
        config="serving.online_features.config:FeaturesConfig",
        run="serving.online_features.main:run",
        own=_features,
        stop_rank=StopRank.FEATURES,
    ),
    Kind(
        name="auditor",
        help="Add up the topics, so that every event is accounted for.",
        config="infra.auditor.config:AuditorConfig",
        run="infra.auditor.auditor_program:run",
        own=_auditor,
        stop_rank=StopRank.FEATURES,
    ),
    Kind(
        name="joiner",
        help="Join impressions and engagements into samples (a Flink job).",
        config="joiner.config:JoinerConfig",
        run="joiner.main:run",
        own=_joiner,
        needs=_joiner_needs,
        ready=_joiner_ready,
        stop_rank=StopRank.JOINER,
    ),
    Kind(
        name="archiver",
        help="Keep samples and corrections in the warehouse, exactly once.",
        config="roostream.warehouse.config:ArchiverConfig",
        run="roostream.warehouse.archiver_program:run_archiver",
        own=_archiver,
        count=lambda options: options.num_archivers,
        first_plain=True,
        stop_rank=StopRank.FEATURES,
    ),
    Kind(
        name="compactor",
        help="Seal days of the warehouse, and delete what nobody needs.",
        config="roostream.warehouse.config:CompactorConfig",
        run="roostream.warehouse.compactor_program:run_compactor",
        own=_compactor,
        needs=lambda options: (),
        count=lambda options: min(options.num_archivers, 1),
        first_plain=True,
        shared=False,
        stop_rank=StopRank.FEATURES,
    ),
    Kind(
        name="reader",
        help="Read the warehouse's session that is trained, for the workers that train it.",
        config="roostream.warehouse.readers.config:ReaderConfig",
        run="roostream.warehouse.readers.reader_program:run_reader",
        own=_reader,
        needs=lambda options: (),
        count=lambda options: options.min_readers,
        shared=False,
        stop_rank=StopRank.FEATURES,
    ),
    Kind(
        name="simulate",
        help="Simulated users against a serving program.",
        config="roostream.replay.config:SimulateConfig",
        run="roostream.replay.main:run_simulate",
        own=_simulate,
        needs=lambda options: ("serving",),
        after=("serving",),
        shared=False,
        restarted=False,
        stop_rank=StopRank.TRAFFIC,
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}
SIMULATE, WORKER, READER = "simulate", "worker", "reader"


def kind_of(name: str) -> Kind:
    """The kind of a program: that of `shard` for `shard-0`.

    Raises:
        ConfigError: there is none.
    """
    stem, _, number = name.rpartition("-")
    kind = BY_NAME.get(stem if stem and number.isdecimal() else name)
    if (
        kind is None
        or (kind.count is None and kind.name != name)
        or (kind.first_plain and name == f"{kind.name}-0")
    ):
        raise ConfigError(f"no program {name!r}{nearest(name, BY_NAME)}")
    return kind


def is_worker(name: str) -> bool:
    return name == WORKER or name.startswith(f"{WORKER}-")


def is_reader(name: str) -> bool:
    return name.startswith(f"{READER}-")


def names(options: StackOptions) -> list[str]:
    """Every program of ours in a stack, in order of starting."""
    return [name for kind in KINDS for name in kind.names(options)]
