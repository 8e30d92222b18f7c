"""One frozen dataclass a program, loaded once: TOML file, then environment, then flags.

A field `x_ms` can be written `x_ms = 20000` or `x = "20s"`; a field `x_bytes`, `x_bytes = 1048576` or `x = "1MiB"`.
The environment variable of field `x` of program `worker` is ROOSTREAM_WORKER_X; of field `y` of its table `x`,
ROOSTREAM_WORKER_X_Y. Help and range stand beside the field: `window_ms: int = setting(600_000, "…", least=1)`.

Whatever is refused is told in one form: `file:line: key 'window_ms': expected at least 1, got 0`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from roo.errors import ConfigError, nearest

T = TypeVar("T")
_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class Refusal(ConfigError):
    """A setting that can't be, before it is known where it was set. **When** a dataclass of settings is made in code, this is
    what its maker sees; `build` adds the place."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"key {key!r}: {reason}")
        self.key, self.reason = key, reason


def refusal(key: str, expected: str, got: object, do: str = "") -> Refusal:
    """The one form of a refusal, to be raised: `key 'index': expected 0..1, got 2`, and what to do about it."""
    return Refusal(key, f"expected {expected}, got {got!r}{f'; {do}' if do else ''}")


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """`least` and `most` are allowed themselves, `above` and `below` are not."""

    least: float | None
    most: float | None
    above: float | None
    below: float | None

    def hold(self, value: float) -> bool:
        """False for NaN, if there is any bound."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{_plain(self.least)}..{_plain(self.most)}"
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {_plain(bound)}" for word, bound in words if bound is not None)


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Any = dataclasses.MISSING,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field with its help string and the range of its value (of each entry, if it is a tuple); see `_Bounds`.
    A secret one is left out of `repr` and of messages."""
    bounded = any(bound is not None for bound in (least, most, above, below))
    bounds = _Bounds(least, most, above, below) if bounded else None
    given: dict[str, Any] = {"metadata": {"help": help, "secret": secret, "bounds": bounds}, "repr": not secret}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, **given)
    return dataclasses.field(default=default, **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of every dataclass of settings: ranges and choices are checked whenever one is made, from a file or in code. What
    concerns two fields is checked in a `__post_init__` of one's own, which calls this one first.

    Raises:
        Refusal: a value outside its range or choices.
    """

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            _check(field, hints[field.name], getattr(self, field.name))


def _hints(cls: Any) -> dict[str, Any]:
    return _cached_hints(cls)


_cached_hints = functools.cache(typing.get_type_hints)


def _check(field: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
        raise Refusal(field.name, _choice(typing.get_args(hint), value))
    bounds: _Bounds | None = field.metadata.get("bounds")
    if bounds is not None and value is not None:
        for one in value if isinstance(value, tuple) else (value,):
            if not bounds.hold(one):
                raise refusal(field.name, str(bounds), one)


def _choice(choices: tuple[Any, ...], value: object) -> str:
    known = [str(choice) for choice in choices]
    return f"expected one of {', '.join(known)}, got {value!r}{nearest(str(value), known)}"


def check_name(what: str, name: str) -> None:
    """Raises ConfigError: not a name that can stand in files, topics and metrics."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} {name!r}: expected a name of lower-case letters, digits, '_' and '-' (at most 64)")


def parse_duration_ms(text: str | int | float) -> int:
    """`"20s"`, `"30m"`, `"1.5h"`, `"250ms"`, `"7d"` or a number of ms → ms."""
    return _quantity(text, _MS, "a duration such as '500ms', '20s', '30m', '6h' or '7d'")


def parse_bytes(text: str | int) -> int:
    """`"64MiB"`, `"1GB"` or a number of bytes → bytes."""
    return _quantity(text, _BYTES, "a size such as '64MiB' or '1GB'")


def _quantity(text: str | int | float, units: Mapping[str, int], expected: str) -> int:
    if isinstance(text, (int, float)) and not isinstance(text, bool) and math.isfinite(text):
        return int(text)
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(text))
    if not match or match[2] not in units:
        raise ConfigError(f"expected {expected}, got {text!r}")
    return int(float(match[1]) * units[match[2]])


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parsed TOML.

    Raises:
        ConfigError: the file is absent, unreadable or not TOML; names file and line.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def where(path: str | Path | None, key: str, value: str | None = None) -> str:
    """`"file:line: "` of the first line that sets `key` (to `value`, if given) or opens the table that it names, as far as
    can be told; of `table.key`, below the line that opens `table`, if one does."""
    if path is None:
        return ""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{path}: "
    *tables, last = key.split(".")
    header = re.compile(rf'^\s*\[+\s*(?:[^\]]*\.)?"?{re.escape(tables[-1])}"?\s*\]+') if tables else None
    first = next((n for n, line in enumerate(lines) if header and header.search(line)), 0)
    names = "|".join(re.escape(name) for name in (last, last.removesuffix("_ms"), last.removesuffix("_bytes")))
    pattern = re.compile(rf'^\s*(?:"?(?:{names})"?\s*=|\[+[^\]]*\b{re.escape(last)}\s*\]+)')
    if value is not None:
        pattern = re.compile(rf"""^\s*"?{re.escape(last)}"?\s*=\s*["']{re.escape(value)}["']""")
    for number, line in enumerate(lines[first:], first + 1):
        if pattern.search(line):
            return f"{path}:{number}: "
    return f"{path}: "


