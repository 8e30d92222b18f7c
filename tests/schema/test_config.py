"""Every way in which a setting can be wrong is one sentence that names it."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from roostream.errors import ConfigError
from roostream.schema.settings import check_environment, load, parse_bytes, parse_duration_ms, setting
from roostream.schema.toml_file import read_toml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    dim: int = setting(8, "width")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    listen: str = setting(help="host:port to listen on")
    window_ms: int = setting(600_000, "join window")
    body_bytes: int = setting(1 << 20, "largest body")
    ratio: float = setting(0.5, "a share")
    mode: Literal["off", "session", "user"] = setting("off", "scope")
    shards: tuple[str, ...] = setting((), "shards")
    sizes: tuple[int, ...] = setting((), "sizes")
    inner: Inner = setting(factory=Inner, help="a table")
    extra: dict[str, str] = setting(factory=dict, help="names")
    anything: Any = setting(None, "any value")
    home: Path = setting(Path("."), "directory")
    limit: int | None = setting(None, "optional")
    exact: bool = setting(False, "a switch")

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"expected ratio in 0..1, got {self.ratio}")


def loaded(tmp_path: Path, text: str, **environ: str) -> Program:
    path = tmp_path / "program.toml"
    path.write_text(text, encoding="utf-8")
    return load(Program, path, program="prog", environ={f"ROOSTREAM_PROG_{k}": v for k, v in environ.items()})


GOOD = 'listen = "a:1"\n'


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("window_ms = 5", "window_ms", 5),
        ('window_ms = "2m"', "window_ms", 120_000),
        ('window = "1.5h"', "window_ms", 5_400_000),
        ("window = 7", "window_ms", 7),
        ('body = "64KiB"', "body_bytes", 65_536),
        ("ratio = 1", "ratio", 1.0),
        ('mode = "user"', "mode", "user"),
        ('shards = ["a:1", "b:2"]', "shards", ("a:1", "b:2")),
        ("inner = { dim = 3 }", "inner", Inner(dim=3)),
        ('extra = { a = "b" }', "extra", {"a": "b"}),
        ("anything = [1, 2]", "anything", [1, 2]),
        ('home = "x/y"', "home", Path("x/y")),
        ("limit = 3", "limit", 3),
    ],
)
def test_a_file_sets_a_field(tmp_path: Path, text: str, field: str, value: object) -> None:
    assert getattr(loaded(tmp_path, GOOD + text), field) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("LISTEN", "b:2", "b:2"),
        ("WINDOW_MS", "20s", 20_000),
        ("BODY_BYTES", "2MiB", 2 << 20),
        ("RATIO", "0.25", 0.25),
        ("MODE", "session", "session"),
        ("MODE", '"session"', "session"),
        ("SHARDS", "a:1, b:2", ("a:1", "b:2")),
        ("SHARDS", '["a:1"]', ("a:1",)),
        ("LIMIT", "5", 5),
        ("EXACT", "true", True),
        ("HOME", "/x", Path("/x")),
    ],
)
def test_the_environment_wins_over_the_file(tmp_path: Path, name: str, text: str, value: object) -> None:
    assert getattr(loaded(tmp_path, GOOD + "window_ms = 1", **{name: text}), name.lower()) == value


def test_flags_win_over_all_and_none_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(GOOD + "window_ms = 1", encoding="utf-8")
    flags = {"window_ms": 3, "ratio": None}
    got = load(Program, path, program="prog", flags=flags, environ={"ROOSTREAM_PROG_WINDOW_MS": "2"})
    assert (got.window_ms, got.ratio) == (3, 0.5)


def test_without_a_file_the_defaults_hold() -> None:
    assert load(Program, flags={"listen": "x:1"}, environ={}) == Program(listen="x:1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "program.toml: expected 'listen' (host:port to listen on), got nothing; add it"),
        (GOOD + "windwo_ms = 3", "program.toml:2: unknown key 'windwo_ms' = 3; did you mean 'window_ms'?"),
        (GOOD + "inner = { dmi = 3 }", "program.toml:2: unknown key 'inner.dmi' = 3; did you mean 'dim'?"),
        (GOOD + "[inner]\ndim = 'x'", "program.toml:3: key 'inner.dim': expected int, got 'x'"),
        (
            GOOD + "window = 1\nwindow_ms = 2",
            "program.toml:3: 'window' and 'window_ms' are one setting; keep one of them",
        ),
        (GOOD + "window = '5 parsecs'", "program.toml:2: key 'window': expected a duration such as"),
        (GOOD + "window = inf", "key 'window': expected a duration such as"),
        (GOOD + "window = true", "key 'window': expected a duration such as"),
        (GOOD + "body = 'x'", "key 'body': expected a size such as '64MiB' or '1GB', got 'x'"),
        (GOOD + "window_ms = 1.5", "key 'window_ms': expected int, got 1.5"),
        (GOOD + "exact = 1", "key 'exact': expected bool, got 1"),
        (GOOD + "sizes = [true]", "key 'sizes': expected int, got True"),
        ("listen = 5", "program.toml:1: key 'listen': expected str, got 5"),
        (
            GOOD + "mode = 'usr'",
            "key 'mode': expected one of off, session, user, got 'usr'; did you mean 'user'?",
        ),
        (GOOD + "shards = 'a'", "key 'shards': expected a list, got 'a'"),
        (GOOD + "inner = 3", "key 'inner': expected a table, got 3"),
        (GOOD + "extra = 3", "key 'extra': expected a table, got 3"),
        (GOOD + "extra = { a = ['x'] }", "key 'extra': expected str, got ['x']"),
        (GOOD + "ratio = 2.0", "program.toml: expected ratio in 0..1, got 2.0"),
        ("listen = \n", "program.toml: not TOML: Invalid value (at line 1"),
    ],
)
def test_what_is_wrong_in_a_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("WINDOW_MS", "soon", "environment ROOSTREAM_PROG_WINDOW_MS: expected a duration such as"),
        ("LIMIT", "20s", "environment ROOSTREAM_PROG_LIMIT: expected int, got '20s'"),
        ("RATIO", "half", "environment ROOSTREAM_PROG_RATIO: expected float, got 'half'"),
        (
            "MODE",
            "usr",
            "environment ROOSTREAM_PROG_MODE: expected one of off, session, user, got 'usr'; did you mean 'user'?",
        ),
        ("EXACT", "1", "environment ROOSTREAM_PROG_EXACT: expected bool, got 1"),
        (
            "RATOI",
            "s3cret",
            "environment ROOSTREAM_PROG_RATOI: expected the name of a setting, got none; did you mean 'ROOSTREAM_PROG_RATIO'?",
        ),
        ("INNER_DMI", "3", "did you mean 'ROOSTREAM_PROG_INNER_DIM'?"),
    ],
)
def test_what_is_wrong_in_the_environment_is_told(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, GOOD, **{name: text})
    assert message in str(error.value) and "s3cret" not in str(error.value)


def test_what_an_orchestrator_tells_of_a_service_of_the_same_name_is_no_mistake() -> None:
    told = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    environ = {f"ROOSTREAM_PROG_{name}": "10.0.0.1" for name in told}
    assert load(Program, program="prog", flags={"listen": "x:1"}, environ=environ) == Program(listen="x:1")


def test_a_short_name_is_one_in_the_environment_too(tmp_path: Path) -> None:
    assert loaded(tmp_path, GOOD + "window = 1", WINDOW="2s", BODY="1MiB").window_ms == 2000
    with pytest.raises(
        ConfigError, match="expected one variable for a setting, got ROOSTREAM_PROG_WINDOW too"
    ):
        loaded(tmp_path, GOOD, WINDOW="2s", WINDOW_MS="3")


def test_a_variable_of_no_program_is_refused_with_the_nearest() -> None:
    check = partial(check_environment, ("worker", "serving"), ("ROOSTREAM_LOG",))
    check(
        {
            "ROOSTREAM_LOG": "INFO",
            "ROOSTREAM_WORKER_SEED": "1",
            "ROOSTREAM_REDIS_SERVICE_HOST": "10.0.0.1",
            "PATH": "",
        }
    )
    with pytest.raises(
        ConfigError, match="environment ROOSTREAM_WROKER_SEED: expected the name of a program"
    ) as error:
        check({"ROOSTREAM_WROKER_SEED": "s3cret"})
    assert "s3cret" not in str(error.value)


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


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; expected a TOML file"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="can't be read"):
        read_toml(tmp_path)
    (tmp_path / "deep.toml").write_text("x = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="got thousands of them; write it flat"):
        read_toml(tmp_path / "deep.toml")
    (tmp_path / "latin.toml").write_bytes(b"x = '\xff'")
    with pytest.raises(ConfigError, match="can't be read"):
        read_toml(tmp_path / "latin.toml")


def test_quantities() -> None:
    assert [parse_duration_ms(t) for t in ("250ms", "20s", "30m", "30min", "1.5h", "7d", 9)] == [
        250, 20_000, 1_800_000, 1_800_000, 5_400_000, 604_800_000, 9,
    ]  # fmt: skip
    assert [parse_bytes(t) for t in ("1KiB", "1 GB", "3B", 4)] == [1024, 10**9, 3, 4]
    with pytest.raises(ConfigError, match="expected a size"):
        parse_bytes("20s")
