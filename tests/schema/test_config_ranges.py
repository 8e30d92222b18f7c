"""Ranges and choices stand beside fields; however a value comes in, what is out of range is told in one form."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest

from roostream.errors import ConfigError
from roostream.schema.settings import Settings, check_name, load, refusal, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Login(Settings):
    user: str = setting("", "who")
    password: str = setting("", "secret", secret=True)
    tries: int = setting(3, "how often", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program(Settings):
    window_ms: int = setting(10, "a window", least=1)
    share: float = setting(0.5, "a share", least=0, most=1)
    norm: float = setting(1.0, "a norm", above=0)
    prior: float = setting(0.1, "a probability", above=0, below=1)
    limit: int | None = setting(None, "none, or few", most=9)
    layers: tuple[int, ...] = setting((8, 4), "widths", least=1, most=64)
    mode: Literal["off", "user"] = setting("off", "scope")
    login: Login = setting(factory=Login, help="a table")
    index: int = setting(0, "which one", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index >= self.window_ms:
            raise refusal("index", f"less than window_ms = {self.window_ms}", self.index, "lower it")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"window_ms": 0}, "key 'window_ms': expected at least 1, got 0"),
    ({"share": 1.5}, "key 'share': expected 0..1, got 1.5"),
    ({"share": float("nan")}, "key 'share': expected 0..1, got nan"),
    ({"norm": 0.0}, "key 'norm': expected above 0, got 0.0"),
    ({"prior": 1.0}, "key 'prior': expected above 0 and below 1, got 1.0"),
    ({"limit": 10}, "key 'limit': expected at most 9, got 10"),
    ({"layers": (8, 65)}, "key 'layers': expected 1..64, got 65"),
    ({"mode": "usr"}, "key 'mode': expected one of off, user, got 'usr'; did you mean 'user'?"),
    ({"index": 12}, "key 'index': expected less than window_ms = 10, got 12; lower it"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_value_out_of_range_is_refused_in_code(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Program(**given)
    assert str(caught.value) == said


def test_bounds_themselves_are_allowed_and_none_has_no_range() -> None:
    made = Program(window_ms=1, share=1.0, limit=9, layers=(1, 64))
    assert (made.window_ms, made.share, made.limit, Program().limit) == (1, 1.0, 9, None)


IN_A_FILE = [
    ("share = 0.1\nwindow_ms = 0", {}, "p.toml:2: key 'window_ms': expected at least 1, got 0"),
    ('window = "0s"', {}, "p.toml:1: key 'window_ms': expected at least 1, got 0"),
    (
        "",
        {"ROOSTREAM_P_LOGIN_TRIES": "0"},
        "environment ROOSTREAM_P_LOGIN_TRIES: key 'login.tries': expected at least 1, got 0",
    ),
    ("layers = [\n 8,\n 65]", {}, "p.toml:1: key 'layers': expected 1..64, got 65"),
    ("index = 12", {}, "p.toml:1: key 'index': expected less than window_ms = 10, got 12; lower it"),
    ("[login]\nuser = 'a'\ntries = 0", {}, "p.toml:3: key 'login.tries': expected at least 1, got 0"),
    (
        "window_ms = 5",
        {"ROOSTREAM_P_WINDOW_MS": "0"},
        "environment ROOSTREAM_P_WINDOW_MS: key 'window_ms': expected at least 1",
    ),
]


@pytest.mark.parametrize(("text", "environ", "said"), IN_A_FILE, ids=[said for *_, said in IN_A_FILE])
def test_a_refusal_names_where_the_value_was_set(
    tmp_path: Path, text: str, environ: dict[str, str], said: str
) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(Program, tmp_path / "p.toml", program="p", environ=environ)
    assert said in str(caught.value) and str(caught.value).count("expected") == 1


def test_a_flag_is_named_as_it_is_given() -> None:
    with pytest.raises(ConfigError, match=r"^--window-ms: key 'window_ms': expected at least 1, got 0$"):
        load(Program, flags={"window_ms": 0}, environ={})


def test_the_environment_sets_fields_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("[login]\nuser = 'a'\n")
    environ = {"ROOSTREAM_P_LOGIN_PASSWORD": "s3cret", "ROOSTREAM_P_LOGIN_TRIES": "5"}
    assert load(Program, tmp_path / "p.toml", program="p", environ=environ).login == Login(
        user="a", password="s3cret", tries=5
    )


@pytest.mark.parametrize("text", ["[login]\npasword = 's3cret'", "[login]\npassword = ['s3cret']"])
def test_a_secret_is_in_no_message_and_no_repr(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(Program, tmp_path / "p.toml")
    assert "s3cret" not in str(caught.value) and "password" in str(caught.value)
    assert "s3cret" not in repr(Program(login=Login(password="s3cret")))


def test_a_short_form_that_could_be_two_keys_is_refused(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Kept(Settings):
        kept_ms: int = setting(1, "how long")
        kept_bytes: int = setting(1, "how much")

    (tmp_path / "p.toml").write_text("kept = 5")
    with pytest.raises(ConfigError, match=r"p.toml:1: unknown key 'kept' = 5; did you mean 'kept_"):
        load(Kept, tmp_path / "p.toml")


def test_a_name_can_stand_in_files_topics_and_metrics() -> None:
    check_name("table", "item_id-2")
    with pytest.raises(ConfigError, match="table 'Item': expected a name of lower-case letters"):
        check_name("table", "Item")
