"""A table's rule and its own parameters: in a block of their own, or a name with the old keys beside it."""

from __future__ import annotations

import dataclasses
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
def test_the_old_keys_mean_the_same_as_a_block(flat: str, block: str, rule: Rule) -> None:
    old, new = parse_schema(ITEM + flat + LABEL), parse_schema(ITEM + block + LABEL)
    assert old == new and old.fingerprint == new.fingerprint
    assert new.tables[0].rule == rule


@pytest.mark.parametrize("name", RULES)
def test_every_rule_survives_being_written(name: str) -> None:
    schema = parse_schema(ITEM + f"[tables.item.rule]\nname = {name!r}\nlearning_rate = 0.125\n" + LABEL)
    assert parse_schema(to_toml(schema)) == parse_schema(to_toml(schema, defaults=False)) == schema
    assert schema.tables[0].stack == f"d8-{name}"


def test_the_page_on_schemas_names_every_rule_parameter_and_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
    section = page.split("## `[tables.NAME.rule]`")[1].split("\n## ")[0]
    for name, rule in RULES.items():
        assert f"`{name}`" in section
        for field in dataclasses.fields(rule):
            assert f"`{field.name}`" in section and f"{field.default:g}".replace("e-0", "e-") in section, (
                name,
                field.name,
            )


def test_a_family_of_tables_shares_a_rule_s_block() -> None:
    schema = parse_schema(
        '[tables."{a,b}"]\ndim = 4\n[tables."{a,b}".rule]\nname = "adam"\nbeta1 = 0.5\n' + LABEL
    )
    assert [t.rule for t in schema.tables] == [Adam(beta1=0.5)] * 2


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
            "schema.toml:3: key 'tables.item.learning_rate': expected it inside [tables.item.rule]",
        ),
        (
            "rule = 'adam'\ninitial_accumulator = 0.1\n",
            "schema.toml:4: unknown key 'tables.item.initial_accumulator' = 0.1",
        ),
        (
            "[tables.item.rule]\nname = 'adma'\n",
            "schema.toml:4: key 'tables.item.rule.name': expected one of adagrad, rowwise_adagrad, adam, got 'adma'",
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
def test_what_is_wrong_in_a_rule_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(ITEM + text + LABEL, encoding="utf-8")
    with pytest.raises(SchemaError) as error:
        load_schema(path)
    assert message in str(error.value) and "\n" not in str(error.value)
