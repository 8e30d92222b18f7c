"""One frozen dataclass a program, loaded once: TOML file, then environment, then flags.

A field `x_ms` can be written `x_ms = 20000` or `x = "20s"`; a field `x_bytes`, `x_bytes = 1048576` or `x = "1MiB"`.
The environment variable of field `x` of program `worker` is ROOSTREAM_WORKER_X. Help strings sit beside the fields:
`window_ms: int = setting(600_000, "…")`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from roo.errors import ConfigError, nearest

T = TypeVar("T")
_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def setting(
    default: Any = dataclasses.MISSING, help: str = "", factory: Any = dataclasses.MISSING, *, secret: bool = False
) -> Any:
    """A dataclass field with its help string. A secret one is left out of `repr` and of messages."""
    given: dict[str, Any] = {"metadata": {"help": help, "secret": secret}, "repr": not secret}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, **given)
    return dataclasses.field(default=default, **given)


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
    can be told."""
    if path is None:
        return ""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{path}: "
    last = key.rsplit(".", 1)[-1]
    pattern = re.compile(rf'^\s*(?:"?{re.escape(last)}"?\s*=|\[+[^\]]*\b{re.escape(last)}\s*\]+)')
    if value is not None:
        pattern = re.compile(rf"""^\s*"?{re.escape(last)}"?\s*=\s*["']{re.escape(value)}["']""")
    for number, line in enumerate(lines, 1):
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
    values = from_dict(cls, raw, path)
    names = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    env = os.environ if environ is None else environ
    for name in names if program else ():
        variable = f"ROOSTREAM_{program}_{name}".upper()
        if variable in env:
            values[name] = _from_text(hints[name], env[variable], variable)
    for name, value in (flags or {}).items():
        if value is not None:
            assert name in names, name
            values[name] = value
    return build(cls, values, path)


def build(cls: type[T], values: dict[str, Any], path: str | Path | None) -> T:
    """`cls(**values)` with missing settings and refusals told as ConfigError."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for f in fields:
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"{path or cls.__name__}: expected {f.name!r} ({f.metadata.get('help', '')}), got nothing; add it")
    try:
        return cls(**values)
    except ConfigError as error:
        text = str(error)
        raise type(error)(text if path is None or str(path) in text else f"{path}: {text}") from None


def from_dict(cls: type[Any], raw: Mapping[str, Any], path: str | Path | None, prefix: str = "") -> dict[str, Any]:
    """Constructor values of dataclass `cls` from a parsed TOML table, checked and converted (see `load`)."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    short = {n.removesuffix(s): n for s in ("_ms", "_bytes") for n in names if n.endswith(s)}
    out: dict[str, Any] = {}
    for key, value in raw.items():
        name = key if key in hints else short.get(key, "")
        if name not in names:
            known = [*names, *short]
            raise ConfigError(f"{where(path, key)}unknown key {prefix + key!r} = {value!r}{nearest(key, known)}")
        if name in out:
            raise ConfigError(f"{where(path, key)}{prefix + key!r} is given twice (as {name!r} too); keep one")
        try:
            if name != key or (isinstance(value, str) and hints[name] is int and name.endswith(("_ms", "_bytes"))):
                value = parse_duration_ms(value) if name.endswith("_ms") else parse_bytes(value)
            out[name] = _convert(hints[name], value, path, f"{prefix}{key}")
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if "key " in text else f"{where(path, key)}key {prefix + key!r}: {text}") from None
    return out


def _convert(hint: Any, value: Any, path: str | Path | None, key: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        args = [a for a in typing.get_args(hint) if a is not type(None)]
        return _convert(args[0], value, path, key)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"expected a table, got {value!r}")
        return build(hint, from_dict(hint, value, path, f"{key}."), path)
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
            choices = [str(a) for a in typing.get_args(hint)]
            raise ConfigError(f"expected one of {', '.join(choices)}, got {value!r}{nearest(str(value), choices)}")
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
