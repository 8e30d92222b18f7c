"""The update rule of a table: its parameters are keys of the table or of a separate block."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.errors import SchemaError
from roostream.schema.registry import to_toml
from roostream.schema.schema_file import load_schema
from roostream.schema.update_rules import RULES, Adagrad, Adam, RowwiseAdagrad, Rule
from tests.wire.sample_builders import parse_schema

LABEL = '[[label]]\nname = "click"\naction = "click"\n'
ITEM = "[tables.item]\ndim = 8\n"


@pytest.mark.parametrize(
    ("flat", "block", "rule"),
    [
        ("", "", Adagrad()),
        ("learning_rate = 0.5\n", "[tables.item.rule]\nlearning_rate = 0.5\n", Adagrad(learning_rate=0.5)),
        (
            "rule = 'rowwise_adagrad'\ninitial_accumulator = 1\n",
            "[tables.item.rule]\nname = 'rowwise_adagrad'\ninitial_accumulator = 1.0\n",
            RowwiseAdagrad(initial_accumulator=1.0),
        ),
        (
            "rule = 'adam'\nlearning_rate = 0.1\n",
            "rule = { name = 'adam', learning_rate = 0.1 }\n",
            Adam(learning_rate=0.1),
        ),
    ],
)
def test_flat_keys_mean_the_same_as_a_rule_block(flat: str, block: str, rule: Rule) -> None:
    old, new = parse_schema(ITEM + flat + LABEL), parse_schema(ITEM + block + LABEL)
    assert old == new and old.fingerprint == new.fingerprint
    assert new.tables[0].rule == rule


@pytest.mark.parametrize("name", RULES)
def test_a_written_rule_reads_as_the_same_rule(name: str) -> None:
    schema = parse_schema(ITEM + f"[tables.item.rule]\nname = {name!r}\nlearning_rate = 0.125\n" + LABEL)
    assert parse_schema(to_toml(schema)) == parse_schema(to_toml(schema, defaults=False)) == schema
    assert schema.tables[0].stack == f"d8-{name}"


def test_tables_of_one_stack_may_differ_in_every_parameter() -> None:
    schema = parse_schema(
        ITEM + "learning_rate = 0.1\n[tables.other]\ndim = 8\ninitial_accumulator = 1.0\n" + LABEL
    )
    ((first, second),) = schema.stacks.values()
    assert first.rule == Adagrad(learning_rate=0.1) and second.rule == Adagrad(initial_accumulator=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_rate = 0.1\n[tables.item.rule]\nname = 'adam'\n",
            "schema.toml:3: key 'tables.item.learning_rate': expected it in",
        ),
        (
            "rule = 'adam'\ninitial_accumulator = 0.1\n",
            "schema.toml:4: unknown key 'tables.item.initial_accumulator' = 0.1",
        ),
        (
            "[tables.item.rule]\nname = 'adma'\n",
            "schema.toml:4: key 'tables.item.rule.name': expected one of adagrad, rowwise_adagrad,",
        ),
        (
            "[tables.item.rule]\nname = 'adam'\nbeta3 = 0.1\n",
            "schema.toml:5: unknown key 'tables.item.rule.beta3' = 0.1; did you mean 'beta",
        ),
        (
            "[tables.item.rule]\nname = 'adam'\nbeta1 = 1.0\n",
            "key 'tables.item.rule.beta1': expected 0..0.999999, got 1.0",
        ),
        (
            "[tables.item.rule]\nlearning_rate = 'fast'\n",
            "key 'tables.item.rule.learning_rate': expected number, got 'fast'",
        ),
        ("rule = 3\n", "key 'tables.item.rule': expected one of adagrad, rowwise_adagrad, adam, got 3"),
    ],
)
def test_an_error_in_a_rule_names_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(ITEM + text + LABEL, encoding="utf-8")
    with pytest.raises(SchemaError) as error:
        load_schema(path)
    assert message in str(error.value) and "\n" not in str(error.value)
