"""What offsets mean while a session over the warehouse is trained."""

from __future__ import annotations

import json

import pytest

from roostream.runtime.work_unit import TableInput, WorkUnit
from tests.runtime.manifest_cases import an_input

AT = {("samples", 0): 100, ("samples", 1): 8, ("samples", 2): 0, ("corrections", 0): 0}


def test_a_work_unit_round_trips_as_json() -> None:
    assert TableInput.of(json.loads(json.dumps(an_input().plain()))) == an_input()
    assert TableInput.of(None) is None and TableInput.of({}) is None


def test_a_work_unit_is_positions_by_partition() -> None:
    assert an_input(rows={1: 8, 0: 100, 2: 0}).units == (
        WorkUnit("samples/0", 0, 100),
        WorkUnit("samples/1", 0, 8),
    )


def test_a_work_unit_is_done_when_every_partition_is() -> None:
    assert an_input().is_trained(AT)
    assert not an_input().is_trained({**AT, ("samples", 1): 7}) and not an_input().is_trained({})


@pytest.mark.parametrize(("version", "corrections"), [(4, 3), (-1, 0)])
def test_the_stream_continues_where_the_table_version_ends(version: int, corrections: int) -> None:
    """Labels as they were at the close lack all corrections, so the stream reads every correction."""
    offsets = an_input(corrections=version).stream_behind(AT)
    assert offsets == {
        ("samples", 0): 105,
        ("samples", 1): 9,
        ("samples", 2): 0,
        ("corrections", 0): corrections,
    }


@pytest.mark.parametrize(
    "plain", [{"table": "t"}, {**an_input().plain(), "rows": {"a": 1}}, {**an_input().plain(), "new": 1}]
)
def test_an_invalid_session_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        TableInput.of(plain)


def test_without_known_offsets_a_stream_starts_at_its_first_record() -> None:
    assert an_input(topics={}).stream_behind(AT) == dict.fromkeys(AT, 0)
