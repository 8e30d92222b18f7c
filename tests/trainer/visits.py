"""Samples of the simulated site (roostream/replay/world.py), and training loops on them with a real shard in
memory. Any kind of model can be trained on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache

import numpy as np

from param_server.client import Client
from param_server.config import ShardIdentity
from param_server.key_value_store import MemoryKeyValueStore
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.models.config import ModelConfig
from roostream.replay.world import World, WorldConfig
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record
from serving.request_batch import read_request
from serving.scorer import build_version
from tests.trainer.loops import MemoryOutputs
from tests.trainer.memory_store import MemoryStore
from trainer.config import LoopConfig
from trainer.loop import LoopDependencies, TrainLoop
from trainer.record_source import RecordSource
from trainer.rows import ShardRows

T0 = 1_700_000_000_000
_WORLD = WorldConfig(
    num_users=30, num_items=60, mean_candidates=8, item_life_ms=10**12, examination_power=0.0
)
_HISTORY = {"name": "history", "kind": "sequence", "table": "item", "max_len": 20}
_AMOUNT = {"objective": "amount", "scale": 120.0, "weight": 0.5}
SCHEMA: Schema = schema_from_dict(
    {
        "tables": {"{item,category,user,action}": {"dim": 8}},
        "ro": [
            {"name": "user", "kind": "ids", "table": "user"},
            {
                **_HISTORY,
                "columns": {"action": "ids", "time": "time_ms"},
                "column_tables": {"action": "action"},
            },
            {"name": "hour"},
        ],
        "nro": [
            {"name": "item", "kind": "ids", "table": "item"},
            {"name": "category", "kind": "ids", "table": "category"},
        ],
        "label": [
            {"name": "click", "action": "click"},
            {"name": "read_s", "action": "read", "fold": "sum", **_AMOUNT},
        ],
    }
)


@cache
def visits(count: int, seed: int = 0) -> tuple[Record, ...]:
    """Samples of one request per second. A user's history holds the user's earlier clicks."""
    world, random = World(_WORLD), np.random.default_rng(seed)
    clicked: dict[int, list[tuple[int, int]]] = defaultdict(list)
    out = []
    for at in range(count):
        user, time_ms = int(random.integers(1, _WORLD.num_users + 1)), T0 + 1000 * at
        items = world.candidates_for(user, time_ms)
        click_n = random.random(len(items)) < world.attraction(user, items, time_ms)
        read_n = [
            world.read_seconds(user, int(i), time_ms, random.normal()) * c
            for i, c in zip(items, click_n, strict=True)
        ]
        history, labels_nT = clicked[user][-20:][::-1], np.stack([click_n, read_n], axis=1)
        out.append(_record(at, user, time_ms, items, history, labels_nT, world))
        clicked[user] += [(int(i), time_ms) for i in items[click_n]]
    return tuple(out)


def _record(
    at: int,
    user: int,
    time_ms: int,
    items: np.ndarray,
    history: list[tuple[int, int]],
    labels_nT: np.ndarray,
    world: World,
) -> Record:
    ids, times = [item for item, _ in history], [time for _, time in history]
    n = len(items)
    ro = {
        "user": [user],
        "hour": float(at % 24),
        "history": {"item": ids, "action": [1] * len(ids), "time": times},
    }
    nro = {"item": items, "category": [[world.category_of(int(i))] for i in items]}
    sample = pb.Sample(
        header=pb.Header(request_id=f"r{at}", user_id=user, time_ms=time_ms, schema=SCHEMA.fingerprint),
        sample_id=at + 1,
        close_reason=pb.CLOSE_WINDOW,
        close_ms=time_ms + 500,
        ro=encode_ro(SCHEMA, ro),
        item_ids=items.tolist(),
        parts=[pb.Part(nro=encode_nro(SCHEMA, nro, n), num_rows=n)],
        labels=labels_nT.ravel().tolist(),
        weight=1.0,
    )
    return Record("samples", 0, at, time_ms + 500, b"", wire.encode(wire.SAMPLE, sample))


def visit_loop(
    model: ModelConfig, records: tuple[Record, ...], schema: Schema = SCHEMA
) -> tuple[TrainLoop, MemoryOutputs]:
    """A training loop over `records` whose rows are in a new shard."""
    clock = FakeClock(T0)
    identity = ShardIdentity(schema=schema, index=0, num_shards=1, seed=0, publishing=False)
    shard = Shard(
        identity,
        Segments(MemoryKeyValueStore(), shapes_of(schema), identity.num_buckets),
        MemoryStore(),
        clock,
    )
    shard.restore(1, "")
    client = Client(schema, [InMemoryTransport(ShardRpcHandler(shard).handle)], worker=0)
    client.set_incarnation(1)
    reader, outputs = MemoryConsumer((("samples", 0),), list(records)), MemoryOutputs()
    config = LoopConfig(batch_requests=16, first_batch_requests=16, learning_rate=3e-3)
    source = RecordSource(reader, Decoder(schema, {}.get), clock, max_wait_ms=config.max_batch_wait_ms)
    return TrainLoop(
        config,
        schema,
        model,
        LoopDependencies(source=source, rows=ShardRows(client), outputs=outputs, clock=clock),
    ), outputs


# Checks: what a model has learned, and that serving computes the scores of training


class ReplicaRows:
    """A stand-in for serving's replica that reads the rows of a training loop."""

    def __init__(self, loop: TrainLoop) -> None:
        self.loop = loop

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        return {stack: np.asarray(rows_UD) for stack, rows_UD in self.loop.rows.pull(lookup).items()}


def log_losses(predicted: list[pb.Prediction]) -> np.ndarray:
    """The log loss of each request's first task, averaged over its candidates."""
    out = []
    for p in predicted:
        score_n, label_n = (np.array(x).reshape(len(p.item_ids), -1)[:, 0] for x in (p.scores, p.labels))
        out.append(-np.log(np.where(label_n > 0, score_n, 1 - score_n)).mean())
    return np.array(out)


def assert_serving_scores_as(loop: TrainLoop, config: ModelConfig, records: Iterable[Record]) -> None:
    """Check that serving scores each request as the training loop does. Serving uses a model version of the
    loop's weights, built from `config`."""
    version = build_version("1-1", SCHEMA, config, 0, loop.dense_trainer.scorer.state_dict())
    for record in records:
        batch, _ = Decoder(SCHEMA, {}.get).decode([record])
        _, sample = wire.decode(record.value)
        assert isinstance(sample, pb.Sample)
        items = np.array(sample.item_ids, np.uint64).view(np.int64)
        request = read_request(SCHEMA, sample.ro, sample.parts[0].nro, items, sample.header.time_ms)
        logits = version.score(ReplicaRows(loop), request)
        np.testing.assert_allclose(1 / (1 + np.exp(-logits)), loop.scores(batch), rtol=0, atol=1e-5)
