"""One tree for everything that Roostream raises on purpose.

RoostreamError
├── ConfigError            a TOML key, value, flag or environment variable is wrong
│   └── SchemaError        a schema is wrong, or can't be read with the one in hand
├── WireError              a record or body can't be decoded; `reason` names the dead letter
├── UnavailableError       a peer, a service or a disk can't be used now: trying again can help
│   └── TransportError     a call to a shard or the controller failed; its effect is unknown
├── FencedError            an older incarnation acted; the process must stop or rejoin
├── CheckpointError        a manifest, segment or part is damaged, or absent while the store answers
└── SetupError             the machine lacks something (Python, port, disk, memory, package)

A message says what was expected, what was got and what to do. Asserts are for our own invariants only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def mask_secrets(text: str) -> str:
    """`text` with what proves who one is left out of every address in it: `redis://***@host:6379/0`."""
    return _SECRET.sub(r"\1***", _USER.sub("://***@", text))


_USER = re.compile(r"://[^\s\"']*@")
_SECRET = re.compile(r"([?&](?:password|passwd|token|secret)=)[^&\s\"']+", re.IGNORECASE)


class RoostreamError(Exception):
    """Base of all; `str()` is one sentence fit to show a user, without a password that came in an address."""

    def __str__(self) -> str:
        return mask_secrets(super().__str__())


class ConfigError(RoostreamError):
    """A setting is wrong."""


class SchemaError(ConfigError):
    """A schema is wrong, or a change to it can't be read."""


class WireError(RoostreamError):
    """Bytes that can't be read; `reason` is the dead letter's: one of wire.REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnavailableError(RoostreamError):
    """Something can't be reached, read or written now (a silent peer, a full disk, a mount that is gone). It says nothing about
    what is committed: trying again can help, an older manifest can't."""


class TransportError(UnavailableError):
    """A call failed on its way; the peer may or may not have acted on it."""


class FencedError(RoostreamError):
    """The caller's incarnation is over: another one has been claimed."""


class CheckpointError(RoostreamError):
    """What was committed is damaged, or absent while the store answers: trying again can't help, an older manifest may."""


class HeldError(RoostreamError):
    """Training is held, and this program is not needed until the hold ends."""


class SetupError(RoostreamError):
    """The machine lacks something that Roostream needs."""


def describe_error(error: BaseException) -> str:
    """Its text, and what those that it came through noted about it."""
    return "; ".join(part for part in (str(error), *getattr(error, "__notes__", ())) if part)


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known name nearest to `name`, or `""` if none is near."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f"; did you mean {match[0]!r}?" if match else ""


def printable(text: str) -> str:
    """Text from outside, fit for a terminal, a page and a log: control and direction characters are dropped."""
    return "".join(c for c in text if c.isprintable())
