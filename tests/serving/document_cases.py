"""Requests made of the OpenAPI document: such as it allows, and such as it forbids; every answer must be one
that it names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from retrieval_cases import retrieving
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving_cases import SCHEMA
from serving_fakes import FakeRows

from serving.http.app import HttpInterface
from serving.http.middleware import DEADLINE

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
GIVEN_MS = 60_000
KEEPS_DEADLINE = 8
"""Every so many-th case keeps the deadline that was made up for it: most of these are too short for a
score."""


def answers_conform(home: Path, cases_each: int, seed_number: int = 0) -> Counter[int]:
    """`cases_each` cases of each call that carries traffic, allowed and forbidden; how many were answered
    with which status: of those from 500 on only 504 can be there, where the caller's own deadline had passed.
    Raises what a check finds, with the case."""
    kept = retrieving(home, FakeRows(SCHEMA), max_log_bytes=1 << 28)
    kept.turn()
    built = kept.built
    statuses: Counter[int] = Counter()
    try:
        document = schemathesis.openapi.from_asgi("/openapi.json", HttpInterface(built.context))
        for found in document.get_all_operations():
            operation = found.ok()
            modes = (
                [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
                if operation.method == "post"
                else [GenerationMode.POSITIVE]
            )
            for mode in modes:
                _run(operation.as_strategy(generation_mode=mode), cases_each, seed_number, statuses)
    finally:
        built.close()
    return statuses


def _run(strategy: Any, num_cases: int, seed_number: int, statuses: Counter[int]) -> None:
    @seed(seed_number)
    @settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def ask(case: Case) -> None:
        case.body = _whole(case.body)
        if statuses.total() % KEEPS_DEADLINE:
            _give_time(case)
        answer = case.call(timeout=GIVEN_MS / 1000)  # the first may compile kernels
        statuses[answer.status_code] += 1
        lawful = answer.status_code == 504 and 0 < own_deadline_ms(case) < GIVEN_MS
        case.validate_response(
            answer, checks=[check for check in CHECKS if not (lawful and check is not_a_server_error)]
        )

    ask()


def own_deadline_ms(case: Case) -> int:
    """What the caller asks for; 0 = nothing, or what isn't one."""
    stated = next(
        (str(value).strip() for name, value in (case.headers or {}).items() if name.lower() == DEADLINE), ""
    )
    return int(stated) if stated.isascii() and stated.isdigit() else 0


def _give_time(case: Case) -> None:
    """A deadline of a millisecond is answered 504, as it asks; here it is one that a busy machine keeps."""
    if own_deadline_ms(case):
        for name in [name for name in case.headers if name.lower() == DEADLINE]:
            case.headers[name] = str(GIVEN_MS)


def _whole(value: Any) -> Any:
    """JSON Schema calls 1.0 an integer, and its generators make many; here an id is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(v) for v in value]
    return {k: _whole(v) for k, v in value.items()} if isinstance(value, dict) else value
