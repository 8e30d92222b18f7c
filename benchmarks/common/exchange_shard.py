"""A shard process of placement-exchange: `python -m benchmarks.common.exchange_shard JSON`, [index, shards,
shape]."""

from __future__ import annotations

import json
import sys
import tempfile

from benchmarks.common.exchange_ways import Shape
from benchmarks.common.peer_process import print_address_and_wait
from benchmarks.common.shard import empty_shard
from param_server.server import ShardRpcHandler
from roostream.runtime.rpc.server import RpcServer

if __name__ == "__main__":
    index, num_shards, shape = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as home:
        shard = empty_shard(Shape(*shape).schema, home, publishing=False, index=index, num_shards=num_shards)
        server = RpcServer(ShardRpcHandler(shard).handle).start()
        print_address_and_wait(server.address)
        server.stop()
