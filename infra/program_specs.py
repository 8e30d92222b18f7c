"""The table of Roostream's programs: name, settings, dependencies and stop order. A new program is one row
here.

The CLI makes a sub-command of each row, `--set` checks keys against its settings class, and the stack starts,
probes and stops programs by it. Settings classes and entry points are named as text and imported on use: a
shard never loads torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from infra.auditor.config import horizon_for
from infra.child import STOP_TIMEOUT_S, Program, StopRank
from infra.flink_cluster import JOB_MANAGER, task_manager
from infra.home import Home
from infra.options import StackOptions, to_toml_value
from infra.ports import Endpoints, is_listening, port_of, responds_ok
from roostream.errors import ConfigError, UnavailableError, nearest
from roostream.runtime import program
from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.flink_rest import FlinkRest
from roostream.runtime.flink_restore_points import delete_old_restore_points
from roostream.runtime.program import REFUSED_CODE, Stop, log_kernel_compilation
from roostream.schema.settings import environment_variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramInstance:
    """One program of one stack. `name` is unique in the stack; `index` counts the instances of a spec from
    0."""

    name: str
    index: int
    home: Home
    options: StackOptions
    endpoints: Endpoints

    @property
    def metrics_address(self) -> str:
        """host:port of /metrics and the probes."""
        return self.endpoints.metrics[self.name].removeprefix("http://").removesuffix("/metrics")


def _is_ready(instance: ProgramInstance) -> bool:
    return responds_ok(f"http://{instance.metrics_address}/readyz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """A row of the table."""

    name: str  # the CLI's sub-command
    help: str
    config: str  # "module:class" of the settings
    run: str  # "module:function" that runs with settings until a `Stop`
    # Settings in a stack, without the common ones.
    local_settings: Callable[[ProgramInstance], dict[str, Any]]
    stop_rank: StopRank
    ready: Callable[[ProgramInstance], bool] = _is_ready  # a probe that takes about a second at most
    # Programs that are started with it; it waits for them by itself.
    needs: Callable[[StackOptions], tuple[str, ...]] = lambda options: ("kafka",)
    after: tuple[str, ...] = ()  # programs that are ready before this one starts
    count: Callable[[StackOptions], int] | None = None  # number of instances; None = one, without a number
    first_unnumbered: bool = False  # the first instance has no number in its name
    common_settings: bool = True  # it reads Kafka, prefix and schema
    restart: bool = True  # False: it ends by itself

    def instance_names(self, options: StackOptions) -> list[str]:
        if self.count is None:
            return [self.name]
        return [self.instance_name(i) for i in range(self.count(options))]

    def instance_name(self, index: int) -> str:
        return self.name if self.first_unnumbered and index == 0 else f"{self.name}-{index}"

    def settings_class(self) -> type[Any]:
        return _import(self.config)

    def entry_point(self) -> Callable[[Any, Stop], None]:
        """Import the function that runs the program with its settings until the `Stop` is set."""
        return _import(self.run)

    def run_until_signal(self, config: Any) -> int:
        """Import the program and run it. Returns the exit code of `roostream.runtime.program.run`."""

        def body(stop: Stop) -> None:
            run = self.entry_point()
            log_kernel_compilation()
            run(config, stop)

        number = f" {config.index}" if hasattr(config, "index") else ""
        return program.run(f"{self.name}{number}", body, config.log_format)


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _common(instance: ProgramInstance, *keys: str) -> dict[str, Any]:
    """Those of the settings that many programs have."""
    options = instance.options
    settings = {
        "bootstrap": instance.endpoints.kafka,
        "prefix": options.prefix,
        "schema": options.schema.resolve(),
        "partitions": options.partitions,
        "buckets": options.buckets,
        "controller": instance.endpoints.controller,
        "redis": f"redis://{instance.endpoints.redis}/0",
        "warehouse": instance.home.root / "warehouse",
        "home": instance.home.root / instance.name,
        "store": instance.home.store,
        "seed": options.seed,
        "index": instance.index,
    }
    return {key: settings[key] for key in keys}


def _shard(instance: ProgramInstance) -> dict[str, Any]:
    return {
        **_common(instance, "controller", "home", "store", "seed", "index"),
        "listen": instance.endpoints.shards[instance.index],
        "num_shards": instance.options.num_shards,
    }


def _controller(instance: ProgramInstance) -> dict[str, Any]:
    at, options = instance.endpoints, instance.options
    targets = [f"{n}={url}" for n, url in at.metrics.items() if n != instance.name and not is_reader(n)]
    table = {
        **_common(instance, "store", "seed"),
        "listen": at.controller,
        "num_shards": options.num_shards,
        "num_workers": options.num_workers,
        "scrape_targets": targets,
    }
    if min_readers := options.min_readers:
        table["readers"] = {"min_readers": min_readers, "max_readers": max(min_readers, options.max_readers)}
    return table


def _worker(instance: ProgramInstance) -> dict[str, Any]:
    readers = {"readers": {"by": "programs"}} if instance.options.min_readers else {}
    common = _common(instance, "controller", "home", "store", "seed", "index")
    return {**common, "shards": instance.endpoints.shards, **readers}


def _serving(instance: ProgramInstance) -> dict[str, Any]:
    at, options = instance.endpoints, instance.options
    table = {
        **_common(instance, "redis", "home", "store", "seed"),
        "listen": at.serving.removeprefix("http://"),
        "shards": at.shards,
        "join_window_ms": options.window_ms,
        "status_page": at.metrics.get("controller", "").removesuffix("metrics"),
    }
    if model := options.overrides.get("worker", {}).get("model"):
        table["model"] = model  # with the code of a custom model, without which no version can be loaded
    if options.serving_processes > 1:
        table["reuse_port"] = True
    return table


def _features(instance: ProgramInstance) -> dict[str, Any]:
    return {**_common(instance, "redis", "index"), "num_updaters": instance.options.num_updaters}


def _auditor(instance: ProgramInstance) -> dict[str, Any]:
    settle_ms = instance.options.settle_ms
    return {
        **_common(instance, "home", "index"),
        "num_auditors": instance.options.num_auditors,
        "settle_ms": settle_ms,
        "horizon_ms": horizon_for(settle_ms, replay=instance.options.replay),
    }


def _archiver(instance: ProgramInstance) -> dict[str, Any]:
    common = _common(instance, "store", "warehouse", "index")
    return {**common, "num_archivers": instance.options.num_archivers}


def _joiner(instance: ProgramInstance) -> dict[str, Any]:
    return {
        **_common(instance, "store", "home"),
        "flink": instance.endpoints.flink,
        "replay": instance.options.replay,
        "parallelism": instance.options.num_task_managers,
    }


def _simulate(instance: ProgramInstance) -> dict[str, Any]:
    return {
        "serving": instance.endpoints.serving,
        "seed": instance.options.seed,
        "report": instance.home.root / "simulate.json",
    }


def joins_on_flink(options: StackOptions) -> bool:
    """Whether the joiner of this stack runs on Flink."""
    return options.overrides.get("joiner", {}).get("engine", "flink") == "flink"


def _restore_folder(instance: ProgramInstance) -> str:
    """The folder with the newest restore point at the time when the joiner submits a new job. One without any
    begins a join with the oldest events, if none of its jobs has committed offsets to Kafka.

    Older restore points are deleted, but only when the job manager has said that no job runs: one that does
    not answer may still run a job that writes into these folders. That job may also have ended when the
    joiner asks, so what is newest now does not matter.
    """
    flink = instance.home.root / "flink"
    with contextlib.suppress(UnavailableError):
        if FlinkRest(instance.endpoints.flink).live_job() is None:
            delete_old_restore_points(flink)
    return str(flink)


def _joiner_needs(options: StackOptions) -> tuple[str, ...]:
    if not joins_on_flink(options):
        return ("kafka",)
    return ("kafka", JOB_MANAGER, *(task_manager(i) for i in range(options.num_task_managers)))


def _joiner_ready(instance: ProgramInstance) -> bool:
    if joins_on_flink(instance.options):
        return FlinkRest(instance.endpoints.flink).is_running()
    return _is_ready(instance)


PROGRAM_SPECS = (  # in start order
    ProgramSpec(
        name="shard",
        help="Run one shard of the parameter server.",
        config="param_server.config:ShardConfig",
        run="param_server.main:serve",
        local_settings=_shard,
        count=lambda options: options.num_shards,
        ready=lambda instance: is_listening(instance.endpoints.shards[instance.index]),
        stop_rank=StopRank.SHARD,
    ),
    ProgramSpec(
        name="controller",
        help="Run the controller: commits, restores, membership of workers and shards.",
        config="trainer.config:ControllerConfig",
        run="trainer.control.controller_program:run_until_stopped",
        local_settings=_controller,
        stop_rank=StopRank.CONTROLLER,
    ),
    ProgramSpec(
        name="worker",
        help="Run a trainer worker.",
        config="trainer.config:WorkerConfig",
        run="trainer.worker_program:run_until_stopped",
        local_settings=_worker,
        count=lambda options: options.num_workers,
        first_unnumbered=True,
        stop_rank=StopRank.WORKER,
    ),
    ProgramSpec(
        name="serving",
        help="Serve ranking requests over HTTP and log the served features.",
        config="serving.config:ServingConfig",
        run="serving.main:serve",
        local_settings=_serving,
        count=lambda options: options.serving_processes,
        first_unnumbered=True,
        stop_rank=StopRank.SERVING,
    ),
    ProgramSpec(
        name="features",
        help="Update user histories and item counters in Redis.",
        config="serving.online_features.config:FeaturesConfig",
        run="serving.online_features.updater:run_until_stopped",
        local_settings=_features,
        count=lambda options: options.num_updaters,
        first_unnumbered=True,
        stop_rank=StopRank.FEATURES,
    ),
    ProgramSpec(
        name="auditor",
        help="Check over all topics that every event is accounted for.",
        config="infra.auditor.config:AuditorConfig",
        run="infra.auditor.auditor_program:run_until_stopped",
        local_settings=_auditor,
        count=lambda options: options.num_auditors,
        first_unnumbered=True,
        stop_rank=StopRank.FEATURES,
    ),
    ProgramSpec(
        name="joiner",
        help="Join impressions and engagements into samples (a Flink job).",
        config="joiner.config:JoinerConfig",
        run="joiner.main:run_until_stopped",
        local_settings=_joiner,
        needs=_joiner_needs,
        ready=_joiner_ready,
        stop_rank=StopRank.JOINER,
    ),
    ProgramSpec(
        name="archiver",
        help="Write samples and corrections to the warehouse, exactly once.",
        config="roostream.warehouse.config:ArchiverConfig",
        run="roostream.warehouse.archiver_program:archive",
        local_settings=_archiver,
        count=lambda options: options.num_archivers,
        first_unnumbered=True,
        stop_rank=StopRank.FEATURES,
    ),
    ProgramSpec(
        name="compactor",
        help="Seal days of the warehouse and delete unneeded files.",
        config="roostream.warehouse.config:CompactorConfig",
        run="roostream.warehouse.compactor_program:compact",
        local_settings=lambda instance: _common(instance, "warehouse"),
        needs=lambda options: (),
        count=lambda options: min(options.num_archivers, 1),
        first_unnumbered=True,
        common_settings=False,
        stop_rank=StopRank.FEATURES,
    ),
    ProgramSpec(
        name="reader",
        help="Read a training session's files from the warehouse for workers.",
        config="roostream.warehouse.readers.config:ReaderConfig",
        run="roostream.warehouse.readers.reader_program:read",
        local_settings=lambda instance: _common(instance, "controller"),
        needs=lambda options: (),
        count=lambda options: options.min_readers,
        common_settings=False,
        stop_rank=StopRank.FEATURES,
    ),
    ProgramSpec(
        name="simulate",
        help="Send requests of simulated users to a serving program.",
        config="roostream.replay.config:SimulateConfig",
        run="roostream.replay.main:simulate",
        local_settings=_simulate,
        needs=lambda options: ("serving",),
        after=("serving",),
        common_settings=False,
        restart=False,
        stop_rank=StopRank.TRAFFIC,
    ),
)
SPECS_BY_NAME = {spec.name: spec for spec in PROGRAM_SPECS}
SIMULATE, WORKER, READER = "simulate", "worker", "reader"


def find_spec(name: str) -> ProgramSpec:
    """The spec of a program: that of `shard` for `shard-0`.

    Raises:
        ConfigError: there is no such program.
    """
    stem, _, number = name.rpartition("-")
    spec = SPECS_BY_NAME.get(stem if stem and number.isdecimal() else name)
    is_numbered = spec is not None and spec.name != name
    if (
        spec is None
        or (is_numbered and spec.count is None)
        or (spec.first_unnumbered and name == f"{spec.name}-0")
    ):
        raise ConfigError(f"no program {name!r}{nearest(name, SPECS_BY_NAME)}")
    return spec


def possible_instances(name: str, options: StackOptions) -> list[str]:
    """The instances of a spec, or of the spec of an instance, that this stack has or may start later."""
    spec = find_spec(name)
    scaled = {
        WORKER: min(options.partitions, MAX_WORKERS),
        READER: max(options.min_readers, options.max_readers),
    }
    if spec.name in scaled:
        return [spec.instance_name(index) for index in range(scaled[spec.name])]
    return spec.instance_names(options)


def is_worker(name: str) -> bool:
    """Whether a program of this name is a worker."""
    return name == WORKER or name.startswith(f"{WORKER}-")


def is_reader(name: str) -> bool:
    """Whether a program of this name is an input reader."""
    return name.startswith(f"{READER}-")


def program_names(options: StackOptions) -> list[str]:
    """Roostream's programs of a stack, in start order."""
    return [name for spec in PROGRAM_SPECS for name in spec.instance_names(options)]


