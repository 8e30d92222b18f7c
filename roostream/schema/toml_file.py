"""TOML files with the line of every key, and references to the environment and to files.

`"${NAME}"` in a program's TOML stands for a variable of the environment, `"${file:/run/secrets/x}"` for the
content of a file without its last newline. A reference may stand anywhere in a text; `$${` is a literal `${`.
The value behind a reference is never shown: its `repr`, and so every message, is the text of the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from roostream.errors import ConfigError, reason_of

Keys: TypeAlias = tuple[str | int, ...]
"""The path of a value: names of tables and keys, and indices of array entries."""

_UNITS = ("", "_ms", "_bytes")  # `window_ms` may be written `window`


class SourceLocation:
    """Where a TOML table comes from: the origin of each key, and how messages call the keys.

    `origins`: path → prefix of a message, for example `"shop.toml:3: "` or `"environment
    ROOSTREAM_WORKER_SEED: "`. `prefix`: the name of the table in front of its keys, for example
    `tables.item.`; "" for the file itself.
    """

    def __init__(
        self, file: str = "", origins: Mapping[Keys, str] | None = None, path: Keys = (), prefix: str = ""
    ) -> None:
        self.file, self.origins, self.path, self.prefix = file, origins or {}, path, prefix

    def child(self, *keys: str | int, prefix: str | None = None) -> SourceLocation:
        """The location of an inner table, named after its keys unless `prefix` is given."""
        shown = f"{self.prefix}{'.'.join(map(str, keys))}." if prefix is None else prefix
        return SourceLocation(self.file, self.origins, (*self.path, *keys), shown)

    def with_origins(self, more: Mapping[Keys, str]) -> SourceLocation:
        """The same location with values that were set outside of the file."""
        return SourceLocation(self.file, {**self.origins, **more}, self.path, self.prefix)

    def describe(self, *keys: str | int) -> str:
        """`"file:line: "` of a key. If the key is absent, that of the table; "" without a file."""
        path = (*self.path, *keys)
        while path:
            *outer, last = path
            names = [last.removesuffix(unit) for unit in _UNITS] if isinstance(last, str) else [last]
            for name in names:
                if origin := self.origins.get((*outer, name)):
                    return origin
            path = path[:-1]
        return f"{self.file}: " if self.file else ""

    def describe_first(self, *keys: str) -> str:
        """`describe` of the first of these keys that is present, else of the table itself."""
        for key in keys:
            if any((*self.path, key.removesuffix(unit)) in self.origins for unit in _UNITS):
                return self.describe(key)
        return self.describe()


NO_LOCATION = SourceLocation()
"""The location of values that were made in code."""


class TomlFile(NamedTuple):
    """A parsed TOML file, and where its keys are."""

    raw: dict[str, Any]
    location: SourceLocation


def read_toml(path: str | Path) -> TomlFile:
    """Read a file, a pipe or a device once, to its end.

    Raises:
        ConfigError: the file is absent, unreadable or not TOML; names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except tomllib.TOMLDecodeError as error:
        text = f"{path}: expected TOML, got something else: {error}; correct the file"
        raise ConfigError(text) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: can't be read as text in UTF-8; correct the file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read: {reason_of(error)}; check the path") from None
    except RecursionError:
        raise ConfigError(f"{path}: can't be read: tables are nested too deep; write it flat") from None
    lines = line_numbers(text, raw)
    return TomlFile(
        raw, SourceLocation(str(path), {keys: f"{path}:{line}: " for keys, line in lines.items()})
    )


_WORD = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_DOTTED = rf"{_WORD}(?:[ \t]*\.[ \t]*{_WORD})*"
_STATEMENT = re.compile(rf"^[ \t]*(?:(\[\[?)[ \t]*({_DOTTED})[ \t]*\]|({_DOTTED})[ \t]*=)", re.MULTILINE)


