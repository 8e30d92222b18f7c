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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from roostream.errors import ConfigError, nearest
from roostream.schema.toml_file import NOWHERE, Keys, Place, Referred, TomlFile, followed, read_toml

T = TypeVar("T")
_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class Refusal(ConfigError):
    """A setting that can't be, before it is known where it was set. **When** a dataclass of settings is made in code, this is
    what its maker sees; `build` adds the place."""

    def __init__(self, key: str, reason: str, what: str = "") -> None:
        """`what` it is about, if not `key '…'`."""
        super().__init__(f"{what or f'key {key!r}'}: {reason}")
        self.key, self.reason, self.what = key, reason, what


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
        words = (
            ("at least", self.least),
            ("above", self.above),
            ("at most", self.most),
            ("below", self.below),
        )
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
    given: dict[str, Any] = {
        "metadata": {"help": help, "secret": secret, "bounds": bounds},
        "repr": not secret,
    }
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


MAX_SEED = (1 << 63) - 1


def check_name(what: str, name: str, key: str = "name") -> None:
    """Raises Refusal: not a name that can stand in files, topics and metrics."""
    if not _NAME.fullmatch(name):
        raise Refusal(
            key, "expected a name of lower-case letters, digits, '_' and '-' (at most 64)", f"{what} {name!r}"
        )


def check_text(key: str, text: str, max_bytes: int = 64) -> None:
    """Raises Refusal: empty, too long, or not fit to be shown in a line."""
    if not text or len(text.encode()) > max_bytes or not text.isprintable():
        raise refusal(key, f"a printable text of 1..{max_bytes} bytes", text)


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