def build_instance(name: str, home: Home, options: StackOptions, endpoints: Endpoints) -> ProgramInstance:
    """The instance of a program that has this name in the stack."""
    index = find_spec(name).instance_names(options).index(name)
    return ProgramInstance(name=name, index=index, home=home, options=options, endpoints=endpoints)


def settings_table(instance: ProgramInstance) -> dict[str, Any]:
    """The content of a program's TOML file. Overrides of the spec come first, then those of the instance."""
    spec, options = find_spec(instance.name), instance.options
    table = _chosen_by_stack(instance)
    for override in (options.overrides.get(spec.name, {}), options.overrides.get(instance.name, {})):
        for key, value in override.items():
            table[key] = {**table.get(key, {}), **value} if isinstance(value, Mapping) else value
    if table.get("tls_certificate"):
        raise ConfigError(
            f"{instance.name}: expected no tls_certificate in a local stack, which probes its programs "
            f"by HTTP on loopback; start `roostream {spec.name}` separately to serve HTTPS"
        )
    return table


def _chosen_by_stack(instance: ProgramInstance) -> dict[str, Any]:
    """The settings that a stack chooses for a program."""
    spec = find_spec(instance.name)
    common = ("bootstrap", "prefix", "schema", "partitions", "buckets") if spec.common_settings else ()
    table = {**_common(instance, *common), **spec.local_settings(instance)}
    if instance.name in instance.endpoints.metrics:
        table["metrics_port"] = port_of(instance.metrics_address)
    return table