def line_numbers(text: str, raw: Mapping[str, Any]) -> dict[Keys, int]:
    """The line, from 1, of every `[table]`, `[[table]]` and `key =` of a TOML text and its parsed form `raw`.

    A key inside an array or an inline table has no line of its own. A line of a multi-line text that looks
    like a key is recorded only if `raw` has that key and the key has not occurred before.
    """
    lines: dict[Keys, int] = {}
    counts: dict[Keys, int] = {}  # entries of each [[table]] so far
    table: Keys = ()
    line, counted = 1, 0
    for match in _STATEMENT.finditer(text):
        start = match.start(2) if match[1] else match.start(3)
        line, counted = line + text.count("\n", counted, start), start
        names = [_unquoted(word) for word in re.findall(_WORD, match[2] or match[3])]
        path: Keys = () if match[1] else table
        paths = []
        for index, name in enumerate(names):
            path = (*path, name)
            paths.append(path)
            is_entry = match[1] == "[[" and index == len(names) - 1
            if is_entry or path in counts:
                counts[path] = counts.get(path, -1) + is_entry
                path = (*path, counts[path])
                paths.append(path)
        if not _has(raw, path):
            if match[1] == "[[":
                counts[paths[-2]] -= 1
        else:
            table = path if match[1] else table
            for one in paths[-2:] if match[1] == "[[" else paths[-1:] if match[1] else paths:
                lines.setdefault(one, line)
    return lines


def _unquoted(word: str) -> str:
    return next(iter(tomllib.loads(f"{word}=0"))) if word[0] in "\"'" else word


def _has(raw: Any, path: Keys) -> bool:
    for key in path:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


MAX_FILE_BYTES = 1 << 20
"""Largest file that a reference may name: a secret or an address, not a data set."""

_REFERENCE = re.compile(r"\$(\$\{)|\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ResolvedText(str):
    """A text whose references were replaced, or the text of an environment variable; `repr` is `written`."""

    __slots__ = ("written",)
    written: str

    def __new__(cls, value: str, written: str) -> ResolvedText:
        text = super().__new__(cls, value)
        text.written = written
        return text

    def __repr__(self) -> str:
        return repr(self.written)

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # copy and pickle keep `written`
        return str(self), self.written


def resolve_references(
    raw: Mapping[str, Any], location: SourceLocation, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Replace the references in all texts of a table, its inner tables and lists.

    Raises:
        ConfigError: a variable is not set, a file can't be read, or a reference has another form; names file,
        line and key.
    """
    return {key: _resolve(value, location.child(key), environ) for key, value in raw.items()}


def _resolve(value: Any, location: SourceLocation, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return resolve_references(value, location, environ)
    if isinstance(value, list):
        return [_resolve(entry, location.child(index), environ) for index, entry in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return ResolvedText(_REFERENCE.sub(lambda match: _referenced(match, environ), value), value)
    except ConfigError as error:
        key = location.prefix.removesuffix(".")
        raise ConfigError(f"{location.describe()}key {key!r}: {error}") from None


def _referenced(match: re.Match[str], environ: Mapping[str, str]) -> str:
    if match[1]:
        return match[1]
    name, is_file, path = match[2].partition(":")
    if is_file and name == "file" and path:
        return _content(path)
    if is_file or not _VARIABLE.fullmatch(name):
        text = f"expected ${{NAME}} or ${{file:PATH}}, got {match[0]!r}; a literal '${{' is written '$${{'"
        raise ConfigError(text)
    if name not in environ:
        text = f"expected {name} in the environment, got nothing; set it, or write '$${{' for a literal '${{'"
        raise ConfigError(text)
    return environ[name]


def _content(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"expected a readable file at {path}, got none ({why}); mount it") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(
            f"expected at most {MAX_FILE_BYTES} bytes at {path}, got more; refer to the secret's own file"
        )
    return text.removesuffix("\n").removesuffix("\r")
