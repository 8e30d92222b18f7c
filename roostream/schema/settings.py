"""Settings of a program: one frozen dataclass, filled from a TOML file, then the environment, then flags.

A field `x_ms` may be written `x_ms = 20000` or `x = "20s"`; a field `x_bytes`, `x_bytes = 1048576` or `x =
"1MiB"`. The environment variable of field `x` of program `worker` is ROOSTREAM_WORKER_X; of field `y` of its
table `x`, ROOSTREAM_WORKER_X_Y. Help and range stand beside the field: `window_ms: int = setting(600_000,
"…", ge=1)`.

Every error has one form: `file:line: key 'window_ms': expected at least 1, got 0`.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from roostream.errors import ConfigError, nearest
from roostream.schema.toml_file import (
    NO_LOCATION,
    Keys,
    ResolvedText,
    SourceLocation,
    TomlFile,
    read_toml,
    resolve_references,
)

T = TypeVar("T")
MAX_SEED = (1 << 63) - 1
_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_KUBERNETES_VARIABLE = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?$"
)
"""Those that Kubernetes sets for a service, which may be named `roostream-serving`."""


class SettingError(ConfigError):
    """A setting has a wrong value. Settings made in code raise it; `from_dict` adds where the value was
    set."""

    def __init__(self, key: str, reason: str, subject: str = "") -> None:
        """`subject` replaces `key '…'` at the beginning of the message."""
        super().__init__(f"{subject or f'key {key!r}'}: {reason}")
        self.key, self.reason, self.subject = key, reason, subject


def setting_error(key: str, expected: str, got: object, remedy: str = "") -> SettingError:
    """The error to raise for a wrong value: `key 'index': expected 0..1, got 2; <remedy>`."""
    return SettingError(key, f"expected {expected}, got {got!r}{f'; {remedy}' if remedy else ''}")


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    lt: float | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field with its help and the range of its value, or of each entry if it is a tuple.

    `ge`, `le`, `gt`, `lt` are those of `msgspec.Meta`. A secret is left out of `repr` and of messages.
    """
    limits: dict[str, Any] = {"ge": ge, "le": le, "gt": gt, "lt": lt}
    bounds = msgspec.Meta(**given) if (given := {k: v for k, v in limits.items() if v is not None}) else None
    metadata = {"help": help, "secret": secret, "bounds": bounds}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of every dataclass of settings. Ranges and choices are checked in code as well as for files. A
    class that checks two fields against each other has its own `__post_init__`, which calls this one first.

    Raises:
        SettingError: a value is outside its range or choices.
    """

    def __post_init__(self) -> None:
        for field, hint in _fields(type(self)).values():
            is_choice = typing.get_origin(hint) is typing.Literal
            if is_choice or field.metadata.get("bounds") is not None:
                try:
                    _checked(field, hint, getattr(self, field.name))
                except ConfigError as error:
                    raise SettingError(field.name, str(error)) from None


def check_name(what: str, name: str, key: str = "name") -> None:
    """Raises SettingError: not a name that can stand in files, topics and metrics."""
    if not _NAME.fullmatch(name):
        expected = "a name of lower-case letters, digits, '_' and '-' (at most 64)"
        raise SettingError(key, f"expected {expected}", f"{what} {name!r}")


def check_text(key: str, text: str, max_bytes: int = 64) -> None:
    """Raises SettingError: empty, too long, or not printable."""
    if not text or len(text.encode()) > max_bytes or not text.isprintable():
        raise setting_error(key, f"a printable text of 1..{max_bytes} bytes", text)


def parse_duration_ms(text: str | int | float) -> int:
    """`"20s"`, `"30m"`, `"1.5h"`, `"250ms"`, `"7d"` or a number of ms → ms."""
    return _quantity(text, _MS, "a duration such as '500ms', '20s', '30m', '6h' or '7d'")


def parse_bytes(text: str | int) -> int:
    """`"64MiB"`, `"1GB"` or a number of bytes → bytes."""
    return _quantity(text, _BYTES, "a size such as '64MiB' or '1GB'")


def _quantity(text: str | int | float, units: Mapping[str, int], expected: str) -> int:
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if isinstance(text, float) and math.isfinite(text):
        return int(text)
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(text))
    if not match or match[2] not in units or math.isinf(value := float(match[1]) * units[match[2]]):
        raise ConfigError(f"expected {expected}, got {text!r}")
    return int(value)


def range_text(bounds: msgspec.Meta | None) -> str:
    """`1..64`, or `above 0 and at most 9`; "" without bounds."""
    if bounds is None:
        return ""
    if bounds.ge is not None and bounds.le is not None:
        return f"{_number(bounds.ge)}..{_number(bounds.le)}"
    words = {"at least": bounds.ge, "above": bounds.gt, "at most": bounds.le, "below": bounds.lt}
    return " and ".join(f"{word} {_number(bound)}" for word, bound in words.items() if bound is not None)


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def type_text(hint: Any) -> str:
    """The type of a setting as pages and messages name it: `integer`, `list of text`, `table`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(a) for a in arguments if a is not type(None))
    if origin is tuple:
        return f"list of {type_text(arguments[0])}"
    if origin is typing.Literal:
        return "choice"
    names = {str: "text", Path: "path", int: "integer", float: "number", bool: "true or false"}
    return names.get(hint, "table")


