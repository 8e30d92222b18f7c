"""A home with a shard that makes commits, a serving process that scores with the shard's rows, and the
feature log of the requests that it scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from param_server.client import Client
from param_server.key_value_store import RocksDbStore
from param_server.server import ShardRpcHandler
from roostream.models.config import RankerConfig
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import decode_block, encode_nro, encode_ro
from roostream.wire.lookup import Lookup
from serving.feature_log.format import LogRecord
from serving.feature_log.segment import Cursor, LogSegment
from serving.rank import RankService
from serving.request import RankRequest
from serving.scorer import build_version
from serving.versions.loaded_versions import LoadedVersions
from tests.param_server.shard_support import link_manifest, make_shard
from tests.runtime.manifest_cases import a_part

T0 = 1_700_000_000_000
SEED = 3
SCHEMA: Schema = schema_from_dict(
    {
        "tables": {"item": {"dim": 4, "init_scale": 0.5}},
        "ro": [{"name": "hour"}, {"name": "basket"}],
        "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "price"}],
        "label": [{"name": "click", "action": "click"}, {"name": "order", "action": "order"}],
    }
)
MODEL = RankerConfig(request_layers=(6,), history_attention=False)


class ScoringHome:
    """A home in which tests `commit`, `push` and `rank` at given times; `close` then writes the feature
    log."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, FileStore(root / "store")
        register(self.store, SCHEMA)
        self.blobs = RocksDbStore(root / "shard-0" / "segments").open()
        self.shard = make_shard(blobs=self.blobs, store=self.store, schema=SCHEMA, seed=SEED)  # type: ignore[arg-type]
        self.incarnation = manifests.claim_incarnation(self.store, 0)
        self.shard.restore(self.incarnation, "")
        self.client = Client(SCHEMA, [InMemoryTransport(ShardRpcHandler(self.shard).handle)], worker=0)
        self.client.set_incarnation(self.incarnation)
        self.seq = self.pushes = 0
        self.served: list[LogRecord] = []
        self.service: RankService | None = None

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Return the current rows, as a replica reads them that has received every push."""
        return self.client.pull(lookup)

    def commit(self, time_ms: int) -> str:
        """Commit other dense weights and serve them from now on. Return the name of the version."""
        self.seq += 1
        noise = torch.Generator().manual_seed(self.seq)
        initial_weights = build_version("x", SCHEMA, MODEL, SEED, {}).model.state_dict()
        weights = {
            name: value + 0.12 * torch.randn(value.shape, generator=noise)
            for name, value in initial_weights.items()
        }
        data = tensor_file.encode({f"model.{name}": value.numpy() for name, value in weights.items()}, {})
        dense = manifests.store_file(self.store, manifests.dense_name(self.seq, self.incarnation), data)
        worker_file = manifests.store_file(
            self.store, manifests.worker_name(self.seq, self.incarnation, 0), data
        )
        self.shard.freeze(self.seq, 0)
        link_manifest(
            self.store,  # type: ignore[arg-type]
            self.seq,
            self.incarnation,
            [self.shard.write(self.seq)],
            dense=dense,
            workers={0: a_part({("samples", 0): self.seq}, self.seq, file=worker_file)},
            schema=f"{SCHEMA.fingerprint:016x}",
            model=dataclasses.asdict(MODEL),
            seed=SEED,
            num_buckets=64,
            time_ms=time_ms,
        )
        self.shard.commit(self.seq)
        name = f"{self.incarnation}-{self.seq}"
        self.service = RankService(
            SCHEMA, LoadedVersions(build_version(name, SCHEMA, MODEL, SEED, weights)), self
        )
        return name

    def push(self, *items: int, by: float = 1.0) -> None:
        """Change the rows of these items by one training step."""
        from roostream.wire.lookup import StackLookup

        (stack,) = SCHEMA.stacks
        table = SCHEMA.tables[0]
        lookup = Lookup(
            {stack: StackLookup(np.full(len(items), table.id, np.uint32), np.array(items, np.int64), {})}
        )
        self.pushes += 1
        self.client.push(
            lookup, {stack: np.full((len(items), table.dim), by, np.float32)}, step=self.pushes, time_ms=T0
        )

    def rank(
        self,
        request_id: str,
        time_ms: int,
        *,
        items: tuple[int, ...] = (1, 2, 3),
        scored: Mapping[str, Any] | None = None,
        logged: Mapping[str, Any] | None = None,
    ) -> None:
        """Score a request and log it.

        `scored` replaces default request-only features. `logged` replaces features in the log only, which
        plants a skew between scored and logged features.
        """
        assert self.service is not None
        ids = np.array(items, np.int64)
        nro = {"item": ids, "price": np.linspace(1, 9, len(ids))}
        request = RankRequest(
            request_id=request_id,
            user_id=7,
            session_id=1,
            surface="",
            item_ids=ids,
            client_item_ids=list(items),
            ro={"hour": 8.5, "basket": 40.0, **(scored or {})},
            nro=nro,
            append=False,
            first_position=0,
            model_version="",
        )
        record = self.service.rank(request, time_ms).record
        self.served.append(record if logged is None else _with_features(record, logged, len(ids)))

    def close(self) -> Path:
        """Close the shard and write the feature log. Return its path."""
        self.blobs.close()
        folder = self.root / "serving" / "log"
        folder.mkdir(parents=True)
        segment = LogSegment.create(folder, Cursor(1, 64, 1), 1 << 20)
        for record in self.served:
            segment.append(record)
        segment.close()
        return segment.path


def _with_features(record: LogRecord, features: Mapping[str, Any], num_rows: int) -> LogRecord:
    """Return the log record with other features; None removes a feature from it."""
    message = pb.Impression.FromString(record.value[2:])
    ro = decode_block(SCHEMA, "ro", message.ro, 1)
    nro = decode_block(SCHEMA, "nro", message.nro, num_rows)
    for name, value in features.items():
        side = nro if name in nro else ro
        side[name] = value
    message.ro = encode_ro(SCHEMA, {name: value for name, value in ro.items() if value is not None})
    message.nro = encode_nro(SCHEMA, nro, num_rows)
    return record._replace(value=wire.encode(wire.IMPRESSION, message))