def check_stack_environment(instance: ProgramInstance, environ: Mapping[str, str]) -> None:
    """Raise ConfigError: a variable would replace a setting that the stack chooses, such as an address."""
    spec, chosen = find_spec(instance.name), _chosen_by_stack(instance)
    for variable, keys in environment_variables(spec.settings_class(), spec.name).items():
        if variable in environ and keys[0] in chosen:
            raise ConfigError(
                f"environment {variable}: expected it to be unset, because a local stack chooses {keys[0]!r} "
                f"of its programs; unset it, or use --set {spec.name}.{keys[0]}=…"
            )


def build_program(instance: ProgramInstance, env: Mapping[str, str]) -> Program:
    """The program as the supervisor starts it. Its TOML file is written before every start."""
    spec = find_spec(instance.name)
    conf = instance.home.conf / f"{instance.name}.toml"

    def prepare() -> None:
        table = settings_table(instance)
        if spec.name == "joiner" and joins_on_flink(instance.options):
            table["restore"] = _restore_folder(instance)
        conf.touch(mode=0o600)
        conf.chmod(0o600)  # an override may contain a password
        conf.write_text(tomli_w.dumps(to_toml_value(table)), encoding="utf-8")

    return Program(
        name=instance.name,
        command=(sys.executable, "-m", "roostream.cli.main", spec.name, "--config", str(conf)),
        log=instance.home.log(instance.name),
        env=env,
        needs=spec.needs(instance.options),
        after=spec.after + _archivers_before(instance),
        prepare=prepare,
        ready=lambda: spec.ready(instance),
        stop_rank=spec.stop_rank,
        stop_timeout_s=STOP_TIMEOUT_S,
        metrics=instance.endpoints.metrics.get(instance.name),
        restart=spec.restart,
        refused_code=REFUSED_CODE,
        watched_files=(instance.options.schema,) if spec.common_settings else (),
        cwd=instance.home.root,
    )


def _archivers_before(instance: ProgramInstance) -> tuple[str, ...]:
    """A controller whose model starts from this stack's own archive starts after the archivers."""
    warehouse = instance.options.overrides.get("controller", {}).get("warehouse", "")
    local_warehouse = instance.home.root / "warehouse"
    if instance.name != "controller" or not warehouse or Path(str(warehouse)).absolute() != local_warehouse:
        return ()
    return tuple(SPECS_BY_NAME["archiver"].instance_names(instance.options))
