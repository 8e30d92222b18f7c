"""Patterns such as "ctr_{10m,1h}" expand to the same schema and fingerprint as the separate names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roostream.errors import SchemaError
from roostream.schema.expand import MAX_ROWS, names_of
from roostream.schema.registry import to_toml
from roostream.schema.schema_file import load_schema
from tests.wire.sample_builders import parse_schema

LONG = Path(__file__).parent / "schemas" / "demo_long.toml"
SHIPPED = Path(__file__).parents[2] / "roostream" / "replay" / "schemas"
LABEL = '[[label]]\nname = "click"\naction = "click"\n'
CTR = '[[nro]]\nonline = "ctr_{10m,1h}"\n'


@pytest.mark.parametrize(
    ("name", "fingerprint"), [("ebnerd", 0x0A708684F33AED96), ("demo", 0x87E49F9D4F0BF570)]
)
def test_a_shipped_schema_keeps_its_fingerprint(name: str, fingerprint: int) -> None:
    assert load_schema(SHIPPED / f"{name}.toml").fingerprint == fingerprint


def test_a_schema_with_patterns_equals_the_schema_with_separate_names() -> None:
    assert load_schema(SHIPPED / "demo.toml") == load_schema(LONG)


@pytest.mark.parametrize("defaults", [True, False])
def test_an_expanded_schema_reads_as_the_same_schema(defaults: bool) -> None:
    schema = load_schema(SHIPPED / "ebnerd.toml")
    text = to_toml(schema, defaults=defaults)
    assert parse_schema(text) == schema
    assert ("init_scale" in text) == defaults


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("age_s", ("age_s",)),
        ("ctr_{10m,1h}", ("ctr_10m", "ctr_1h")),
        ("{views,clicks}_{1h,6h}", ("views_1h", "views_6h", "clicks_1h", "clicks_6h")),
        ("{ctr_{10m,1h},age_s}", ("ctr_10m", "ctr_1h", "age_s")),
        ("{ a, b }", ("a", "b")),
        ("{a}", ("a",)),
        ("", ("",)),
    ],
)
def test_with_several_braces_the_last_one_varies_fastest(pattern: str, names: tuple[str, ...]) -> None:
    assert names_of(pattern) == names


def test_features_of_a_pattern_are_named_after_their_online_values() -> None:
    schema = parse_schema(
        LABEL + '[[nro]]\nonline = "{views,ctr}_{10m,1h}"\ndefault = 2.0\n[[nro]]\nname = "{a,b}"\n'
    )
    assert [(f.name, f.online, f.default) for f in schema.nro] == [
        ("views_10m", "views_10m", 2.0),
        ("views_1h", "views_1h", 2.0),
        ("ctr_10m", "ctr_10m", 2.0),
        ("ctr_1h", "ctr_1h", 2.0),
        ("a", "", 0.0),
        ("b", "", 0.0),
    ]


def test_names_are_paired_with_online_values_and_tables() -> None:
    ids = 'kind = "ids"\ntable = "{item,user}"\n'
    text = (
        '[tables."{item,user}"]\ndim = 8\n[[ro]]\nname = "{last,who}"\n'
        + ids
        + '[[ro]]\nname = "{x,y}"\nkind = "ids"\n'
    )
    schema = parse_schema(
        LABEL + text + 'table = "user"\n[[nro]]\nname = "r_{short,long}"\nonline = "ctr_{10m,24h}"\n'
    )
    assert [(f.name, f.table) for f in schema.ro] == [
        ("last", "item"),
        ("who", "user"),
        ("x", "user"),
        ("y", "user"),
    ]
    assert [(f.name, f.online) for f in schema.nro] == [("r_short", "ctr_10m"), ("r_long", "ctr_24h")]
    assert [(t.name, t.dim) for t in schema.tables] == [("item", 8), ("user", 8)]


@pytest.mark.parametrize(
    ("text", "outputs"),
    [
        ('input = "ctr_1h"\nop = "rank"', ["ctr_1h_rank"]),
        ('input = "ctr_1h"\nop = "log1p"', ["ctr_1h"]),
        (
            'inputs = ["ctr_{10m,1h}"]\nop = ["rank", "share"]',
            ["ctr_10m_rank", "ctr_10m_share", "ctr_1h_rank", "ctr_1h_share"],
        ),
        (
            'inputs = ["ctr_10m", "ctr_1h"]\nop = "log1p"\noutput = "{input}_log"',
            ["ctr_10m_log", "ctr_1h_log"],
        ),
        (
            'inputs = "ctr_{10m,1h}"\nop = "rank"\noutput = "{op}_of_{input}"',
            ["rank_of_ctr_10m", "rank_of_ctr_1h"],
        ),
        ('input = "ctr_1h"\nop = ["log1p", "rank"]', ["ctr_1h", "ctr_1h_rank"]),
    ],
)
def test_transform_outputs_have_default_names(text: str, outputs: list[str]) -> None:
    assert [t.output for t in parse_schema(LABEL + CTR + "[[transform]]\n" + text).transforms] == outputs


def transform(text: str) -> str:
    return LABEL + CTR + "[[transform]]\n" + text


MANY = "{" + ",".join(f"a{i}" for i in range(65)) + "}"
WRONG = [
    ('[[ro]]\nname = "a_{b,c"\n', "schema.toml:4: [[ro]]: 'a_{b,c': expected '}' for the '{' at 2, got none"),
    ('[[ro]]\nname = "a_{b,c"\n' + CTR, "schema.toml:4: [[ro]]: 'a_{b,c': expected '}'"),
    ('[[ro]]\nname = "a_b,c}"\n', "schema.toml:4: [[ro]]: 'a_b,c}': expected '{' before the '}' at 5"),
    ('[[ro]]\nname = "a_{b,,c}"\n', "'a_{b,,c}': expected a name between braces and commas, got none at 5"),
    ('[[ro]]\nname = "a_{}"\n', "'a_{}': expected a name between braces and commas, got none at 3"),
    (f'[[ro]]\nname = "{MANY}{MANY}"\n', f"expected at most {MAX_ROWS} names, got more"),
    ('[[ro]]\nname = "' + "{a}" * 65 + '"\n', "expected names of at most 64 characters, got longer"),
    ('[[ro]]\nname = "' + "{" * 5000 + '"\n', "expected braces at most 8 deep"),
    ('[[nro]]\nname = "{a,b,c}"\nonline = "ctr_{10m,1h}"\n',
     "schema.toml:4: [[nro]]: expected one online for each of 3 names, got 2: 'ctr_{10m,1h}'"),
    ('[[nro]]\nname = "c_{1h,10m}"\nonline = "ctr_{10m,1h}"\n',
     "expected online in the order of 'c_{1h,10m}', got 'ctr_{10m,1h}'"),
    (CTR + '[[nro]]\nname = "ctr_1h"\n', "schema.toml:7: duplicate feature 'ctr_1h'"),
    (CTR + CTR, "schema.toml:7: duplicate feature 'ctr_10m'"),
    ('[[nro]]\nonline = "ctr_{10m,2h}"\n', "schema.toml:5: feature 'ctr_2h': unknown online feature"),
    ('[[ro]]\nname = "{a,b.c}"\n', "schema.toml:5: feature 'b.c': expected a name of lower-case letters"),
    ('[tables."{a,b"]\ndim = 8\n', "[tables.{a,b]: '{a,b': expected '}'"),
    ('[tables.a]\ndim = 8\n[tables."{a,b}"]\ndim = 8\n', "[tables.{a,b}]: table 'a' occurs twice"),
    ("transform = 3\n" + LABEL, "expected [[transform]] tables, got 3"),
    (transform('inputs = ["ctr_{10m,1d}"]\nop = "rank"'),
     "schema.toml:7: transform 'ctr_1d_rank': unknown input 'ctr_1d'; did you mean 'ctr_1h'?"),
    (transform('op = "rank"\ninputs = []'),
     "schema.toml:6: [[transform]]: expected at least one entry in inputs, got an empty list"),
    (transform('input = "ctr_1h"\nop = []'), "[[transform]]: expected at least one entry in op"),
    (transform('input = "ctr_1h"\ninputs = ["ctr_1h"]\nop = "rank"'), "expected input or inputs, got both"),
    (transform('inputs = [3]\nop = "rank"'), "expected a text or a list of texts in inputs, got [3]"),
    (transform('inputs = ["ctr_1h"]'), "schema.toml:6: [[transform]]: expected op, got nothing"),
    (transform('inputs = ["ctr_{10m,1h}"]\nop = "log1p"\noutput = "x"'),
     "expected {input} in the output of 2 inputs, got 'x'"),
    (transform('inputs = ["ctr_{10m,1h}", "ctr_1h"]\nop = "rank"'),
     "schema.toml:6: transform 'ctr_1h_rank': that name is taken"),
    (transform(f'inputs = ["{MANY}"]\nop = {["rank"] * 64}'), "expected at most 4096 inputs"),
    (("[[ro]]\nname = '" + MANY + "'\n") * 64, "schema.toml:130: [[ro]]: expected at most 4096 [[ro]]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[m[:60] for _, m in WRONG])
def test_an_error_in_a_pattern_names_line_and_pattern(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(text if LABEL in text else LABEL + text, encoding="utf-8")
    with pytest.raises(SchemaError) as error:
        load_schema(path)
    text = str(error.value)
    assert message in text and re.match(rf"{path}:\d+: ", text) and "\n" not in text
