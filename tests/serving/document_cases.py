"""Requests made of an OpenAPI document: those it allows, and those it forbids. Every answer must be one that
the document names."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serving.http.middleware import DEADLINE

NUM_CASES = int(os.environ.get("OPENAPI_CASES", "8"))
"""Cases of each operation, allowed ones and as many forbidden ones."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
GIVEN_MS = 60_000
KEEPS_DEADLINE = 8
"""Every so many-th case keeps its generated deadline; most of these are too short for a score."""


def answers_conform(
    document: dict[str, Any],
    url: str,
    num_cases: int,
    seed_number: int = 0,
    headers: dict[str, str] | None = None,
) -> Counter[int]:
    """Send `num_cases` allowed and as many forbidden requests of each operation; an operation without
    parameters and body has one. Return the number of answers by status.

    Raises what a check finds, with the case. A status from 500 on can only be 504, where the deadline of the
    case had passed.
    """
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        session.headers.update(headers or {})
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            assert isinstance(found, Ok), found
            operation = found.ok()
            modes = [GenerationMode.POSITIVE]
            if operation.body or operation.query or operation.path_parameters:
                modes.append(GenerationMode.NEGATIVE)
            for mode in modes:
                strategy = operation.as_strategy(generation_mode=mode)
                _send_cases(strategy, url, session, num_cases, seed_number, statuses)
    return statuses


def _send_cases(
    strategy: Any,
    url: str,
    session: requests.Session,
    num_cases: int,
    seed_number: int,
    statuses: Counter[int],
) -> None:
    @seed(seed_number)
    @settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def send(case: Case) -> None:
        case.body = _whole(case.body)
        if statuses.total() % KEEPS_DEADLINE:
            _give_time(case)
        # The first case may compile kernels.
        answer = case.call(base_url=url, session=session, timeout=GIVEN_MS / 1000)
        statuses[answer.status_code] += 1
        lawful = answer.status_code == 504 and 0 < own_deadline_ms(case) < GIVEN_MS
        case.validate_response(
            answer, checks=[check for check in CHECKS if not (lawful and check is not_a_server_error)]
        )

    send()


def own_deadline_ms(case: Case) -> int:
    """The deadline of the case; 0 = none, or an invalid one."""
    stated = next(
        (str(value).strip() for name, value in (case.headers or {}).items() if name.lower() == DEADLINE), ""
    )
    return int(stated) if stated.isascii() and stated.isdigit() else 0


def _give_time(case: Case) -> None:
    """Replace a deadline of a millisecond, which is answered 504, by one that a busy machine keeps."""
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
