"""All exceptions that Roostream raises deliberately, in one tree.

RoostreamError
├── ConfigError            a TOML key, value, flag or environment variable is wrong
│   └── SchemaError        a schema is wrong, or can't be read with the schema in use
├── WireError              a record or body can't be decoded; `reason` is that of the dead letter
├── UnavailableError       a peer, a service or a disk is not usable now; a retry can help
│   └── TransportError     a call to a shard or the controller failed; its effect is unknown
├── FencedError            a newer incarnation exists; the process must stop or rejoin
├── CheckpointError        committed data is damaged, or absent from a store that answers
│   └── OtherVersionError  it is intact, and another version of Roostream wrote it
├── HeldError              training is on hold; this program is not needed until the hold ends
└── SetupError             the machine lacks something (Python, port, disk, memory, package)

A message says what was expected, what was given and what to do. Asserts are for internal invariants only.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator


def mask_secrets(text: str) -> str:
    """`text` without the credentials of addresses in it: `redis://***@host:6379/0`."""
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub("://***@", text))


_CREDENTIALS = re.compile(r"://\S*@")  # a password may have quotes
_SECRET_PARAMETER = re.compile(r"([?&](?:password|passwd|token|secret)=)[^&\s\"']+", re.IGNORECASE)


def with_advice(error: object, advice: str) -> str:
    """The message of an error, with `advice` if it does not say what to do. A message says so behind a
    semicolon. The advice for a schema is always its documentation."""
    text = str(error)
    if isinstance(error, SchemaError):
        advice = "correct the schema as docs/schema.md describes"
    return text if "; " in text else f"{text}; {advice}"


class RoostreamError(Exception):
    """Base of all; `str()` is one sentence for the user, without passwords of addresses."""

    def __str__(self) -> str:
        return mask_secrets(super().__str__())


class ConfigError(RoostreamError):
    """A setting is wrong."""


class SchemaError(ConfigError):
    """A schema is wrong, or samples of a changed schema can't be read."""


class WireError(RoostreamError):
    """Bytes can't be decoded; `reason` is one of wire.REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnavailableError(RoostreamError):
    """A peer, disk or mount can't be used now. Committed data is not in doubt: a retry can help, an older
    manifest can't."""


class TransportError(UnavailableError):
    """A call failed; the peer may or may not have executed it."""


class FencedError(RoostreamError):
    """A newer incarnation has replaced the caller's."""


class CheckpointError(RoostreamError):
    """Committed data is damaged or absent: a retry can't help, an older manifest may."""


class OtherVersionError(CheckpointError, ConfigError):
    """Committed data is intact, but this version can't continue it. An older commit is not tried, because it
    would discard newer ones."""


class HeldError(RoostreamError):
    """Training is on hold; this program is not needed until the hold ends."""


class SetupError(RoostreamError):
    """The machine lacks a package, port, disk or memory that Roostream needs."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str, kind: type[RoostreamError] = ConfigError) -> Iterator[None]:
    """Wrap imports that `what` needs from an extra of the package. Raises `kind`: it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise kind(f"{what} needs {error.name}; pip install 'roostream[{extra}]'") from None


def describe_error(error: BaseException) -> str:
    """The text of an error with its notes."""
    return "; ".join(part for part in (str(error), *getattr(error, "__notes__", ())) if part)


def reason_of(error: BaseException) -> str:
    """The text of an error, without the number and the path in the text of an OSError."""
    inner = getattr(error, "reason", None)  # of urllib's URLError
    error = inner if isinstance(error, OSError) and isinstance(inner, OSError) else error
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`)",
    errno.EIO: "check the disk",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "use an account that may do this, or another path",
    errno.EPERM: "use an account that may do this, or another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "correct the symbolic link",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the system's limit of open files",
}

EXHAUSTED = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE))
"""Numbers of errors that say that the machine has no more space or files now."""


def describe_os_error(error: OSError) -> str:
    """One sentence for an error of the system that a user can cause: about a path, or about a full disk.

    "" for others, which are defects.
    """
    if error.filename is None and error.errno not in _REMEDIES:
        return ""
    place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
    return f"{place}{error.strerror}; {_REMEDIES.get(error.errno or 0, 'check the path')}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` with the most similar known name, or "" if none is similar."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f"; did you mean {match[0]!r}?" if match else ""


def printable(text: str) -> str:
    """Text from outside without control and direction characters, for terminals, pages and logs."""
    return "".join(c for c in text if c.isprintable())
