"""Loading settings from a TOML file, the environment and flags. Each error is one line that names the
setting."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import ConfigError
from roostream.schema.settings import (
    Settings,
    check_environment,
    check_name,
    load,
    parse_bytes,
    parse_duration_ms,
    setting,
    setting_error,
)
from roostream.schema.toml_file import MAX_FILE_BYTES, SourceLocation, line_numbers, read_toml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Login(Settings):
    user: str = setting("", "who")
    password: str = setting("", "secret", secret=True)
    tries: int = setting(3, "how often", ge=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention(Settings):
    kept_ms: int = setting(1, "how long")
    kept_bytes: int = setting(1, "how much")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program(Settings):
    listen: str = setting(help="host:port to listen on")
    window_ms: int = setting(600_000, "join window", ge=1)
    body_bytes: int = setting(1 << 20, "largest body")
    ratio: float = setting(0.5, "a share", ge=0, le=1)
    norm: float = setting(1.0, "a norm", gt=0)
    prior: float = setting(0.1, "a probability", gt=0, lt=1)
    mode: Literal["off", "session", "user"] = setting("off", "scope")
    shards: tuple[str, ...] = setting((), "shards")
    sizes: tuple[int, ...] = setting((), "sizes", ge=1, le=64)
    login: Login = setting(factory=Login, help="a table")
    logins: dict[str, Login] = setting(factory=dict, help="tables by name")
    names: dict[str, str] = setting(factory=dict, help="names")
    anything: Any = setting(None, "any value")
    home: Path = setting(Path("."), "directory")
    limit: int | None = setting(None, "optional", le=9)
    exact: bool = setting(False, "a switch")
    index: int = setting(0, "which one", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index >= self.window_ms:
            raise setting_error("index", f"less than window_ms = {self.window_ms}", self.index, "lower it")


def load_settings(tmp_path: Path, text: str, **environ: str) -> Program:
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8")
    return load(Program, path, program="prog", environ=environ)


GOOD = 'listen = "a:1"\n'


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("window_ms = 5", "window_ms", 5),
        ('window_ms = "2m"', "window_ms", 120_000),
        ('window = "1.5h"', "window_ms", 5_400_000),
        ('body = "64KiB"', "body_bytes", 65_536),
        ("ratio = 1", "ratio", 1.0),
        ('mode = "user"', "mode", "user"),
        ('shards = ["a:1", "b:2"]', "shards", ("a:1", "b:2")),
        ("login = { tries = 5 }", "login", Login(tries=5)),
        ('logins = { a = { user = "b" } }', "logins", {"a": Login(user="b")}),
        ('names = { a = "b" }', "names", {"a": "b"}),
        ("anything = [1, 2]", "anything", [1, 2]),
        ('home = "x/y"', "home", Path("x/y")),
        ("limit = 3", "limit", 3),
    ],
)
def test_a_file_sets_a_field(tmp_path: Path, text: str, field: str, value: object) -> None:
    assert getattr(load_settings(tmp_path, GOOD + text), field) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("LISTEN", "b:2", "b:2"),
        ("WINDOW_MS", "20s", 20_000),
        ("BODY_BYTES", "2MiB", 2 << 20),
        ("RATIO", "0.25", 0.25),
        ("MODE", '"session"', "session"),
        ("SHARDS", "a:1, b:2", ("a:1", "b:2")),
        ("SHARDS", '["a:1"]', ("a:1",)),
        ("EXACT", "true", True),
        ("HOME", "/x", Path("/x")),
    ],
)
def test_the_environment_overrides_the_file(tmp_path: Path, name: str, text: str, value: object) -> None:
    config = load_settings(tmp_path, GOOD + "window_ms = 1", **{f"ROOSTREAM_PROG_{name}": text})
    assert getattr(config, name.lower()) == value


def test_flags_override_all_and_none_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(GOOD + "window = 1", encoding="utf-8")
    flags = {"window_ms": 3, "ratio": None}
    config = load(Program, path, program="prog", flags=flags, environ={"ROOSTREAM_PROG_WINDOW_MS": "2"})
    assert (config.window_ms, config.ratio) == (3, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.toml: expected 'listen' (host:port to listen on), got nothing"),
        (GOOD + "windwo_ms = 3", "p.toml:2: unknown key 'windwo_ms' = 3; did you mean 'window_ms'?"),
        (GOOD + "login = { tires = 3 }", "p.toml:2: unknown key 'login.tires'; did you mean 'tries'?"),
        (GOOD + "[login]\ntries = 'x'", "p.toml:3: key 'login.tries': expected integer, got 'x'"),
        (GOOD + "window = 1\nwindow_ms = 2", "p.toml:3: 'window' and 'window_ms' are one setting"),
        (GOOD + "window = '5 parsecs'", "p.toml:2: key 'window': expected a duration such as"),
        (GOOD + "body = 'x'", "key 'body': expected a size such as '64MiB' or '1GB', got 'x'"),
        (GOOD + "window_ms = 1.5", "key 'window_ms': expected integer, got 1.5"),
        (GOOD + "exact = 1", "key 'exact': expected true or false, got 1"),
        (GOOD + "sizes = [true]", "key 'sizes': expected list of integer, got [True]"),
        ("listen = 5", "p.toml:1: key 'listen': expected text, got 5"),
        (GOOD + "mode = 'usr'", "expected one of off, session, user, got 'usr'; did you mean 'user'?"),
        (GOOD + "shards = 'a'", "key 'shards': expected list of text, got 'a'"),
        (GOOD + "login = 3", "key 'login': expected table, got 3"),
        (GOOD + "ratio = 2.0", "p.toml:2: key 'ratio': expected 0..1, got 2.0"),
        (GOOD + 'window = "0s"', "p.toml:2: key 'window': expected at least 1, got 0"),
        (GOOD + "sizes = [\n 8,\n 65]", "p.toml:2: key 'sizes': expected 1..64, got 65"),
        (GOOD + "window = 9\nindex = 9", "p.toml:3: key 'index': expected less than window_ms = 9, got 9"),
        (GOOD + "[login]\ntries = 0", "p.toml:3: key 'login.tries': expected at least 1, got 0"),
        ("listen = \n", "p.toml: expected TOML, got something else: Invalid value (at line 1"),
    ],
)
def test_an_error_in_a_file_names_line_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("WINDOW_MS", "soon", "environment ROOSTREAM_PROG_WINDOW_MS: key 'window_ms': expected a duration"),
        (
            "WINDOW_MS",
            "0",
            "environment ROOSTREAM_PROG_WINDOW_MS: key 'window_ms': expected at least 1, got 0",
        ),
        ("MODE", "usr", "expected one of off, session, user, got 'usr'; did you mean 'user'?"),
        ("RATOI", "s3cret", "ROOSTREAM_PROG_RATOI: expected the name of a setting, got none; did you mean"),
        ("LOGIN_TIRES", "3", "did you mean 'ROOSTREAM_PROG_LOGIN_TRIES'?"),
        ("LOGIN_TRIES", "0", "ROOSTREAM_PROG_LOGIN_TRIES: key 'login.tries': expected at least 1"),
    ],
)
def test_an_error_in_the_environment_names_the_variable(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(tmp_path, GOOD, **{f"ROOSTREAM_PROG_{name}": text})
    assert message in str(error.value) and "s3cret" not in str(error.value)


def test_an_error_in_a_flag_names_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--window-ms: key 'window_ms': expected at least 1, got 0$"):
        load(Program, flags={"window_ms": 0}, environ={})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window_ms": 0}, "key 'window_ms': expected at least 1, got 0"),
        ({"ratio": float("nan")}, "key 'ratio': expected 0..1, got nan"),
        ({"norm": 0.0}, "key 'norm': expected above 0, got 0.0"),
        ({"prior": 1.0}, "key 'prior': expected above 0 and below 1, got 1.0"),
        ({"limit": 10}, "key 'limit': expected at most 9, got 10"),
        ({"sizes": (8, 65)}, "key 'sizes': expected 1..64, got 65"),
        ({"mode": "usr"}, "key 'mode': expected one of off, session, user, got 'usr'; did you mean 'user'?"),
        ({"index": 12, "window_ms": 10}, "key 'index': expected less than window_ms = 10, got 12; lower it"),
    ],
)
def test_a_value_out_of_range_is_rejected_in_code(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Program(listen="a:1", **given)
    assert str(caught.value) == message


def test_variables_that_kubernetes_sets_for_a_service_are_ignored() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    environ = {f"ROOSTREAM_PROG_{name}": "10.0.0.1" for name in names}
    assert load(Program, program="prog", flags={"listen": "x:1"}, environ=environ) == Program(listen="x:1")


def test_a_short_name_works_in_the_environment_but_not_beside_the_long_one(tmp_path: Path) -> None:
    config = load_settings(
        tmp_path, GOOD + "window = 1", ROOSTREAM_PROG_WINDOW="2s", ROOSTREAM_PROG_BODY="1MiB"
    )
    assert (config.window_ms, config.body_bytes) == (2000, 1 << 20)
    with pytest.raises(ConfigError, match="got ROOSTREAM_PROG_WINDOW too"):
        load_settings(tmp_path, GOOD, ROOSTREAM_PROG_WINDOW="2s", ROOSTREAM_PROG_WINDOW_MS="3")


def test_a_short_name_that_could_be_two_keys_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("kept = 5")
    with pytest.raises(ConfigError, match=r"p.toml:1: unknown key 'kept' = 5; did you mean 'kept_"):
        load(Retention, tmp_path / "p.toml")


def test_a_variable_of_an_unknown_program_is_rejected_with_the_nearest() -> None:
    check = partial(check_environment, ("worker", "serving"), ("ROOSTREAM_LOG",))
    good = {"ROOSTREAM_LOG": "INFO", "ROOSTREAM_WORKER_SEED": "1", "PATH": ""}
    check({**good, "ROOSTREAM_REDIS_SERVICE_HOST": "10.0.0.1"})
    with pytest.raises(ConfigError, match="ROOSTREAM_WROKER_SEED: expected the name of a program") as error:
        check({"ROOSTREAM_WROKER_SEED": "s3cret"})
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("text", ["[login]\npasword = 's3cret'", "[login]\npassword = ['s3cret']"])
def test_a_secret_is_in_no_message_and_no_repr(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path, GOOD + text)
    assert "s3cret" not in str(caught.value) and "password" in str(caught.value)
    assert "s3cret" not in repr(Program(listen="a:1", login=Login(password="s3cret")))


def test_a_byte_order_mark_and_a_pipe_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbflisten = 'a:1'\n")
    assert load(Program, path, environ={}).listen == "a:1"
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write("listen = 'a:1'\nwindwo = 3\n")
    with pytest.raises(ConfigError, match=rf"^/dev/fd/{reading}:2: unknown key 'windwo'"):
        load(Program, f"/dev/fd/{reading}", environ={})
    os.close(reading)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = " + b"[" * 5000 + b"]" * 5000, "nested too deep"),
        (b"x = '\xff'", "can't be read"),
        (None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "p.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"p.toml: .*{message}"):
        read_toml(tmp_path / "p.toml")


def test_durations_and_sizes_have_units() -> None:
    durations = {"250ms": 250, "20s": 20_000, "30min": 1_800_000, "1.5h": 5_400_000, "7d": 604_800_000}
    assert {text: parse_duration_ms(text) for text in durations} == durations
    assert [parse_bytes(t) for t in ("1KiB", "1 GB", "3B", 4)] == [1024, 10**9, 3, 4]
    assert parse_duration_ms(10**400) == 10**400, "its range is that of the setting"
    with pytest.raises(ConfigError, match="expected a size"):
        parse_bytes("20s")
    with pytest.raises(ConfigError, match="expected a duration"):
        parse_duration_ms("9" * 400 + "h")


def test_names_are_limited_to_characters_that_files_topics_and_metrics_allow() -> None:
    check_name("table", "item_id-2")
    with pytest.raises(ConfigError, match="table 'Item'"):
        check_name("table", "Item")


# References to variables and files: ${NAME} and ${file:PATH}
def test_a_variable_may_stand_anywhere_in_a_text(tmp_path: Path) -> None:
    text = 'listen = "${HOST}.${ZONE}:70"\nnames = { a = "${HOST}" }'
    config = load_settings(tmp_path, text, HOST="shard-0", ZONE="west")
    assert (config.listen, config.names) == ("shard-0.west:70", {"a": "shard-0"})


def test_a_referenced_file_loses_its_last_newline(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3c ret\n\n")
    config = load_settings(tmp_path, GOOD + f'[login]\npassword = "${{file:{tmp_path}/secret}}"')
    assert config.login.password == "s3c ret\n"


def test_a_reference_is_converted_to_the_type_of_its_setting(tmp_path: Path) -> None:
    text = (
        'index="${N}"\nwindow="${T}"\nbody_bytes="${B}"\nratio="${F}"\nexact="${Y}"\nmode="${M}"\nhome="${H}"'
    )
    environ = {"N": "8", "T": "20s", "B": "64", "F": "0.25", "Y": "true", "M": "user", "H": "/data"}
    config = load_settings(tmp_path, GOOD + text, **environ)
    assert (config.index, config.window_ms, config.body_bytes, config.ratio) == (8, 20_000, 64, 0.25)
    assert (config.exact, config.mode, config.home) == (True, "user", Path("/data"))


@pytest.mark.parametrize(
    ("text", "value"), [('["${A}:1", "b:2"]', "a"), ('"${A}"', "a:1, b:2"), ('"${A}"', '["a:1", "b:2"]')]
)
def test_a_list_is_referenced_by_entry_or_as_a_whole(tmp_path: Path, text: str, value: str) -> None:
    assert load_settings(tmp_path, f"{GOOD}shards = {text}", A=value).shards == ("a:1", "b:2")


def test_a_doubled_dollar_sign_is_a_literal_one(tmp_path: Path) -> None:
    assert load_settings(tmp_path, 'listen = "$${HOST}$5{}"').listen == "${HOST}$5{}"


def test_a_referenced_value_is_never_shown(tmp_path: Path) -> None:
    config = load_settings(tmp_path, GOOD + '[login]\nuser = "${P}"', P="hunter2")
    assert "hunter2" not in repr(config) and "'${P}'" in repr(config)
    assert json.loads(json.dumps(dataclasses.asdict(config), default=str))["login"]["user"] == "hunter2"
    for key in ("index", "window", "mode", "ratio", "login", "names"):
        with pytest.raises(ConfigError) as caught:
            load_settings(tmp_path, f'{GOOD}{key} = "${{P}}"', P="hunter2")
        assert "hunter2" not in str(caught.value) and "${P}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\nlisten = "${HOST}"', "p.toml:2: key 'listen': expected HOST in the environment"),
        ('[login]\npassword = "${file:/no/such}"', "p.toml:2: key 'login.password': .*/no/such"),
        ('shards = ["a", "${env:A}"]', r"got '\$\{env:A\}'"),
        ('listen = "${}"', r"expected \$\{NAME\} or \$\{file:PATH\}"),
        ('listen = "${file:}"', r"expected \$\{NAME\} or \$\{file:PATH\}"),
    ],
)
def test_a_reference_that_cannot_be_resolved_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(tmp_path, text)


def test_a_referenced_file_is_small_and_text(tmp_path: Path) -> None:
    (tmp_path / "big").write_text("x" * (MAX_FILE_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, message in (("big", "at most 1048576 bytes"), ("binary", "not UTF-8")):
        with pytest.raises(ConfigError, match=message):
            load_settings(tmp_path, f'listen = "${{file:{tmp_path / name}}}"')


TEXT = '''# x
a = 1
"b c".d = "x # y"
s = """
multi " line [x]
"""
arr = [ # comment
  1,
  { x = 2, y = [3,
   '4]']},
]
[tables.item]
dim = 4
[tables."{a,b}".rule]
name = "[[x]]"
[[ro]]
name = "q"
[ro.extra]
z = 1979-05-27T07:32:00Z
[[ro]]
window = "r"
columns = { t = "time_ms" }
'''


def test_tables_and_keys_have_their_lines() -> None:
    assert line_numbers(TEXT, tomllib.loads(TEXT)) == {
        ("a",): 2,
        ("b c",): 3,
        ("b c", "d"): 3,
        ("s",): 4,
        ("arr",): 7,
        ("tables", "item"): 12,
        ("tables", "item", "dim"): 13,
        ("tables", "{a,b}", "rule"): 14,
        ("tables", "{a,b}", "rule", "name"): 15,
        ("ro",): 16,
        ("ro", 0): 16,
        ("ro", 0, "name"): 17,
        ("ro", 0, "extra"): 18,
        ("ro", 0, "extra", "z"): 19,
        ("ro", 1): 20,
        ("ro", 1, "window"): 21,
        ("ro", 1, "columns"): 22,
    }


VALUES = st.recursive(
    st.one_of(st.text(), st.integers(-9, 9), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=12,
)


@given(raw=st.dictionaries(st.text(), VALUES, max_size=5), multiline=st.booleans())
@settings(max_examples=60)
def test_every_key_of_any_file_has_a_line_or_one_of_its_table(raw: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(raw, multiline_strings=multiline)
    parsed = tomllib.loads(text)
    lines = line_numbers(text, parsed)
    assert all(0 < line <= len(text.splitlines()) + 1 for line in lines.values())
    for key, value in parsed.items():
        assert any(keys[0] == key for keys in lines) or value == {}


def test_an_absent_key_is_located_by_its_table() -> None:
    lines = line_numbers(TEXT, tomllib.loads(TEXT))
    location = SourceLocation("f.toml", {keys: f"f.toml:{line}: " for keys, line in lines.items()})
    assert location.describe("a") == "f.toml:2: "
    assert location.describe("absent") == "f.toml: "
    assert location.child("tables", "item").describe("absent") == "f.toml:12: "
    assert location.child("ro", 1).describe("window_ms") == "f.toml:21: ", (
        "the file has the short name without the unit"
    )
    assert location.child("ro", 1).describe_first("name", "columns") == "f.toml:22: "
    assert location.child("ro", 1).describe_first("name", "online") == "f.toml:20: "
    assert SourceLocation().describe("a") == ""
