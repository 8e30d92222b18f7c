"""Golden values of hashes, keys, buckets, fingerprints, blocks and counter states. Clients in other languages
and stored data rely on them."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from roostream.online.counters import Counters
from roostream.schema import ids
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.block import decode_block, encode_nro, encode_ro

USER_17 = ids.key_bytes(17, 4, "req-1")
ITEM = ids.table_id("item")
SCHEMA = """
[tables.item]
dim = 8
[tables.tag]
dim = 4
[[ro]]
name = "hour"
[[ro]]
name = "history"
kind = "sequence"
table = "item"
columns = { action = "ids", time = "time_ms" }
column_tables = { action = "tag" }
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[nro]]
name = "age"
[[nro]]
name = "topics"
kind = "weighted_ids"
table = "tag"
[[label]]
name = "click"
action = "click"
"""


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (ids.hash64(""), 0x2D06800538D394C2),  # xxHash's own test vector
        (ids.hash64("a"), 0xE6C632B61E964E1F),
        (ids.hash64("größe"), 0xA6D7BBEA01D4872C),
        (ids.item_id("item"), 0x6CA8F7B0F03F9E41),
        (ids.item_id(-1), 0xFFFFFFFFFFFFFFFF),
        (ITEM, 0xF03F9E41),
        (USER_17, bytes.fromhex("1100000000000000")),
        (ids.key_bytes(0, 4, "req-1"), bytes.fromhex("daa29c96c1dfc0e6")),
        (ids.key_bytes(0, 0, "r1"), bytes.fromhex("c699af5ba9dd9f51")),
        (ids.sample_id(USER_17, "req-1"), 0x1B17F39579A55C65),
        (ids.sample_id(USER_17, "req-1", 21), 0x7C16AE3E015C77AF),
        (ids.splitmix64(0), 0xE220A8397B1DCDAF),  # the generator's published first output for seed 0
        (ids.splitmix64((1 << 64) - 1), 0xE4D971771B652C20),
        ([ids.bucket_of(i, ITEM, 64) for i in (0, 1, 2, -1, 1 << 63)], [47, 2, 40, 2, 21]),
    ],
)
def test_hashes_keys_and_buckets_keep_their_values(got: object, expected: object) -> None:
    assert got == expected


def schema() -> Schema:
    return schema_from_dict(tomllib.loads(SCHEMA))


def test_a_fingerprint_keeps_its_value() -> None:
    assert schema().fingerprint == FINGERPRINT


def test_blocks_keep_their_bytes() -> None:
    history = {"item": [1, "x"], "action": [2, 3], "time": [6, 7]}
    assert encode_ro(schema(), {"hour": 1.5, "history": history}).hex() == RO
    topics = [{"ids": [3], "weights": [0.5]}, None]
    assert encode_nro(schema(), {"item": [[1], None], "age": [None, 2.0], "topics": topics}, 2).hex() == NRO
    assert decode_block(schema(), "ro", bytes.fromhex(RO), 1)["history"]["time"] == [6, 7]
    assert decode_block(schema(), "nro", bytes.fromhex(NRO), 2)["topics"] == topics


FINGERPRINT = 0x6AC90FAD84DE8344
RO = (
    "0a040000c03f1204020000001a20010000000000000011cdb280646cf0ea020000000000000003000000000000002a1006"
    "000000000000000700000000000000"
)
NRO = (
    "0a080000c07f0000004012100100000001000000"
    "00000000000000001a100100000000000000030000000000000022040000003f32010c"
)

# After a view of items 8 and 9 by user 5 and, a minute later, a click on item 8.
ITEM_STATE = (
    "0100002665febc784200008056febc784212ab170168dbed3f8cb3a127e8a1ef3f0f1782023ef0ef3f35ed2fc60efcef3f"
    "000000000000f03f000000000000f03f000000000000f03f000000000000f03f"
)
# What version 2 of an item's state adds: expected clicks, here half a click, decayed.
EXPECTED = "12ab170168dbdd3f8cb3a127e8a1df3f0f1782023ef0df3f35ed2fc60efcdf3f"
USER_STATE = (
    "010068e5cf8b01000001000000020000000800000000000000f9e175badce0d6fc6052e6cf8b0100000800000000000000"
    "010000000000000001000000000000000068e5cf8b0100006052e6cf8b0100000900000000000000010000000000000000"
    "000000000000000068e5cf8b0100000000000000000080"
)


KEYS = {"item": np.array([8]), "user": np.array([5])}
ITEM_STATE_3 = (
    "030e00404f409118928c7419f7ad52cb1a3f02933e51f604854021a0f77638281b0b9dc88fedcc4f3f32ebbca2c241152a8fcd4d7827d9"
    "80a24b4900002665febc784212ab170168dbed3f000000000000f03f12ab170168dbdd3f8cb3a127e8a1ef3f000000000000f03f8cb3a1"
    "27e8a1df3f0f1782023ef0ef3f000000000000f03f0f1782023ef0df3f35ed2fc60efcef3f000000000000f03f35ed2fc60efcdf3f0000"
    "8056febc7842"
)
USER_STATE_2 = (
    "0203000000000000001b000000030200404f40912f59a69700008056febc784200008056febc78425240265b1000000008000000000000"
    "006052e6cf8b010000dec8caaa7c0000000200000005000000404f40910235a9516061bb192f59a69726fe1dbd08000000000000000900"
    "00000000000000002665febc7842000000000000f03f000000000000f03f00008056febc784200002665febc784200008056febc784200"
    "0000000000f03f000000000000000000008056febc7842000000000000f87f"
)


@pytest.mark.parametrize(
    ("item", "expected"),
    [(ITEM_STATE, 0.1 * 2**-0.0167), ("02" + ITEM_STATE[2:] + EXPECTED, 0.5 * 2**-0.0167)],
)
def test_counter_states_of_older_versions_are_read(item: str, expected: float) -> None:
    counters = Counters(Schema())
    counters.load(KEYS, [bytes.fromhex(item), bytes.fromhex(USER_STATE)])
    ro, nro = counters.read(5, [8, 9], 1_700_000_060_000)
    assert ro["history"] == {
        "ids": [8],
        "action": [ids.signed(ids.hash64("click"))],
        "time": [1_700_000_060_000],
    }
    assert ro["gap_s"] == 60.0
    assert nro["in_last_list"].tolist() == [1.0, 1.0]
    assert nro["age_s"].tolist() == [60.0, 0.0]
    assert nro["clicks_10m"].tolist() == [1.0, 0.0] and abs(nro["views_10m"][0] - 2**-0.1) < 1e-7
    assert nro["user_views"].tolist() == [1.0, 1.0] and nro["user_clicks"].tolist() == [1.0, 0.0]
    assert nro["user_view_age_s"].tolist() == [60.0, 60.0] and nro["user_click_age_s"][0] == 0.0
    assert np.isnan(nro["user_click_age_s"][1])
    assert nro["expected_1h"].tolist() == pytest.approx([expected, 0.0], rel=1e-2)
    assert counters.dump(KEYS)[1] == bytes.fromhex(USER_STATE_2)
    assert counters.dump(KEYS)[0] == bytes.fromhex(ITEM_STATE_3) or item == ITEM_STATE


def test_counter_states_keep_their_bytes() -> None:
    counters = Counters(Schema())
    counters.apply_impression(5, [8, 9], 1_700_000_000_000)
    counters.apply_engagement(5, 8, "click", 1.0, 1_700_000_060_000)
    assert counters.dump(KEYS) == [bytes.fromhex(ITEM_STATE_3), bytes.fromhex(USER_STATE_2)]
