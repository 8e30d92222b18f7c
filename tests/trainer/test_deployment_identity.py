"""What a manifest must agree with before anything of it is used."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from tests.runtime.manifest_cases import a_manifest
from trainer.deployment_identity import check_schema


def schema(dim: int, **user: Any) -> Schema:
    return schema_from_dict(
        {
            "tables": {"user": {"dim": dim, **user}},
            "ro": [{"name": "user", "kind": "ids", "table": "user"}],
            "label": [{"name": "click", "action": "click"}],
        }
    )


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (schema(2), "the same"),
        (schema(5), "wider"),
        (schema(2, rule="adam"), "another rule, which is no part of what samples are read by"),
        (schema(2, init_scale=0.5), "rows that aren't there yet begin otherwise"),
        (schema(5, rule="rowwise_adagrad"), "both"),
    ],
)
def test_storage_settings_of_rows_may_change_after_a_commit(now: Schema, why: str) -> None:
    committed = schema(2)
    manifest = a_manifest(3, schema=f"{committed.fingerprint:016x}")
    check_schema(manifest, now, {committed.fingerprint: committed}.get)
