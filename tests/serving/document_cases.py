"""Generates requests from an OpenAPI document, valid and invalid ones, and checks that every answer is one
that the document allows."""

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
"""Valid requests per operation, and as many invalid ones."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
LONG_DEADLINE_MS = 60_000
KEEP_DEADLINE_EVERY = 8
"""One case in so many keeps its generated deadline. Most generated deadlines are too short for scoring."""


def answers_conform(
    document: dict[str, Any],
    url: str,
    num_cases: int,
    seed_number: int = 0,
    headers: dict[str, str] | None = None,
) -> Counter[int]:
    """Send `num_cases` valid and as many invalid requests of each operation; an operation without parameters
    and body has no invalid ones. Return the number of answers by status.

    Raises the failure of a check, with its case. The only allowed status from 500 on is 504, and only after
    the case's own deadline.
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
    @settings(max_examples=num_cases, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def send(case: Case) -> None:
        case.body = _integral_floats_to_ints(case.body)
        if statuses.total() % KEEP_DEADLINE_EVERY:
            _lengthen_deadline(case)
        # The first case may compile kernels.
        answer = case.call(base_url=url, session=session, timeout=LONG_DEADLINE_MS / 1000)
        statuses[answer.status_code] += 1
        is_expected_timeout = answer.status_code == 504 and 0 < deadline_of_case_ms(case) < LONG_DEADLINE_MS
        case.validate_response(
            answer,
            checks=[check for check in CHECKS if not (is_expected_timeout and check is not_a_server_error)],
        )

    send()


def deadline_of_case_ms(case: Case) -> int:
    """Return the deadline in the headers of the case; 0 = none, or an invalid one."""
    stated = next(
        (str(value).strip() for name, value in (case.headers or {}).items() if name.lower() == DEADLINE), ""
    )
    return int(stated) if stated.isascii() and stated.isdigit() else 0


def _lengthen_deadline(case: Case) -> None:
    """Replace the case's deadline, which may be a millisecond, by one that a busy machine meets."""
    if deadline_of_case_ms(case):
        for name in [name for name in case.headers if name.lower() == DEADLINE]:
            case.headers[name] = str(LONG_DEADLINE_MS)


def _integral_floats_to_ints(value: Any) -> Any:
    """Replace floats like 1.0 by integers. To JSON Schema they are integers, but serving rejects them as
    ids."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integral_floats_to_ints(v) for v in value]
    return {k: _integral_floats_to_ints(v) for k, v in value.items()} if isinstance(value, dict) else value
