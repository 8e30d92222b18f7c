"""Redis as a child process: the `redis-server` on PATH, else the one that `make setup` installed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from infra import ports
from infra.child import Program, StopRank
from infra.home import Home
from roostream.errors import SetupError


def find_redis() -> Path:
    """The `redis-server` to run. The installed fallback (6.2) is meant for laptops and tests.

    Raises:
        SetupError: none was found.
    """
    installed = Path(sys.prefix) / "bin"
    folders = os.environ.get("PATH", "").split(os.pathsep)
    system_path = os.pathsep.join(p for p in folders if Path(p) != installed)
    for path in (system_path, str(installed)):
        if found := shutil.which("redis-server", path=path):
            return Path(found)
    raise SetupError("no redis-server was found; run `make setup`, or install Redis 6 or later")


def redis_conf(data: Path, port: int) -> str:
    """No persistence: the content of Redis is rebuilt from the topics."""
    listen = f"bind {ports.HOST}\nport {port}\ntcp-backlog 128\n"
    return f'{listen}dir "{data}"\nsave ""\nappendonly no\ndaemonize no\n'


def redis_program(home: Home, env: Mapping[str, str], port: int) -> Program:
    """A Redis on loopback.

    Raises:
        SetupError: no `redis-server` was found.
    """
    data, conf = home.root / "redis", home.conf / "redis.conf"

    def prepare() -> None:
        data.mkdir(exist_ok=True)
        conf.write_text(redis_conf(data, port), encoding="utf-8")

    return Program(
        name="redis",
        # The folder on the command line contains the home, by which `Home.end_leftovers` recognizes the
        # process.
        command=(str(find_redis()), str(conf), "--dir", f"{data}/"),
        log=home.log("redis"),
        env=env,
        prepare=prepare,
        ready=lambda: ports.is_listening(f"{ports.HOST}:{port}"),
        stop_rank=StopRank.REDIS,
        stop_timeout_s=5.0,
        cwd=home.root,
    )
