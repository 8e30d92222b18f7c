"""A fixture with a schema that has every kind of feature."""

from __future__ import annotations

import pytest

from roostream.schema.schema import Schema
from tests.wire.sample_builders import RICH, parse_schema


@pytest.fixture(scope="session")
def schema() -> Schema:
    return parse_schema(RICH)
