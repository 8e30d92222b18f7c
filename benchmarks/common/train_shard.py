"""A shard process with the demo schema: `python -m benchmarks.common.train_shard INDEX NUM_SHARDS`."""

from __future__ import annotations

import sys
import tempfile

from benchmarks.common import samples as data
from benchmarks.common.peer_process import print_address_and_wait
from benchmarks.common.shard import empty_shard
from param_server.server import ShardRpcHandler
from roostream.runtime.rpc.server import RpcServer

if __name__ == "__main__":
    index, num_shards = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as home:
        shard = empty_shard(data.demo_schema(), home, publishing=False, index=index, num_shards=num_shards)
        server = RpcServer(ShardRpcHandler(shard).handle).start()
        print_address_and_wait(server.address)
        server.stop()
