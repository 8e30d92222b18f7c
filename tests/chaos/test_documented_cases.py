"""Ten thousand requests made of the OpenAPI document, as it allows and as it forbids: not one ends in a 5xx,
but for 504 where the caller's own deadline had passed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))  # document_cases.py: tests have no __init__.py


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_ten_thousand_cases_without_a_server_error(tmp_path: Path) -> None:
    from document_cases import answers_conform

    statuses = answers_conform(tmp_path, 2_500, seed_number=7)
    assert sum(statuses.values()) >= 10_000 and statuses[200] >= 1_000
    print(f"{sum(statuses.values())} cases: {dict(sorted(statuses.items()))}")
    assert not [status for status in statuses if status >= 500 and status != 504]
