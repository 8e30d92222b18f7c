"""A declared counter of page and item: serving reads it for the page that the client names, scores it, and
logs the value that it scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.models.config import RankerConfig
from roostream.online.counters import Counters
from roostream.online.entity_fields import FieldReader
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import decode_block
from serving.http.engagements import EngagementParser
from serving.online_features.hydration import Hydrated, HydrationRequest
from serving.rank import Hydration, RankService
from serving.rank_json import JsonParser
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions
from tests.online.counter_oracle import T0, schema_with_counters
from tests.serving.serving_fakes import FakeHydrator, FakeRows

SCHEMA = schema_with_counters(
    [
        {"name": "here", "entity": ["page", "item"], "event": "order"},
        {"name": "orders", "entity": "user", "event": "order", "aggregation": "history"},
    ]
)
BODY = (
    b'{"user_id": 7, "session_id": 1, "ro": {"page": ["home"]}, '
    b'"candidates": [{"item_id": 5}, {"item_id": 6}]}'
)
MODEL = RankerConfig(request_layers=(4,), history_attention=False)


def rank(hydrator: Hydration, body: bytes = BODY) -> tuple[pb.Impression, bool]:
    service = RankService(SCHEMA, LoadedVersions(first_version(SCHEMA, MODEL, 0)), FakeRows(SCHEMA), hydrator)
    result = service.rank(JsonParser(SCHEMA).parse(body), T0 + 1000)
    return pb.Impression.FromString(result.record.value[2:]), result.answer.degraded


class FakeCounters(Counters):
    """Counters in memory, in place of those in Redis."""

    def read_all(self, requests: Sequence[HydrationRequest]) -> list[Hydrated]:
        return [self.read(*request) for request in requests]


def make_counters() -> FakeCounters:
    """Return counters after an order of item 6 on the page `home`."""
    counters, reader, header = FakeCounters(SCHEMA), FieldReader(SCHEMA), (7, 1, "", "before")
    counters.apply_impression(7, [6], T0, reader.from_values(header, {"page": ["home"]}, {}, 1))
    counters.apply_engagement(7, 6, "order", 1.0, T0 + 1, reader.from_header(header))
    return counters


def test_declared_counters_are_scored_and_logged() -> None:
    impression, degraded = rank(make_counters())
    nro = decode_block(SCHEMA, "nro", impression.nro, 2)
    assert nro["here"].tolist() == [0.0, 1.0] and not degraded
    assert decode_block(SCHEMA, "ro", impression.ro, 1)["orders"] == [6]
    elsewhere, _ = rank(make_counters(), BODY.replace(b"home", b"cart"))
    assert decode_block(SCHEMA, "nro", elsewhere.nro, 2)["here"].tolist() == [0.0, 0.0]
    nowhere, _ = rank(make_counters(), BODY.replace(b'"page": ["home"]', b""))
    assert np.isnan(decode_block(SCHEMA, "nro", nowhere.nro, 2)["here"]).all(), (
        "without a page, the feature is missing in the log, as it was when scored"
    )


def test_without_redis_declared_features_are_missing_and_the_answer_is_degraded() -> None:
    hydrator = FakeHydrator()
    hydrator.unavailable = True
    impression, degraded = rank(hydrator)
    assert degraded and np.isnan(decode_block(SCHEMA, "nro", impression.nro, 2)["here"]).all()
    assert "orders" not in decode_block(SCHEMA, "ro", impression.ro, 1)


def test_an_action_of_a_declared_counter_counts_as_used() -> None:
    parser = EngagementParser(SCHEMA, strict=True)
    assert parser.unused(["order", "click", "like"]) == ["like"]
