"""`LogProfile` collects statistics of a replayed log. `Origins` finds the line of a record."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.replay.events import Action, Request
from roostream.replay.log_profile import OTHER, LogProfile, Origins
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "hour"}, {"name": "tags", "kind": "ids", "table": "item"}],
        "nro": [{"name": "price"}, {"name": "item", "kind": "ids", "table": "item"}],
        "label": [{"name": "click", "action": "click"}],
    }
)


def request(number: int, items: list[int], where: str = "") -> Request:
    return Request(f"r{number}", number, 0, T0 + number, np.array(items, dtype=np.int64), where=where)


def action(number: int, name: str) -> Action:
    return Action("r1", 1, 0, T0 + number, number, 1, name, where=f"log:{number}")


def test_shares_and_ranges_cover_the_rows_that_have_the_feature() -> None:
    profile = LogProfile(SCHEMA)
    first = encode_nro(SCHEMA, {"price": [2.0, None], "item": [[1, 2, 3], None]}, 2)
    profile.add(request(1, [1, 2]), encode_ro(SCHEMA, {"hour": 5.0}), first)
    profile.add(request(2, [7, 7]), encode_ro(SCHEMA, {}), b"")
    profile.add(request(3, [9]), None, encode_nro(SCHEMA, {"price": [8.0], "item": [4]}, 1))
    features = profile.features()
    assert features["price"] == {
        "side": "nro",
        "kind": "float",
        "share": 0.4,
        "min": 2.0,
        "mean": 5.0,
        "max": 8.0,
    }
    assert features["item"] == {
        "side": "nro",
        "kind": "ids",
        "share": 0.4,
        "min": 1.0,
        "mean": 2.0,
        "max": 3.0,
    }
    assert features["hour"]["share"] == 0.5 and features["hour"]["mean"] == 5.0
    assert features["tags"] == {
        "side": "ro",
        "kind": "ids",
        "share": 0.0,
        "min": None,
        "mean": None,
        "max": None,
    }
    lengths = profile.report()["list_lengths"]
    assert (lengths["p0"], lengths["p50"], lengths["p100"], lengths["with_an_item_twice"]) == (1, 2, 2, 1)


def test_statistics_of_many_rows_are_exact() -> None:
    profile, values = LogProfile(SCHEMA), np.random.default_rng(0).normal(size=(3000, 4))
    for n, row in enumerate(values):
        profile.add(request(n + 1, [1, 2, 3, 4]), b"", encode_nro(SCHEMA, {"price": row}, 4))
    features = profile.features()["price"]
    assert features["share"] == 1.0 and features["mean"] == pytest.approx(values.mean(), abs=1e-6)
    assert (features["min"], features["max"]) == (np.float32(values.min()), np.float32(values.max()))


def test_actions_are_counted_without_control_characters_and_in_bounded_memory() -> None:
    profile = LogProfile(SCHEMA)
    for n in range(1200):
        profile.add(action(n, f"a{n}"))
    profile.add(action(9, "a5"))
    profile.add(action(9, "\x1b[31ma5"))
    assert len(profile.actions) == 1001 and profile.actions["a5"] == 2 and profile.actions[OTHER] == 201


def test_a_dead_letter_is_traced_to_its_line() -> None:
    origins = Origins(max_size=2)
    origins.add(action(7, "click"))
    origins.add(request(1, [1], where="log:1"))
    assert origins.find(pb.DeadLetter(event_id=7)) == "log:7"
    assert origins.find(pb.DeadLetter(request_id="r1")) == "log:1"
    raw = wire.encode(wire.SAMPLE, pb.Sample(header=pb.Header(request_id="r1")))
    assert origins.find(pb.DeadLetter(raw=raw)) == "log:1" and origins.find(pb.DeadLetter(raw=b"?")) == ""
    origins.add(action(8, "click"))
    assert origins.find(pb.DeadLetter(event_id=7)) == ""
    assert origins.find(pb.DeadLetter(event_id=8)) == "log:8"
