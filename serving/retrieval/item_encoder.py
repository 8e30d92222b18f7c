"""What an item's vector is made of: weights of a version, rows, and the item's own ids and floats. Nothing that depends on who
asks, on the list, or on the time.

Letters: N items, D width.
"""

from __future__ import annotations

import numpy as np
import torch

from roostream.errors import ConfigError
from roostream.models.inputs import build_inputs
from roostream.models.two_tower.retrieval import Retrieval
from roostream.online.counters import sources_of
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import build_lookup
from serving.scorer import RowReader

_OF_A_LIST = ("rank", "share")


def encode_items(model: Retrieval, rows: RowReader, items: Batch) -> np.ndarray:
    """float32 [N, D] of the batch's candidates. Raises ConfigError: one isn't finite."""
    lookup = build_lookup(items)
    inputs = build_inputs(items, lookup, rows.gather(lookup))
    with torch.inference_mode():
        vector_ND = model.item_vectors(inputs).numpy()
    if not np.isfinite(vector_ND).all():
        at = int(np.flatnonzero(~np.isfinite(vector_ND).all(axis=1))[0])
        raise ConfigError(f"expected finite vectors of items, got another of item {items.item_B[at]}")
    return np.ascontiguousarray(vector_ND, np.float32)


def check_own(schema: Schema, model: Retrieval) -> None:
    """Raises ConfigError: the item's tower looks at what isn't the item's own."""
    online = sources_of(schema, "nro")
    for name in model.item_floats:
        inputs, ops = _made_of(schema, name)
        listed = [op for op in ops if op in _OF_A_LIST]
        if listed:
            raise ConfigError(
                f"item_floats: expected floats of an item's own, got {name!r}, a {listed[0]} within a list; leave it out"
            )
        kept = next((i for i in inputs if i in online), "")
        if kept:
            raise ConfigError(
                f"item_floats: expected floats that a catalogue can have, got {kept!r}, kept online; leave it out"
            )
    for f in schema.lists("nro"):
        if online.get(f.name, "item_id") != "item_id":
            raise ConfigError(f"expected id lists that a catalogue can have, got {f.name!r}, kept online")


def _made_of(schema: Schema, name: str) -> tuple[list[str], list[str]]:
    """(floats, operations) that an output of transforms is made of."""
    names, ops = [name], list[str]()
    for t in reversed(schema.transforms):
        if t.output in names:
            ops.append(t.op)
            names.append(t.input)
    return names, ops
