"""Options of the form NAME=VALUE."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from infra.program_specs import find_spec
from roostream.errors import ConfigError, nearest
from roostream.schema.settings import convert_values
from roostream.schema.toml_file import SourceLocation

PORTS = ("kafka", "redis", "flink", "serving", "controller")


def port_numbers(texts: Iterable[str]) -> dict[str, int]:
    """`serving=8080` → {"serving": 8080}; also `shard-0`.

    Raises:
        ConfigError: another form, or an unknown name.
    """
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in PORTS and not name.startswith("shard-"):
            raise ConfigError(
                f"--port: expected one of {', '.join(PORTS)}, got {name!r}{nearest(name, PORTS)}"
            )
        if not number.isdecimal() or not 0 < int(number) < 65536:
            raise ConfigError(f"--port: expected NAME=PORT such as serving=8080, got {text!r}")
        found[name] = int(number)
    return found


def overrides(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`joiner.window_ms=20000` → {"joiner": {"window_ms": 20000}}; a value that is not TOML is text.

    Raises:
        ConfigError: another form, an unknown program or key, a value of another type.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        program, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise ConfigError(
                f"--set: expected PROGRAM.KEY=VALUE such as joiner.window_ms=20000, got {text!r}"
            )
        found.setdefault(program, {}).update(_setting(program, key, value_of(value)))
    return found


def _setting(program: str, key: str, value: Any) -> dict[str, Any]:
    """As the program's own TOML would be read: `window = "20s"` becomes `window_ms = 20000`."""
    try:
        return convert_values(
            find_spec(program).settings_class(), {key: value}, SourceLocation(prefix=f"{program}.")
        )
    except ConfigError as error:
        raise ConfigError(f"--set: {error}") from None


def value_of(text: str) -> Any:
    """What TOML reads, else the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
