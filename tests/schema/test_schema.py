"""Errors in schemas, fingerprints, and reading samples of one schema with another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roostream.errors import SchemaError
from roostream.schema.check import ONLINE
from roostream.schema.schema import reading_plan, stack_shape
from roostream.schema.schema_file import load_schema
from tests.wire.sample_builders import parse_schema

TABLE = "[tables.item]\ndim = 8\n"
LABEL = '[[label]]\nname = "click"\naction = "click"\n'
ITEM = '[[nro]]\nname = "item"\nkind = "ids"\ntable = "item"\n'
AGE = '[[nro]]\nname = "age"\n'
GOOD = TABLE + ITEM + AGE + LABEL


def transform(text: str) -> str:
    return GOOD + "[[transform]]\n" + text


SEQ = GOOD + "[[ro]]\nname = 'a'\nkind = 'sequence'\ntable = 'item'\n"
IDS = GOOD + "[[ro]]\nname = 'a'\nkind = 'ids'\ntable = 'item'\n"
WRONG = [
    ("tables = 3\n" + LABEL, "expected [tables.NAME] tables, got 3"),
    ("tables.item = 3\n" + LABEL, "expected a table [tables.item], got 3"),

    ("[tables.item]\n", "expected 'tables.item.dim'"),
    ("[tables.item]\ndim = 0\n", "key 'tables.item.dim': expected 1..4096, got 0"),


    ("[tables.item]\ndim = 8\nrule = 'adagard'\n",
     "expected one of adagrad, rowwise_adagrad, adam, got 'adagard'; did you mean 'adagrad'?"),

    ("ro = 3\n" + LABEL, "expected [[ro]] tables, got 3"),
    ("rho = 3\n" + LABEL, "schema.toml:1: unknown key 'rho' = 3; did you mean 'ro'?"),
    ("name = 3\n" + LABEL, "schema.toml:1: key 'name': expected text, got 3"),
    (TABLE + ITEM, "expected at least one [[label]], got none"),
    (GOOD + AGE, "schema.toml:13: duplicate feature 'age'"),

    ("[[ro]]\nname = 'a.b'\n" + LABEL, "feature 'a.b': expected a name of lower-case letters"),
    ("[[ro]]\nname = 'a'\ndefault = nan\n" + LABEL,
     "feature 'a': expected a finite default (at most 3e+38), got nan"),
    ("[[ro]]\nname = 'a'\ndefault = 1e39\n" + LABEL,
     "feature 'a': expected a finite default (at most 3e+38), got 1e+39"),
    (LABEL + "weight = inf\n", "expected 0..3e+38, got inf"),
    ("[[ro]]\nname = 'a'\nkind = 'flaot'\n" + LABEL,
     "schema.toml:3: key 'ro.a.kind': expected one of float, ids, weighted_ids, sequence"),
    ("[[ro]]\nname = 'a'\ntable = 'item'\n" + LABEL, "feature 'a': a float has no table and no columns"),
    (TABLE + "[[ro]]\nname = 'a'\nkind = 'ids'\ntable = 'itm'\n" + LABEL,
     "schema.toml:6: feature 'a': unknown table 'itm'; did you mean 'item'?"),
    (IDS + "columns = { t = 'ids' }\n", "only a sequence has columns, this is 'ids'"),
    (SEQ + "columns = { ids = 'ids' }\n", "a column can't be named 'ids'"),
    (SEQ + "columns = { t = 'time' }\n",
     "column 't': expected ids or time_ms, got 'time'; did you mean 'time_ms'?"),
    (SEQ + "columns = { act = 'ids' }\ncolumn_tables = { atc = 'item' }\n",
     "column_tables names 'atc'"),
    (SEQ + "columns = { act = 'ids' }\ncolumn_tables = { act = 'itm' }\n",
     "feature 'a': unknown table 'itm'; did you mean 'item'?"),
    (SEQ + "column_tables = { act = ['x'] }\n", "expected table, got {'act': ['x']}"),
    (SEQ + "columns = { b = 'ids' }\n[[ro]]\nname = 'a__b'\n",
     "schema.toml:18: feature 'a__b': its column 'ro__a__b' of a warehouse is also that of 'a'; rename one"),
    (IDS.replace("'ids'", "'weighted_ids'") + "[[ro]]\nname = 'a__weights'\n", "'ro__a__weights'"),
    (IDS + "max_len = 3000\n", "expected max_len in 0..2000 (limits.max_list), got 3000"),
    (GOOD + "[[ro]]\nname = 'a'\nonline = 'gap'\n",
     "schema.toml:14: feature 'a': unknown online feature 'gap' for [[ro]]; did you mean 'gap_s'?"),
    (GOOD + "[[ro]]\nname = 'a'\nonline = 'reader'\n",
     "unknown online feature 'reader' for [[ro]]; known are history"),
    (GOOD + "[[nro]]\nname = 'a'\nkind = 'ids'\ntable = 'item'\nonline = 'age_s'\n",
     "expected kind float for online 'age_s', got 'ids'"),
    (SEQ + "columns = { t = 'time_ms' }\nonline = 'history'\n",
     "expected columns among {'action': 'ids', 'time': 'time_ms'} for online 'history'"),
    (SEQ + "online = 'history'\n[[ro]]\nname = 'b'\nkind = 'ids'\ntable = 'item'\n"
     "online = 'history'\n", "feature 'b': expected the kind, table and columns of 'a'"),




    (GOOD + "[limits]\nmax_lst = 0\n", "unknown key 'limits.max_lst' = 0; did you mean 'max_list'?"),


    (transform("output = 'a'\ninput = 'aeg'\nop = 'rank'"), "transform 'a': unknown input 'aeg'"),
    (transform("output = 'item'\ninput = 'age'\nop = 'rank'"), "transform 'item': that name is taken"),
    (transform("output = 'a'\ninput = 'age'\nop = 'standardize'\nstd = 0"), "expected std > 0"),

    (transform("output = 'a'\ninput = 'age'\nop = 'clip'\nlow = 2\nhigh = 1"),
     "key 'transform.a.low': expected at most high = 1, got 2.0"),
    (transform("output = 'a'\ninput = 'hour'\nop = 'rank'\n[[ro]]\nname = 'hour'"),
     "'hour' is request-only"),
    ("x = ", "expected TOML, got something else"),
    # The error names the line of this key, although its name occurs twice.
    (GOOD.replace("dim = 8", "dim = 8\nrule = 'adam'") + "[tables.user]\ndim = 4\nrule = 'adm'\n",
     "schema.toml:15: key 'tables.user.rule'"),
    (GOOD + "[[ro]]\nname = ['price']\n", "schema.toml:13: key 'ro.name': expected text, got ['price']"),
    (GOOD + "[[ro]]\nkind = 'float'\n", "schema.toml:12: expected 'ro.name'"),
    (GOOD + "[[label]]\nname = 'order'\n",
     "schema.toml:12: expected 'label.order.action'"),

    (GOOD + "[[label]]\nname = 'click'\naction = 'x'\n", "schema.toml:13: duplicate label 'click'"),
    (GOOD + "[[ro]]\nname = 'a'\nkind = 'ids'\n",
     "schema.toml:14: feature 'a': expected the embedding table"),
    (GOOD + "[[ro]]\nname = 'a'\nonline = 'ctr_1h'\n",
     "schema.toml:14: feature 'a': online feature 'ctr_1h' is for [[nro]], got it in [[ro]]"),
    (GOOD + "[[label]]\nname = 'o'\naction = ''\n",
     "schema.toml:14: key 'label.o.action': expected a printable text of 1..64 bytes, got ''"),
    (GOOD + '[online]\nclick = "\\u0007"\n', "schema.toml:13: key 'online.click': expected a printable text"),
    ('name = "a\\nb"\n' + LABEL, "schema.toml:1: key 'name': expected a printable text of 1..200 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[m[:60] for _, m in WRONG])
def test_an_error_in_a_schema_names_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SchemaError) as error:
        load_schema(path)
    text = str(error.value)
    assert message in text and "\n" not in text
    assert re.match(rf"{path}(:\d+)?: ", text)


def test_tables_with_equal_32_bit_ids_are_rejected() -> None:
    with pytest.raises(SchemaError, match="tables 't71219' and 't82029' have the same 32-bit id"):
        parse_schema(GOOD + "[tables.t71219]\ndim = 4\n[tables.t82029]\ndim = 4\n")


def test_every_online_name_can_be_declared() -> None:
    text = GOOD
    for side, names in ONLINE.items():
        for i, name in enumerate(names):
            is_ids = name in ("history", "item_id", "user_id")
            kind = 'kind = "ids"\ntable = "item"\n' if is_ids else ""
            text += f'[[{side}]]\nname = "{side}{i}"\nonline = "{name}"\n{kind}'
    schema = parse_schema(text)
    assert [f.online for f in schema.ro] == list(ONLINE["ro"])


def test_the_fingerprint_covers_only_settings_that_change_the_encoding() -> None:
    base = parse_schema(GOOD).fingerprint
    for same in ("learning_rate = 0.5", "init_scale = 0.1"):
        assert parse_schema(GOOD.replace("dim = 8", f"dim = 8\n{same}")).fingerprint == base
    assert parse_schema(GOOD + "[limits]\nmax_list = 7\n").fingerprint == base
    changes = [
        GOOD.replace("dim = 8", "dim = 4"),
        GOOD.replace('"age"', '"old"'),
        GOOD.replace('action = "click"', 'action = "tap"'),
    ]
    history = '[[ro]]\nname = "h"\nkind = "sequence"\ntable = "item"\ncolumns = {{ {} }}\n'
    changes += [GOOD + history.format(c) for c in ('a = "ids", t = "time_ms"', 't = "time_ms", a = "ids"')]
    prints = [parse_schema(text).fingerprint for text in changes]
    assert len({base, *prints}) == len(prints) + 1


def test_stacks_group_tables_of_equal_width_and_rule() -> None:
    schema = parse_schema(
        GOOD + '[tables.b]\ndim = 4\n[tables.c]\ndim = 8\n[tables.d]\ndim = 8\nrule = "rowwise_adagrad"\n'
    )
    assert {s: [t.name for t in ts] for s, ts in schema.stacks.items()} == {
        "d8-adagrad": ["item", "c"],
        "d4-adagrad": ["b"],
        "d8-rowwise_adagrad": ["d"],
    }
    assert schema.tasks == ("click",)


def test_a_reading_plan_maps_known_features_and_marks_removed_ones() -> None:
    writer = parse_schema(GOOD + '[[nro]]\nname = "gone"\n[[label]]\nname = "like"\naction = "like"\n')
    reader = parse_schema(TABLE + '[[nro]]\nname = "new"\n' + AGE + ITEM + LABEL)
    plan = {"ro_float": [], "ro_list": [], "nro_float": [1, -1], "nro_list": [0], "label": [0, -1]}
    assert reading_plan(writer, reader) == plan


def test_the_width_of_rows_does_not_change_how_samples_are_read() -> None:
    wide = parse_schema(GOOD.replace("dim = 8", "dim = 16"))
    assert (
        reading_plan(wide, parse_schema(GOOD))
        == reading_plan(parse_schema(GOOD), wide)
        == reading_plan(wide, wide)
    )


@pytest.mark.parametrize(
    ("stack", "shape"),
    [
        ("d16-adagrad", (16, 16)),
        ("d3-rowwise_adagrad", (3, 1)),
        ("d4-adam", (4, 9)),
        ("16-adam", None),
        ("d4-sgd", None),
    ],
)
def test_the_name_of_a_stack_determines_its_shape(stack: str, shape: tuple[int, int] | None) -> None:
    assert stack_shape(stack) == shape


SEQUENCE = (
    '[[ro]]\nname = "h"\nkind = "sequence"\ntable = "item"\ncolumns = { a = "ids", b = "ids" }\n'
    'column_tables = { a = "item" }\n'
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'name = "age"',
            'name = "age"\nkind = "ids"\ntable = "item"',
            "feature 'age': expected kind 'float' (schema in use), got 'ids'",
        ),
        ('kind = "ids"', 'kind = "weighted_ids"', "expected kind 'ids' (schema in use), got 'weighted_ids'"),
        (
            'a = "ids", b = "ids"',
            'b = "ids", a = "ids"',
            "feature 'h': expected columns {'a': 'ids', 'b': 'ids'}",
        ),
        ('{ a = "item" }', '{ b = "item" }', "feature 'h': expected column_tables {'a': 'item'}"),
        (AGE, AGE.replace("nro", "ro"), "feature 'age': expected [[nro]] (schema in use), got [[ro]]"),
    ],
)
def test_an_unreadable_schema_change_is_refused(old: str, new: str, message: str) -> None:
    text = GOOD + SEQUENCE
    assert old in text
    with pytest.raises(SchemaError) as error:
        reading_plan(parse_schema(text.replace(old, new, 1)), parse_schema(text))
    assert message in str(error.value)
