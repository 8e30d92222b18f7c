"""Random batches of a schema that has two stacks of tables, request-side and candidate-side lists, and a
sequence with columns."""

from __future__ import annotations

import numpy as np

from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder
from roostream.wire.records import Record

TWO_STACKS = schema_from_dict(
    {
        "tables": {"user": {"dim": 2}, "item": {"dim": 4}, "place": {"dim": 4}},
        "ro": [
            {"name": "user", "kind": "ids", "table": "user"},
            {
                "name": "seen",
                "kind": "sequence",
                "table": "item",
                "max_len": 4,
                "columns": {"place": "ids"},
                "column_tables": {"place": "place"},
            },
        ],
        "nro": [
            {"name": "item", "kind": "ids", "table": "item"},
            {"name": "owner", "kind": "ids", "table": "user"},
        ],
        "label": [{"name": "click", "action": "click", "fold": "any"}],
    }
)


def random_batch(seed: int, num_requests: int = 12) -> Batch:
    """Draw a batch with few different ids, which occur in several tables. Some lists are empty."""
    random, values = np.random.default_rng(seed), []
    for at in range(num_requests):
        n, length = int(random.integers(1, 4)), int(random.integers(0, 5))
        history = {
            "item": random.integers(1, 9, length).tolist(),
            "place": random.integers(1, 9, length).tolist(),
        }
        nro = {
            "item": [random.integers(1, 9, random.integers(0, 3)).tolist() for _ in range(n)],
            "owner": random.integers(1, 9, n).tolist(),
        }
        message = pb.Sample(
            header=pb.Header(request_id=f"r{at}", user_id=1, time_ms=at + 1, schema=TWO_STACKS.fingerprint),
            sample_id=at + 1,
            close_reason=pb.CLOSE_WINDOW,
            close_ms=at + 1,
            ro=encode_ro(
                TWO_STACKS, {"user": random.integers(1, 9, random.integers(0, 2)).tolist(), "seen": history}
            ),
            item_ids=list(range(n)),
            parts=[pb.Part(nro=encode_nro(TWO_STACKS, nro, n), num_rows=n)],
            labels=[0.0] * n,
            weight=1.0,
        )
        values.append(Record("samples", 0, at, at + 1, b"", wire.encode(wire.SAMPLE, message)))
    batch, rejected = Decoder(TWO_STACKS, {}.get).decode(values)
    assert not rejected
    return batch
