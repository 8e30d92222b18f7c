"""Workers beside `roostream train`, in processes of their own: the controller in this one restores and asks them, a supervisor
starts again whoever dies."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from infra.child import Program, StopRank
from infra.home import Home
from infra.options import ROOT
from infra.supervisor import Supervisor
from param_server.server import Shard, ShardRpcHandler
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.worker_process import WorkerTask
from roostream.runtime.program import REFUSED_CODE
from roostream.runtime.rpc.server import RpcServer
from trainer.config import LoopConfig
from trainer.control.controller import Controller

_STOP_S = 10.0


class WorkerProcesses:
    """From `open` to `close`."""

    def __init__(
        self, config: TrainConfig, settings: LoopConfig, home: Home, controller: Controller, readers: str
    ) -> None:
        """`readers`: where whoever reads for workers is told of; "" = they read for themselves."""
        self.config, self.settings, self.home, self.readers = config, settings, home, readers
        self.server = RpcServer(controller.handle)
        self.shards: list[RpcServer] = []
        self.supervisor = Supervisor()

    def open(self, shards: Sequence[Shard]) -> WorkerProcesses:
        """`shards`: those of this process; none where workers hold the rows."""
        self.server.start()
        self.shards = [RpcServer(ShardRpcHandler(shard).handle).start() for shard in shards]
        self.supervisor.open()
        self.supervisor.start([self._program(index) for index in range(self.config.workers)])
        return self

    def close(self) -> None:
        """Ends them, by force those that don't. Idempotent."""
        self.supervisor.stop(list(self.supervisor.slots))
        self.supervisor.close()
        for server in (*self.shards, self.server):
            server.stop()

    def failed(self) -> str:
        """Who stays down, and why; "" = nobody."""
        return ", ".join(
            f"{name} failed: {slot.last_error}"
            for name, slot in self.supervisor.slots.items()
            if slot.state == "failed"
        )

    def _program(self, index: int) -> Program:
        name = f"worker-{index}"
        conf = self.home.conf / f"{name}.json"
        task = WorkerTask(
            train=dataclasses.asdict(self.config),
            loop=dataclasses.asdict(self.settings),
            index=index,
            controller=self.server.address,
            readers=self.readers,
            shards=[server.address for server in self.shards],
        )

        def prepare() -> None:
            conf.parent.mkdir(parents=True, exist_ok=True)
            conf.write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")

        return Program(
            name=name,
            command=(sys.executable, "-m", "roostream.cli.train.worker_process", str(conf)),
            log=self.home.log(name),
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
            },
            prepare=prepare,
            stop_rank=StopRank.WORKER,
            stop_timeout_s=_STOP_S,
            refused_code=REFUSED_CODE,
        )
