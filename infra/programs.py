"""Our own programs of a stack: the TOML that each is given, and how it is started."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from infra import kinds
from infra.child import GRACE_S, Program
from infra.home import Home
from infra.kinds import Site
from infra.options import StackOptions
from infra.places import Places, address
from roostream.errors import ConfigError
from roostream.runtime.program import REFUSED_CODE


def site_of(name: str, home: Home, options: StackOptions, places: Places) -> Site:
    index = kinds.kind_of(name).names(options).index(name)
    metrics = address(places.metrics[name]) if name in places.metrics else ""
    return Site(
        name=name, index=index, home=home, options=options, at=places.endpoints(options), metrics=metrics
    )


def settings(site: Site) -> dict[str, Any]:
    """The TOML of a program, overrides included: of its kind first, then its own."""
    kind, options = kinds.kind_of(site.name), site.options
    shared = {
        "bootstrap": site.at.kafka,
        "prefix": options.prefix,
        "schema": options.schema.resolve(),
        "partitions": options.partitions,
        "buckets": options.buckets,
    }
    table = {**(shared if kind.shared else {}), **kind.own(site)}
    if site.metrics:
        table["metrics_port"] = int(site.metrics.rpartition(":")[2])
    for override in (options.overrides.get(kind.name, {}), options.overrides.get(site.name, {})):
        for key, value in override.items():
            table[key] = {**table.get(key, {}), **value} if isinstance(value, Mapping) else value
    if table.get("tls_certificate"):
        raise ConfigError(
            f"{site.name}: expected no tls_certificate in a local stack, which asks its programs by http on loopback; "
            f"start `roostream {kind.name}` by itself for that"
        )
    return table


def program(site: Site, env: Mapping[str, str]) -> Program:
    """How the supervisor starts one. Its TOML is written anew before every start."""
    kind = kinds.kind_of(site.name)
    conf = site.home.conf / f"{site.name}.toml"

    def prepare() -> None:
        table = settings(site)
        if kind.name == "joiner" and kinds.joins_on_flink(site.options):
            table["restore"] = kinds.restore_point(site)
        conf.touch(mode=0o600)
        conf.chmod(0o600)  # an override may hold a password
        conf.write_text(tomli_w.dumps(plain(table)), encoding="utf-8")

    return Program(
        name=site.name,
        command=(sys.executable, "-m", "roostream.cli.main", kind.name, "--config", str(conf)),
        log=site.home.log(site.name),
        env=env,
        needs=kind.needs(site.options),
        after=kind.after + _own_archive(site),
        prepare=prepare,
        ready=lambda: kind.ready(site),
        stop_rank=kind.stop_rank,
        stop_timeout_s=GRACE_S,
        metrics=site.at.metrics.get(site.name),
        restarted=kind.restarted,
        refusal=REFUSED_CODE,
        reads=(site.options.schema,) if kind.shared else (),
        place=site.home.root,
    )


def _own_archive(site: Site) -> tuple[str, ...]:
    """A controller whose model begins in the archive of this very stack is started when that is there."""
    chosen = site.options.overrides.get("controller", {}).get("warehouse", "")
    own = site.home.root / "warehouse"
    is_own = site.name == "controller" and chosen and Path(str(chosen)).absolute() == own
    return tuple(kinds.BY_NAME["archiver"].names(site.options)) if is_own else ()


def plain(value: Any) -> Any:
    """`value` with paths as text, tuples as lists and settings as tables, as TOML can hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