def load(
    cls: type[T],
    path: str | Path | None = None,
    *,
    program: str = "",
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """A `cls` from file, environment and flags, in rising order of precedence; None flags are not given.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of the wrong type, or what `__post_init__`
            refuses; names key, value, file and line.
    """
    raw = read_toml(path) if path is not None else {}
    env = os.environ if environ is None else environ
    from_env = _overlay(cls, raw, f"ROOSTREAM_{program}".upper(), env) if program else {}
    values = from_dict(cls, raw, path)
    places = {name: f"environment {variable}: " for name, variable in from_env.items()}
    for name, variable in from_env.items():
        values[name] = _from_text(_hints(cls)[name], env[variable], variable)
    for name, value in (flags or {}).items():
        if value is not None:
            assert name in _hints(cls), name
            values[name] = value
            places[name] = f"--{name.replace('_', '-')}: "
    return build(cls, values, path, place=lambda key: places.get(key) or where(path, key))


def _overlay(cls: type[Any], raw: dict[str, Any], stem: str, env: Mapping[str, str]) -> dict[str, str]:
    """Field → the environment's variable of it; those of tables' fields are put into `raw` at once."""
    found = {}
    for name in (f.name for f in dataclasses.fields(cls)):
        hint, variable = _hints(cls)[name], f"{stem}_{name}".upper()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            table = dict(raw.get(name, {})) if isinstance(raw.get(name, {}), dict) else {}
            for inner, one in _overlay(hint, table, variable, env).items():
                table[inner] = _from_text(_hints(hint)[inner], env[one], one)
            if table:
                raw[name] = table
        elif variable in env:
            found[name] = variable
    return found


def build(
    cls: type[T],
    values: dict[str, Any],
    path: str | Path | None,
    prefix: str = "",
    place: Callable[[str], str] | None = None,
) -> T:
    """`cls(**values)` with missing settings and refusals told as ConfigError. `prefix` is of keys, such as `tables.item.`;
    `place` tells where a key was set, if its line in the file isn't that."""
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            name, help = f"{prefix}{f.name}", f.metadata.get("help", "")
            raise ConfigError(f"{path or cls.__name__}: expected {name!r} ({help}), got nothing; add it")
    try:
        return cls(**values)
    except Refusal as error:
        key = prefix + error.key
        raise ConfigError(f"{place(key) if place else where(path, key)}key {key!r}: {error.reason}") from None
    except ConfigError as error:
        text = str(error)
        raise type(error)(text if path is None or str(path) in text else f"{path}: {text}") from None


def from_dict(cls: type[Any], raw: Mapping[str, Any], path: str | Path | None, prefix: str = "") -> dict[str, Any]:
    """Constructor values of dataclass `cls` from a parsed TOML table, checked and converted (see `load`)."""
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    names = list(fields)
    holds_secrets = any(f.metadata.get("secret") for f in fields.values())
    short = {n.removesuffix(s): n for s in ("_ms", "_bytes") for n in names if n.endswith(s)}
    short = {k: n for k, n in short.items() if not {f"{k}_ms", f"{k}_bytes"} <= set(names)}  # of these one has to be named
    out: dict[str, Any] = {}
    for key, value in raw.items():
        name = key if key in hints else short.get(key, "")
        if name not in names:
            known = [*names, *short]
            shown = "" if holds_secrets else f" = {value!r}"
            raise ConfigError(f"{where(path, prefix + key)}unknown key {prefix + key!r}{shown}{nearest(key, known)}")
        if name in out:
            raise ConfigError(f"{where(path, key)}{prefix + key!r} is given twice (as {name!r} too); keep one")
        try:
            if name != key or (isinstance(value, str) and hints[name] is int and name.endswith(("_ms", "_bytes"))):
                value = parse_duration_ms(value) if name.endswith("_ms") else parse_bytes(value)
            out[name] = _convert(hints[name], value, path, f"{prefix}{key}")
        except ConfigError as error:
            text = str(error)
            if fields[name].metadata.get("secret"):
                text = "expected text, got something else"
            raise ConfigError(text if "key " in text else f"{where(path, prefix + key)}key {prefix + key!r}: {text}") from None
    return out


def _convert(hint: Any, value: Any, path: str | Path | None, key: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        args = [a for a in typing.get_args(hint) if a is not type(None)]
        return _convert(args[0], value, path, key)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"expected a table, got {value!r}")
        return build(hint, from_dict(hint, value, path, f"{key}."), path, f"{key}.")
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"expected a list, got {value!r}")
        return tuple(_convert(item, v, path, key) for v in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"expected a table, got {value!r}")
        return {k: _convert(typing.get_args(hint)[1], v, path, f"{key}.{k}") for k, v in value.items()}
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(_choice(typing.get_args(hint), value))
        return value
    if hint is Path:
        return Path(_expect(str, value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _expect(hint, value)


def _expect(hint: Any, value: Any) -> Any:
    if hint is Any:
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"expected {hint.__name__}, got {value!r}")
    return value


def _from_text(hint: Any, text: str, variable: str) -> Any:
    """An environment variable's text as a TOML value would give it; a list of names may be given as `a,b`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    try:
        if hint in (str, Path):
            return hint(text)
        if hint is int and variable.endswith(("_MS", "_BYTES")) and not re.fullmatch(r"-?\d+", text):
            return parse_bytes(text) if variable.endswith("_BYTES") else parse_duration_ms(text)
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str and not text.startswith("["):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return _convert(hint, tomllib.loads(f"x = {text}")["x"], None, variable)
    except tomllib.TOMLDecodeError:
        if typing.get_origin(hint) is not typing.Literal:
            raise ConfigError(f"environment {variable}: expected {getattr(hint, '__name__', hint)}, got {text!r}") from None
    except ConfigError as error:
        raise ConfigError(f"environment {variable}: {error}") from None
    try:
        return _convert(hint, text, None, variable)
    except ConfigError as error:
        raise ConfigError(f"environment {variable}: {error}") from None
