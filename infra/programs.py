"""Our own programs of a stack: the TOML that each is given, and how it is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infra import ports, restore_points, toml
from infra.child import Program
from infra.flink_cluster import JOB_MANAGER, task_manager
from infra.home import Home
from infra.options import StackOptions
from infra.places import Endpoints, Places, address
from runtime import flink_rest

SIMULATE = "simulate"
FIXED = ("controller", "worker", "serving", "features", "joiner", SIMULATE)


def shard_names(options: StackOptions) -> list[str]:
    return [f"shard-{i}" for i in range(options.num_shards)]


def kind_of(name: str) -> str:
    """The sub-command of a program: `shard` for `shard-0`."""
    return "shard" if name.startswith("shard-") else name


def settings(name: str, home: Home, options: StackOptions, places: Places) -> dict[str, Any]:
    """The TOML of program `name`, overrides included."""
    at = places.endpoints(options)
    base = {"bootstrap": at.kafka, "prefix": options.prefix, "schema": options.schema.resolve()}
    table = _OWN[kind_of(name)](name, base, home, options, at)
    if name in places.metrics:
        table["metrics_port"] = places.metrics[name]
    return {**table, **options.overrides.get(kind_of(name), {}), **options.overrides.get(name, {})}


def _shard(name: str, base: dict[str, Any], home: Home, options: StackOptions, at: Endpoints) -> dict[str, Any]:
    index = int(name.removeprefix("shard-"))
    own = {
        "listen": at.shards[index],
        "controller": at.controller,
        "index": index,
        "num_shards": options.num_shards,
        "store": home.store,
    }
    return {**base, **own, "home": home.root / name, "seed": options.seed}


def _controller(name: str, base: dict[str, Any], home: Home, options: StackOptions, at: Endpoints) -> dict[str, Any]:
    return {**base, "listen": at.controller, "store": home.store, "num_shards": options.num_shards, "seed": options.seed}


def _worker(name: str, base: dict[str, Any], home: Home, options: StackOptions, at: Endpoints) -> dict[str, Any]:
    return {**base, "store": home.store, "controller": at.controller, "shards": at.shards, "seed": options.seed}


def _serving(name: str, base: dict[str, Any], home: Home, options: StackOptions, at: Endpoints) -> dict[str, Any]:
    listen = at.serving.removeprefix("http://")
    own = {"listen": listen, "store": home.store, "shards": at.shards, "redis": f"redis://{at.redis}/0"}
    return {**base, **own, "home": home.root / "serving", "seed": options.seed}


def _features(name: str, base: dict[str, Any], home: Home, options: StackOptions, at: Endpoints) -> dict[str, Any]:
    return {**base, "redis": f"redis://{at.redis}/0"}


def _joiner(name: str, base: dict[str, Any], home: Home, options: StackOptions, at: Endpoints) -> dict[str, Any]:
    own = {"store": home.store, "home": home.root / "joiner", "flink": at.flink, "parallelism": options.num_task_managers}
    return {**base, **own, "replay": options.replay}


def _simulate(name: str, base: dict[str, Any], home: Home, options: StackOptions, at: Endpoints) -> dict[str, Any]:
    return {"serving": at.serving, "seed": options.seed, "report": home.root / "simulate.json"}


_OWN: dict[str, Callable[[str, dict[str, Any], Home, StackOptions, Endpoints], dict[str, Any]]] = {
    "shard": _shard,
    "controller": _controller,
    "worker": _worker,
    "serving": _serving,
    "features": _features,
    "joiner": _joiner,
    SIMULATE: _simulate,
}


def joins_on_flink(options: StackOptions) -> bool:
    return options.overrides.get("joiner", {}).get("engine", "flink") == "flink"


def program(name: str, home: Home, options: StackOptions, places: Places, env: Mapping[str, str]) -> Program:
    """How the supervisor starts `name`. Its TOML is written anew before every start."""
    conf = home.conf / f"{name}.toml"
    at = places.endpoints(options)
    on_flink = name == "joiner" and joins_on_flink(options)

    def prepare() -> None:
        table = settings(name, home, options, places)
        if on_flink:
            table["restore"] = _restore_point(home.root / "flink", at.flink)
        conf.write_text(toml.render(table), encoding="utf-8")

    return Program(
        name=name,
        command=(sys.executable, "-m", "command.main", kind_of(name), "--config", str(conf)),
        log=home.log(name),
        env=env,
        needs=_needs(name, options, on_flink),
        prepare=prepare,
        ready=_probe(name, at, places, on_flink),
        stop_timeout_s={"serving": 25.0, "shard": 15.0}.get(kind_of(name), 10.0),
        metrics=at.metrics.get(name),
        restarted=name != SIMULATE,
        place=home.root,
    )


def _restore_point(flink: Path, url: str) -> str:
    if flink_rest.live_job(url) is not None:
        return ""
    restore_points.clean(flink)
    return str(restore_points.newest(flink) or "")


def _needs(name: str, options: StackOptions, on_flink: bool) -> tuple[str, ...]:
    if name == SIMULATE:
        return ("serving",)
    if on_flink:
        return ("kafka", JOB_MANAGER, *(task_manager(i) for i in range(options.num_task_managers)))
    return ("kafka",)


def _probe(name: str, at: Endpoints, places: Places, on_flink: bool) -> Callable[[], bool]:
    if on_flink:
        return lambda: flink_rest.is_running(at.flink)
    if name == "serving":
        return lambda: ports.responds(f"{at.serving}/readyz")
    if name == "controller":
        return lambda: ports.answers(at.controller)
    if kind_of(name) == "shard":
        return lambda: ports.answers(at.shards[int(name.removeprefix("shard-"))])
    return lambda: ports.answers(address(places.metrics[name]))