def load(
    cls: type[T],
    file: str | Path | TomlFile | None = None,
    *,
    program: str = "",
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Make a `cls` from a file (with its references resolved), the environment and flags; the later ones win.
    A flag whose value is None is not given.

    Raises:
        ConfigError: an unknown key or variable (with the nearest known one), a value of the wrong type, or
        one that `__post_init__` rejects; names key, value, file and line.
    """
    if file is not None and not isinstance(file, TomlFile):
        file = read_toml(file)
    env = os.environ if environ is None else environ
    location = file.location if file is not None else NO_LOCATION
    raw = resolve_references(file.raw, location, env) if file is not None else {}
    origins: dict[Keys, str] = {}
    if program:
        for keys, variable in _variables_set(cls, program, env).items():
            _overlay(cls, raw, keys, ResolvedText(env[variable], env[variable]))
            origins[keys] = f"environment {variable}: "
    for name, value in (flags or {}).items():
        if value is not None:
            _overlay(cls, raw, (name,), value)
            origins[(name,)] = f"--{name.replace('_', '-')}: "
    return from_dict(cls, raw, location.with_origins(origins))


def check_environment(programs: Iterable[str], others: Iterable[str], environ: Mapping[str, str]) -> None:
    """Raises ConfigError: no program reads a variable ROOSTREAM_…; the message leaves its value out."""
    stems = [f"ROOSTREAM_{program}_".upper() for program in programs]
    for name in sorted(environ):
        known = name in others or name.startswith(tuple(stems)) or not name.startswith("ROOSTREAM_")
        if not known and not _KUBERNETES_VARIABLE.search(name):
            advice = nearest(name.partition("_")[2], [stem[10:-1] for stem in stems]) or "; unset it"
            text = f"environment {name}: expected the name of a program behind ROOSTREAM_, got none{advice}"
            raise ConfigError(text)


def environment_variables(cls: type[Any], program: str) -> dict[str, Keys]:
    """Environment variable → path of the setting, for all settings of a program and of the tables in it."""
    return dict(_variables_below(cls, f"ROOSTREAM_{program}".upper(), ()))


def _variables_below(cls: type[Any], stem: str, path: Keys) -> Iterator[tuple[str, Keys]]:
    for short, name in _short_names(cls).items():
        yield f"{stem}_{short}".upper(), (*path, name)
    for name, (_, hint) in _fields(cls).items():
        if _is_settings(hint):
            yield from _variables_below(hint, f"{stem}_{name}".upper(), (*path, name))
        else:
            yield f"{stem}_{name}".upper(), (*path, name)


def _variables_set(cls: type[Any], program: str, environ: Mapping[str, str]) -> dict[Keys, str]:
    """Path → variable, of those that are set. Raises ConfigError: a variable of this program sets nothing."""
    known, found = environment_variables(cls, program), dict[Keys, str]()
    for name in sorted(environ):
        if keys := known.get(name):
            if keys in found:
                expected = f"expected one variable for a setting, got {found[keys]} too"
                raise ConfigError(f"environment {name}: {expected}")
            found[keys] = name
        elif name.startswith(f"ROOSTREAM_{program}_".upper()) and not _KUBERNETES_VARIABLE.search(name):
            near = nearest(name, known)
            raise ConfigError(f"environment {name}: expected the name of a setting, got none{near}")
    return found


def _overlay(cls: type[Any], raw: dict[str, Any], keys: Keys, value: Any) -> None:
    """Set one value, over either spelling of its key; inner tables are copied, not changed."""
    for key in map(str, keys[:-1]):
        inner = raw.get(key, {})
        raw[key] = raw = dict(inner) if isinstance(inner, dict) else {}
        cls = _fields(cls)[key][1]
    name = str(keys[-1])
    assert name in _fields(cls), name
    for key in [key for key in raw if _field_of(cls, key) == name]:
        del raw[key]
    raw[name] = value


def from_dict(
    cls: type[T], raw: Mapping[str, Any], location: SourceLocation = NO_LOCATION, **values: Any
) -> T:
    """Make a `cls` from a parsed TOML table; `values` are added as they are.

    Raises:
        ConfigError: see `load`.
    """
    values |= convert_values(cls, raw, location)
    for field, _ in _fields(cls).values():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            name, help = f"{location.prefix}{field.name}", field.metadata.get("help", "")
            origin = location.describe() or f"{cls.__name__}: "
            raise ConfigError(f"{origin}expected {name!r} ({help}), got nothing; add it")
    try:
        return cls(**values)
    except SettingError as error:
        subject = error.subject or f"key {location.prefix + error.key!r}"
        origin = location.describe(*error.key.split("."))
        raise ConfigError(f"{origin}{subject}: {error.reason}") from None
    except ConfigError as error:
        raise type(error)(f"{location.describe()}{error}") from None


def convert_values(
    cls: type[Any], raw: Mapping[str, Any], location: SourceLocation = NO_LOCATION
) -> dict[str, Any]:
    """The constructor's arguments of `cls` in a parsed TOML table, each converted to the type of its field.

    Raises:
        ConfigError: see `load`.
    """
    fields = _fields(cls)
    has_secrets = any(field.metadata.get("secret") for field, _ in fields.values())
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in raw.items():
        name = _field_of(cls, key)
        if not name:
            shown = "" if has_secrets else f" = {value!r}"
            near = nearest(key, [*fields, *_short_names(cls)])
            raise ConfigError(f"{location.describe(key)}unknown key {location.prefix + key!r}{shown}{near}")
        if name in written:
            pair = f"{written[name]!r} and {key!r}"
            raise ConfigError(f"{location.describe(key)}{pair} are one setting; keep one of them")
        written[name] = key
        values[name] = _converted(*fields[name], value, key, location)
    return values


def _uncached_fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Name → (field, type), where the type of an optional one is without None."""
    hints = typing.get_type_hints(cls)
    return {field.name: (field, _without_none(hints[field.name])) for field in dataclasses.fields(cls)}


# Not a decorator: mypy would then refuse a class as an argument.
_fields: Callable[[Any], dict[str, tuple[dataclasses.Field[Any], Any]]] = functools.cache(_uncached_fields)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    return next(argument for argument in typing.get_args(hint) if argument is not type(None))


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _short_names(cls: type[Any]) -> dict[str, str]:
    """`window` → `window_ms`, unless it is another field or could be `window_bytes` as well."""
    names = set(_fields(cls))
    found = {n.removesuffix(s): n for s in ("_ms", "_bytes") for n in names if n.endswith(s)}
    return {k: n for k, n in found.items() if k not in names and not {f"{k}_ms", f"{k}_bytes"} <= names}


def _field_of(cls: type[Any], key: str) -> str:
    """The field that a key sets; "" if there is none."""
    return key if key in _fields(cls) else _short_names(cls).get(key, "")


def _converted(
    field: dataclasses.Field[Any], hint: Any, value: Any, key: str, location: SourceLocation
) -> Any:
    arguments = typing.get_args(hint)
    if _is_settings(hint) and isinstance(value, dict):
        return from_dict(hint, value, location.child(key))
    if isinstance(value, dict) and arguments and _is_settings(arguments[-1]):
        inner = location.child(key)
        return {k: _converted(field, arguments[-1], entry, k, inner) for k, entry in value.items()}
    try:
        return _checked(field, hint, value, key != field.name)
    except ConfigError as error:
        reason = "expected text, got something else" if field.metadata.get("secret") else error
        raise ConfigError(f"{location.describe(key)}key {location.prefix + key!r}: {reason}") from None


def _checked(field: dataclasses.Field[Any], hint: Any, value: Any, is_short: bool = False) -> Any:
    """`value` as `hint` and within the range of `field`. Raises ConfigError: it isn't; says expected and
    got."""
    if value is None:
        return None
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        parsed = _parsed(hint, value) if isinstance(value, ResolvedText) and value not in choices else value
        if parsed not in choices:
            known = [str(choice) for choice in choices]
            near = nearest(str(value), known)
            raise ConfigError(f"expected one of {', '.join(known)}, got {value!r}{near}")
        return next(choice for choice in choices if choice == parsed)
    if typing.get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        element = typing.get_args(hint)[0]
        if typing.get_origin(element) is typing.Literal:
            return tuple(_checked(field, element, entry) for entry in value)
    parsed = _parsed(hint, value) if isinstance(value, ResolvedText) else value
    if hint is int and (is_short or isinstance(parsed, str)):
        if field.name.endswith("_ms"):
            parsed = parse_duration_ms(parsed)
        elif field.name.endswith("_bytes"):
            parsed = parse_bytes(parsed)
    try:
        converted = msgspec.convert(parsed, hint, dec_hook=_from_text)
    except msgspec.ValidationError:
        expected = "true or false" if hint is bool else type_text(hint)
        raise ConfigError(f"expected {expected}, got {value!r}") from None
    bounds = field.metadata.get("bounds")
    try:
        entries = converted if isinstance(converted, tuple) else (converted,)
        for entry in entries if bounds is not None else ():
            msgspec.convert(entry, Annotated[int if isinstance(entry, int) else float, bounds])
    except msgspec.ValidationError:
        raise ConfigError(f"expected {range_text(bounds)}, got {entry!r}") from None
    return converted


def _from_text(hint: Any, value: Any) -> Any:
    """Convert text to a `Path`, the only type of a setting that msgspec cannot convert."""
    if hint is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"expected {hint}")


def _parsed(hint: Any, text: ResolvedText) -> Any:
    """The TOML value that a text means: `8`, `true`, `["a"]`, or `a,b` for a list of texts; else the
    text."""
    if hint is str and text.written == text:
        return str(text)
    if hint in (str, Path, Any):
        return text
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str and not text.startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return tomllib.loads(f"x = {text!s}")["x"]
    except tomllib.TOMLDecodeError:
        return text
