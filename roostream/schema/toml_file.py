"""A TOML file as a table and the line of each of its keys: every message about a setting begins with `file:line: `.

A program's TOML may refer to what is outside of it: `"${NAME}"` is a variable of the environment, `"${file:/run/secrets/x}"`
what a file holds (without the newline at its end). A reference may stand anywhere within a text, and `$${` is a plain `${`. So
one file does for every place that a program runs in, and no secret is in it. What a reference gave is never shown: `repr` of it,
and so every message and every dump of settings, is the text that stood in the file.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from roostream.errors import ConfigError

Keys: TypeAlias = tuple[str | int, ...]
"""The way to a value: names of tables and keys, and numbers of entries, from 0."""

_UNITS = ("", "_ms", "_bytes")  # `window_ms` may be written `window`


class Place:
    """A table of a file, or the file itself: where its keys stand, and what they are called in messages.

    `said`: keys → text in front of a message, for example `"shop.toml:3: "` or `"environment ROOSTREAM_WORKER_SEED: "`.
    `prefix`: what the table is called in front of its keys, for example `tables.item.`; "" for the file.
    """

    def __init__(
        self, file: str = "", said: Mapping[Keys, str] | None = None, at: Keys = (), prefix: str = ""
    ) -> None:
        self.file, self.said, self.at, self.prefix = file, said or {}, at, prefix

    def inner(self, *keys: str | int, prefix: str | None = None) -> Place:
        """A table below; called by its keys unless a prefix is given."""
        shown = f"{self.prefix}{'.'.join(map(str, keys))}." if prefix is None else prefix
        return Place(self.file, self.said, (*self.at, *keys), shown)

    def with_said(self, more: Mapping[Keys, str]) -> Place:
        """The same with values that were set elsewhere than in the file."""
        return Place(self.file, {**self.said, **more}, self.at, self.prefix)

    def of(self, *keys: str | int) -> str:
        """`"file:line: "` of a key; of the table that would hold it, if it isn't there; "" where there is no file."""
        wanted = (*self.at, *keys)
        while wanted:
            for unit in _UNITS:
                last = wanted[-1].removesuffix(unit) if isinstance(wanted[-1], str) else wanted[-1]
                if found := self.said.get((*wanted[:-1], last)):
                    return found
            wanted = wanted[:-1]
        return f"{self.file}: " if self.file else ""

    def first(self, *keys: str) -> str:
        """`of` the first of these keys that is there, else of the table itself."""
        there = (
            key for key in keys if any((*self.at, key.removesuffix(unit)) in self.said for unit in _UNITS)
        )
        return self.of(*((key,) if (key := next(there, "")) else ()))


NOWHERE = Place()
"""Of values that were made in code."""


class TomlFile(NamedTuple):
    raw: dict[str, Any]
    place: Place