def load(
    cls: type[T],
    file: str | Path | TomlFile | None = None,
    *,
    program: str = "",
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """A `cls` from file (references followed, see roostream/schema/toml_file.py), environment and flags, in rising order of precedence; None
    flags are not given.

    Raises:
        ConfigError: an unknown key or variable (with the nearest known one), a value of the wrong type, or what
            `__post_init__` refuses; names key, value, file and line.
    """
    if file is not None and not isinstance(file, TomlFile):
        file = read_toml(file)
    env = os.environ if environ is None else environ
    raw, place = (followed(file.raw, file.place, env), file.place) if file is not None else ({}, NOWHERE)
    said: dict[Keys, str] = {}
    if program:
        given = _Environment(cls, f"ROOSTREAM_{program}".upper(), env)
        given.put_into(raw)
        said |= {keys: f"environment {variable}: " for keys, variable in given.found.items()}
    for name, value in (flags or {}).items():
        if value is not None:
            assert name in _hints(cls), name
            raw = {key: old for key, old in raw.items() if _long_name(cls, key) != name} | {name: value}
            said[(name,)] = f"--{name.replace('_', '-')}: "
    place = place.with_said(said)
    return build(cls, from_dict(cls, raw, place), place)


def check_environment(programs: Iterable[str], others: Iterable[str], environ: Mapping[str, str]) -> None:
    """Raises ConfigError: a variable ROOSTREAM_… that no program reads; its value is not told."""
    stems = [f"ROOSTREAM_{program}_".upper() for program in programs]
    for name in sorted(environ):
        known = name in others or name.startswith(tuple(stems)) or not name.startswith("ROOSTREAM_")
        if not known and not _ORCHESTRATED.search(name):
            near = nearest(name.partition("_")[2], [stem[10:-1] for stem in stems])
            raise ConfigError(
                f"environment {name}: expected the name of a program behind ROOSTREAM_, got none{near}; unset it"
            )


_ORCHESTRATED = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?$")
"""What Kubernetes tells every container of a service, which may well be named `roostream-serving`."""


class _Environment:
    """The variables that set fields of a dataclass, and of the tables in it."""

    def __init__(self, cls: type[Any], stem: str, environ: Mapping[str, str]) -> None:
        """Raises ConfigError: one that begins with the stem sets nothing; its value is not told."""
        self.environ, self.found = environ, dict[Keys, str]()
        self._hints = dict[Keys, Any]()
        self._known = self._variables(cls, stem, ())
        for name in sorted(environ):
            if keys := self._known.get(name):
                if keys in self.found:
                    raise ConfigError(
                        f"environment {name}: expected one variable for a setting, got {self.found[keys]} too"
                    )
                self.found[keys] = name
            elif name.startswith(f"{stem}_") and not _ORCHESTRATED.search(name):
                raise ConfigError(
                    f"environment {name}: expected the name of a setting, got none{nearest(name, self._known)}"
                )

    def _variables(self, cls: type[Any], stem: str, at: Keys) -> dict[str, Keys]:
        known: dict[str, Keys] = {}
        for name, hint in _hints(cls).items():
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                known |= self._variables(hint, f"{stem}_{name}".upper(), (*at, name))
            else:
                self._hints[(*at, name)] = hint
                known[f"{stem}_{name}".upper()] = (*at, name)
        for short, name in _short_names(cls).items():
            known.setdefault(f"{stem}_{short}".upper(), (*at, name))
        return known

    def put_into(self, raw: dict[str, Any]) -> None:
        """Values over those of a file; tables are copied, not changed."""
        for keys, variable in self.found.items():
            table = raw
            for key in map(str, keys[:-1]):
                inner = table.get(key, {})
                table[key] = table = dict(inner) if isinstance(inner, dict) else {}
            name = str(keys[-1])
            for short in [
                key for key in table if key == name or f"{key}_ms" == name or f"{key}_bytes" == name
            ]:
                del table[short]
            table[name] = _from_text(self._hints[keys], self.environ[variable], variable, name)


def build(cls: type[T], values: dict[str, Any], place: Place = NOWHERE) -> T:
    """`cls(**values)` with missing settings and refusals told as ConfigError, each with its place."""
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            name, help = f"{place.prefix}{f.name}", f.metadata.get("help", "")
            raise ConfigError(
                f"{place.of() or f'{cls.__name__}: '}expected {name!r} ({help}), got nothing; add it"
            )
    try:
        return cls(**values)
    except Refusal as error:
        what = error.what or f"key {place.prefix + error.key!r}"
        raise ConfigError(f"{place.of(*error.key.split('.'))}{what}: {error.reason}") from None
    except ConfigError as error:
        raise type(error)(f"{place.of()}{error}") from None


def from_dict(cls: type[Any], raw: Mapping[str, Any], place: Place = NOWHERE) -> dict[str, Any]:
    """Constructor values of dataclass `cls` from a parsed TOML table, checked and converted (see `load`)."""
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    holds_secrets = any(f.metadata.get("secret") for f in fields.values())
    out: dict[str, Any] = {}
    came: dict[str, str] = {}
    for key, value in raw.items():
        name = _long_name(cls, key)
        if not name:
            shown = "" if holds_secrets else f" = {value!r}"
            near = nearest(key, [*fields, *_short_names(cls)])
            raise ConfigError(f"{place.of(key)}unknown key {place.prefix + key!r}{shown}{near}")
        if name in came:
            raise ConfigError(f"{place.of(key)}{came[name]!r} and {key!r} are one setting; keep one of them")
        came[name] = key
        if isinstance(value, Referred) and hints[name] is int and value.isdecimal():
            value = int(value)
        try:
            if name != key or (
                isinstance(value, str) and hints[name] is int and name.endswith(("_ms", "_bytes"))
            ):
                value = parse_duration_ms(value) if name.endswith("_ms") else parse_bytes(value)
            out[name] = _convert(hints[name], value, place.inner(key))
        except _Located as error:
            raise type(error.told)(str(error.told)) from None
        except ConfigError as error:
            reason = "expected text, got something else" if fields[name].metadata.get("secret") else error
            raise ConfigError(f"{place.of(key)}key {place.prefix + key!r}: {reason}") from None
    return out


def _short_names(cls: type[Any]) -> dict[str, str]:
    """`window` for `window_ms`; where it could be two keys, one has to be named."""
    names = set(_hints(cls))
    found = {n.removesuffix(s): n for s in ("_ms", "_bytes") for n in names if n.endswith(s)}
    return {k: n for k, n in found.items() if k not in names and not {f"{k}_ms", f"{k}_bytes"} <= names}


def _long_name(cls: type[Any], key: str) -> str:
    """The field that a key sets; "" = none."""
    fields = {f.name for f in dataclasses.fields(cls)}
    return key if key in fields else _short_names(cls).get(key, "")


class _Located(ConfigError):
    """What is wrong inside of a table, with its place: nothing is to be put in front of it."""

    def __init__(self, told: ConfigError) -> None:
        super().__init__(str(told))
        self.told = told


def _convert(hint: Any, value: Any, place: Place) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        args = [a for a in typing.get_args(hint) if a is not type(None)]
        return value if value is None else _convert(args[0], value, place)
    if isinstance(value, Referred) and hint not in (str, Path, Any) and origin is not typing.Literal:
        value = value.as_value(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"expected a table, got {value!r}")
        try:
            return build(hint, from_dict(hint, value, place), place)
        except ConfigError as error:
            raise _Located(error) from None
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"expected a list, got {value!r}")
        return tuple(_convert(item, v, place.inner(i)) for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"expected a table, got {value!r}")
        return {k: _convert(typing.get_args(hint)[1], v, place.inner(k)) for k, v in value.items()}
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(_choice(typing.get_args(hint), value))
        return value
    if hint is Path and isinstance(value, Path):
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


def _from_text(hint: Any, text: str, variable: str, name: str) -> Any:
    """An environment variable's text as a TOML value would give it; a list of names may be given as `a,b`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    try:
        if hint in (str, Path):
            return hint(text)
        if hint is int and name.endswith(("_ms", "_bytes")) and not re.fullmatch(r"-?\d+", text):
            return parse_bytes(text) if name.endswith("_bytes") else parse_duration_ms(text)
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str and not text.startswith("["):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return _convert(hint, tomllib.loads(f"x = {text}")["x"], NOWHERE)
    except tomllib.TOMLDecodeError:
        if typing.get_origin(hint) is not typing.Literal:
            raise ConfigError(
                f"environment {variable}: expected {getattr(hint, '__name__', hint)}, got {text!r}"
            ) from None
    except ConfigError as error:
        raise ConfigError(f"environment {variable}: {error}") from None
    try:
        return _convert(hint, text, NOWHERE)
    except ConfigError as error:
        raise ConfigError(f"environment {variable}: {error}") from None
