"""A manifest is used only if it fits the deployment's schema."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from roostream.errors import ConfigError, SchemaError
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from tests.runtime.manifest_cases import a_manifest
from trainer.deployment_identity import check_schema


def schema(dim: int, label: str = "click", **user: Any) -> Schema:
    return schema_from_dict(
        {
            "tables": {"user": {"dim": dim, **user}},
            "ro": [{"name": "user", "kind": "ids", "table": "user"}],
            "label": [{"name": label, "action": "click"}],
        }
    )


COMMITTED = schema(4)
MANIFEST = a_manifest(3, schema=f"{COMMITTED.fingerprint:016x}")


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (schema(4), "the same"),
        (schema(4, init_scale=0.5), "new rows have other initial values"),
        (schema(5, rule="rowwise_adagrad"), "wider, with another update rule"),
        (
            dataclasses.replace(
                schema(5), labels=tuple(dataclasses.replace(label, prior=0.1) for label in COMMITTED.labels)
            ),
            "wider, with another prior of the label",
        ),
    ],
)
def test_storage_settings_of_rows_may_change_after_a_commit(now: Schema, why: str) -> None:
    check_schema(MANIFEST, now, {COMMITTED.fingerprint: COMMITTED}.get)


@pytest.mark.parametrize(
    ("now", "known", "error", "message"),
    [
        (schema(3), True, SchemaError, r"'user'.* 4 .* 3:"),
        (schema(4, label="like"), True, SchemaError, r"labels \['click'\] .* \['like'\]"),
        (schema(5), False, ConfigError, "in the store"),
    ],
)
def test_a_model_that_does_not_fit_the_commit_is_refused(
    now: Schema, known: bool, error: type[Exception], message: str
) -> None:
    registry = {COMMITTED.fingerprint: COMMITTED} if known else {}
    with pytest.raises(error, match=message):
        check_schema(MANIFEST, now, registry.get)
