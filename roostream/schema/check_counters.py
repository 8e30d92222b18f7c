"""What a schema's counters may not be."""

from __future__ import annotations

from functools import partial

from roostream.errors import SchemaError, nearest
from roostream.online.counter_plan import ITEM, OWN_OF_REQUEST, USER, field_sides, plan_of
from roostream.online.entity_state import max_bytes
from roostream.schema.counter_declaration import MAX_COUNTERS, CounterDeclaration, built_in
from roostream.schema.expand import RowLocations
from roostream.schema.schema import Schema

MAX_STATE_BYTES = 256 * 1024
_OF_REQUEST_ALONE = ("history", "length", "distinct")


def check_counters(schema: Schema, locations: RowLocations, taken: tuple[str, ...]) -> None:
    """`taken`: online names of the request itself.

    Raises:
        SchemaError: the first that doesn't go; names file and line.
    """
    if len(schema.counters) > MAX_COUNTERS:
        raise SchemaError(
            f"{locations.location.describe('counter')}expected at most {MAX_COUNTERS} counters, got {len(schema.counters)}; remove some"
        )
    names = {*taken, *(c.name for c in built_in())}
    for row, counter in enumerate(schema.counters):
        at = partial(locations.describe, "counter", row)
        if counter.name in names:
            raise SchemaError(f"{at('name')}counter {counter.name!r}: that name is taken; choose another")
        names.add(counter.name)
        for field in counter.entity:
            _check_field(schema, counter, field, at("entity"))
        if counter.aggregation == "distinct":
            _check_field(schema, counter, counter.of, at("of"))
        _check_entity(schema, counter, at("entity"))
    for name, form in schema.derived(plan_of).forms.items():
        if (most := max_bytes(form)) > MAX_STATE_BYTES:
            raise SchemaError(
                f"{locations.location.describe('counter')}expected a state of {name!r} of at most {MAX_STATE_BYTES} bytes, got {most}; "
                "shorten its histories or remove counters of it"
            )


def _check_field(schema: Schema, counter: CounterDeclaration, field: str, at: str) -> None:
    """Every event has it: it is a request's own, or a list of ids that clients give."""
    sides = field_sides(schema)
    at += f"counter {counter.name!r}: "
    if field not in sides:
        feature = next((f for f in (*schema.ro, *schema.nro) if f.name == field), None)
        if feature is not None:
            raise SchemaError(f"{at}expected a feature of kind 'ids', got {field!r} of {feature.kind!r}")
        raise SchemaError(f"{at}unknown field {field!r}{nearest(field, sides)}")
    feature = next((f for f in schema.lists(sides[field]) if f.name == field), None)  # type: ignore[arg-type]
    if feature is not None and field in OWN_OF_REQUEST:
        raise SchemaError(f"{at}{field!r} is the request's own and a feature's name; rename the feature")
    if feature is not None and feature.online and field != ITEM:
        raise SchemaError(
            f"{at}expected a feature that clients give, got {field!r}, which has an online value"
        )


def _check_entity(schema: Schema, counter: CounterDeclaration, at: str) -> None:
    sides, how = field_sides(schema), counter.aggregation
    of_candidate = [field for field in counter.entity if sides[field] == "nro"]
    if how in _OF_REQUEST_ALONE and of_candidate:
        raise SchemaError(
            f"{at}counter {counter.name!r}: expected fields of the request for aggregation {how!r}, got {of_candidate[0]!r}, "
            "which each candidate has its own of; remove it"
        )
    if how == "expected" and not of_candidate:
        raise SchemaError(
            f"{at}counter {counter.name!r}: expected a field of the candidate for 'expected', got none; add 'item'"
        )
    if how == "in_last_list" and not (USER in counter.entity and of_candidate):
        raise SchemaError(
            f"{at}counter {counter.name!r}: expected 'user' and a field of the candidate for 'in_last_list'"
        )
