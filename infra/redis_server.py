"""A Redis as a child process: the machine's own if there is one on PATH, else the one that set-up installed."""

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
        SetupError: there is none.
    """
    ours = Path(sys.prefix) / "bin"
    elsewhere = os.pathsep.join(p for p in os.environ.get("PATH", "").split(os.pathsep) if Path(p) != ours)
    for path in (elsewhere, str(ours)):
        if found := shutil.which("redis-server", path=path):
            return Path(found)
    raise SetupError("no redis-server was found; run `make setup`, or install Redis 6 or later")


def redis_conf(data: Path, port: int) -> str:
    """Nothing is kept on disk: what Redis holds is rebuilt from the topics."""
    return f'bind {ports.HOST}\nport {port}\ndir "{data}"\nsave ""\nappendonly no\ndaemonize no\ntcp-backlog 128\n'


def program(home: Home, env: Mapping[str, str], port: int) -> Program:
    """A Redis of our own on loopback, without persistence: what it holds is written again.

    Raises:
        SetupError: there is no Redis to start.
    """
    data, conf = home.root / "redis", home.conf / "redis.conf"

    def prepare() -> None:
        data.mkdir(exist_ok=True)
        conf.write_text(redis_conf(data, port), encoding="utf-8")

    return Program(
        name="redis",
        # The folder on the command line names the home there, which is how leftovers are told from other Redis servers.
        command=(str(find_redis()), str(conf), "--dir", f"{data}/"),
        log=home.log("redis"),
        env=env,
        prepare=prepare,
        ready=lambda: ports.answers(f"{ports.HOST}:{port}"),
        stop_rank=StopRank.REDIS,
        stop_timeout_s=5.0,
        place=home.root,
    )
