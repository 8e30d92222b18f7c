"""Parameter server shards for benchmarks, in this process or in their own, and their clients.

`python -m benchmarks.common.shard JSON` runs a shard process.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.link_keys import read_link_credentials
from benchmarks.common.peer_process import Peer, print_address_and_wait, start_peer
from param_server.client import Client
from param_server.config import ShardIdentity
from param_server.key_value_store import KeyValueStore, MemoryKeyValueStore
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import SystemClock
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema, schema_from_dict


def empty_shard(
    schema: Schema,
    folder: str,
    *,
    publishing: bool = True,
    index: int = 0,
    num_shards: int = 1,
    blobs: KeyValueStore | None = None,
) -> Shard:
    """A shard in incarnation 1. `folder` is its checkpoint store; segments go to `blobs`, or stay in
    memory."""
    identity = ShardIdentity(schema=schema, publishing=publishing, index=index, num_shards=num_shards)
    segments = Segments(blobs or MemoryKeyValueStore(), shapes_of(schema), identity.num_buckets)
    shard = Shard(identity, segments, FileStore(folder), SystemClock())
    shard.restore(1, "")
    return shard


def local_client(schema: Schema, folder: str, *, publishing: bool = True) -> Client:
    """A client, in incarnation 1, of one shard in this process."""
    shard = empty_shard(schema, folder, publishing=publishing)
    client = Client(schema, [InMemoryTransport(ShardRpcHandler(shard).handle)], worker=0)
    client.set_incarnation(1)
    return client


@contextlib.contextmanager
def shard_processes(
    schema: str | Mapping[str, Any], num_shards: int, key_folder: str = ""
) -> Iterator[list[Peer]]:
    """Shards in their own processes. `schema`: a file, or the content of one."""
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(start_peer(__name__, json.dumps([schema, index, num_shards, key_folder])))
            for index in range(num_shards)
        ]


@contextlib.contextmanager
def remote_client(
    schema: Schema, addresses: Sequence[str], *, worker: int = 0, workers: int = 1, key_folder: str = ""
) -> Iterator[Client]:
    """A worker's client, in incarnation 1, of shards at these addresses."""
    with contextlib.ExitStack() as opened:
        credentials = read_link_credentials(key_folder)
        transports = [SocketTransport(address, credentials=credentials) for address in addresses]
        for transport in transports:
            opened.callback(transport.close)
        client = Client(schema, transports, worker=worker)
        opened.callback(client.close)
        client.set_incarnation(1, workers)
        yield client


def main() -> None:
    source, index, num_shards, key_folder = json.loads(sys.argv[1])
    schema = load_schema(source) if isinstance(source, str) else schema_from_dict(source)
    with tempfile.TemporaryDirectory() as home:
        shard = empty_shard(schema, home, publishing=False, index=index, num_shards=num_shards)
        server = RpcServer(
            ShardRpcHandler(shard).handle, credentials=read_link_credentials(key_folder)
        ).start()
        print_address_and_wait(server.address)
        server.stop()


if __name__ == "__main__":
    main()