def read_toml(path: str | Path) -> TomlFile:
    """A file, a pipe or a device, read once and to its end.

    Raises:
        ConfigError: it is absent, unreadable or not TOML; names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        raw, lines = tomllib.loads(text), lines_of(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: can't be read: expected tables within tables, got thousands of them; write it flat"
        ) from None
    return TomlFile(raw, Place(str(path), {keys: f"{path}:{line}: " for keys, line in lines.items()}))


def lines_of(text: str) -> dict[Keys, int]:
    """The line, from 1, of every table, key and entry of a valid TOML text."""
    walk = _TomlWalk(text)
    while walk.skip(_BLANK):
        walk.statement()
    return walk.lines


_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}\n#]*")


class _TomlWalk:
    """One pass over a text that has been parsed before, so that nothing can be wrong with it."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.table: Keys = ()
        self.lines: dict[Keys, int] = {}
        self._counts: dict[Keys, int] = {}  # entries of [[…]]
        self._line, self._counted = 1, 0

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Go past what `pattern` takes; False at the end."""
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.at < len(self.text)

    def statement(self) -> None:
        """A table's header, or a key with its value."""
        if not self.text.startswith("[", self.at):
            return self._pair(self.table)
        many = self.text.startswith("[[", self.at)
        line = self._here()
        self.at += 2 if many else 1
        *outer, last = self._key()
        self.at += 2 if many else 1
        table = (*self._entered((), outer), last)
        if many:
            self._counts[table] = self._counts.get(table, -1) + 1
            self.lines.setdefault(table, line)
            table = (*table, self._counts[table])
        self.table = self._note(table, line)

    def _entered(self, keys: Keys, more: list[str]) -> Keys:
        """`more` below `keys`; of tables that come several times, the last."""
        for key in more:
            keys = (*keys, key)
            if keys in self._counts:
                keys = (*keys, self._counts[keys])
        return keys

    def _pair(self, table: Keys) -> None:
        line, keys = self._here(), table
        for key in self._key():
            keys = self._note((*keys, key), line)
        self.at += 1  # =
        self.skip(_SPACE)
        self._value(keys)

    def _key(self) -> list[str]:
        found = []
        while True:
            self.skip(_SPACE)
            quoted = self.text[self.at] in "\"'"
            start = self.at
            self.skip(_STRING if quoted else _BARE_KEY)
            word = self.text[start : self.at]
            found.append(tomllib.loads(f"{word}=0").popitem()[0] if quoted else word)
            self.skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return found
            self.at += 1

    def _value(self, keys: Keys) -> None:
        opening = self.text[self.at]
        if opening in "\"'":
            self.skip(_STRING)
        elif opening not in "[{":
            self.skip(_BARE_VALUE)
        else:
            self._several(keys, opening)

    def _several(self, keys: Keys, opening: str) -> None:
        """An array, or a table within a line."""
        self.at, count = self.at + 1, 0
        while self.skip(_BLANK) and self.text[self.at] not in "]}":
            if opening == "{":
                self._pair(keys)
            else:
                self._value(self._note((*keys, count), self._here()))
            count += 1
            self.skip(_BLANK)
            if self.text[self.at] == ",":
                self.at += 1
        self.at += 1

    def _note(self, keys: Keys, line: int) -> Keys:
        self.lines.setdefault(keys, line)
        return keys

    def _here(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line


MAX_BYTES = 1 << 20
"""Of a file that is referred to: a secret or an address, not a data set."""

_REFERENCE = re.compile(r"\$(\$\{)|\$\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Referred(str):
    """A text in which references were followed; `repr` is as it was written."""

    __slots__ = ("written",)
    written: str

    def __new__(cls, value: str, written: str) -> Referred:
        made = super().__new__(cls, value)
        made.written = written
        return made

    def __repr__(self) -> str:
        return repr(self.written)

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # copies stay what they are
        return str(self), self.written

    def as_value(self, hint: Any) -> Any:
        """For a setting that is not a text: `8`, `true`, `["a"]`, or `a,b` for a list of texts. Itself, where it is none."""
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str and not self.startswith("["):
            return tuple(part.strip() for part in self.split(",") if part.strip())
        try:
            return tomllib.loads(f"x = {self!s}")["x"]
        except tomllib.TOMLDecodeError:
            return self


def followed(raw: Mapping[str, Any], place: Place, environ: Mapping[str, str]) -> dict[str, Any]:
    """A table with the references in its texts followed, in tables and lists below it too.

    Raises:
        ConfigError: a variable that isn't set, a file that can't be read, or another form; names file, line and key.
    """
    return {key: _followed(value, place.inner(key), environ) for key, value in raw.items()}


def _followed(value: Any, place: Place, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return followed(value, place, environ)
    if isinstance(value, list):
        return [_followed(one, place.inner(number), environ) for number, one in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return Referred(_REFERENCE.sub(lambda found: _one(found, environ), value), value)
    except ConfigError as error:
        raise ConfigError(f"{place.of()}key {place.prefix.removesuffix('.')!r}: {error}") from None


def _one(found: re.Match[str], environ: Mapping[str, str]) -> str:
    if found[1]:
        return found[1]
    kind, is_file, path = found[2].partition(":")
    if is_file and kind == "file" and path:
        return _content(path)
    if is_file or not _NAME.fullmatch(kind):
        raise ConfigError(
            f"expected ${{NAME}} or ${{file:PATH}}, got {found[0]!r}; a plain '${{' is written '$${{'"
        )
    if kind not in environ:
        raise ConfigError(
            f"expected the environment to have {kind}, it doesn't; set it, or write '$${{' for a plain '${{'"
        )
    return environ[kind]


def _content(path: str) -> str:
    try:
        with open(Path(path), encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"expected a file that can be read at {path}, got none ({why}); mount it") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"expected at most {MAX_BYTES} bytes at {path}, got more; refer to the secret's own file"
        )
    return text.removesuffix("\n").removesuffix("\r")
