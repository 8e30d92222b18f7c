"""Fixtures: a schema with every kind of feature, and valid samples of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.wire.sample_builders import RICH, make_sample, parse_schema, record_of


@pytest.fixture(scope="session")
def schema() -> Schema:
    return parse_schema(RICH)


@pytest.fixture(scope="session")
def samples(schema: Schema) -> Callable[[int], list[pb.Sample]]:
    return lambda count: [make_sample(schema, seed) for seed in range(count)]


@pytest.fixture(scope="session")
def to_record() -> Callable[..., Record]:
    return record_of
