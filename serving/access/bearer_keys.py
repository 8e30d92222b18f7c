"""Bearer keys and the key file.

A key is `roo_<id>_<secret>`. The secret is 256 random bits that are generated here, so one round of salted
SHA-256 protects it: slow hashes (scrypt, Argon2) are for secrets that can be guessed, and would cost
milliseconds per request. The id finds the entry.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from roostream.errors import ConfigError, nearest
from roostream.runtime.file_watcher import FileWatcher
from roostream.schema.settings import check_name
from serving.errors import RequestError

SCOPES = {
    "rank": "rank, retrieve, recommend, infer and explain",
    "engage": "tell engagements",
    "metrics": "read /metrics",
    "admin": "the admin port",
}
FORMAT = 1
_Time = Annotated[int, Meta(ge=0, le=253_402_300_799)]  # seconds since 1970, until the end of the year 9999
_SECRET_BYTES, _SALT_BYTES, _ID_BYTES = 32, 16, 6
_TEXT = re.compile(rb"roo_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BearerKey:
    """An entry of the key file: everything about a key except its secret."""

    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    name: str
    scopes: tuple[str, ...]
    salt: Annotated[str, Meta(pattern=r"\A([0-9a-f]{2}){16,}\Z")]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # of salt and secret
    created_s: _Time
    expires_s: _Time = 0  # refused from then on; 0 = never

    def fits(self, secret: bytes) -> bool:
        """Constant-time comparison."""
        return hmac.compare_digest(_digest(bytes.fromhex(self.salt), secret), self.sha256)


class _KeyFile(msgspec.Struct):
    format: int
    keys: tuple[BearerKey, ...]


def new_key(name: str, scopes: Iterable[str], now_s: int, expires_s: int = 0) -> tuple[str, BearerKey]:
    """Return (the key, which is shown once and stored nowhere; its entry). Raises ConfigError: invalid name
    or scope."""
    check_name("key", name)
    wanted = tuple(dict.fromkeys(scopes))
    if not wanted:
        raise ConfigError(f"expected at least one scope of {', '.join(SCOPES)}, got none")
    _check_scopes(wanted)
    secret, salt = secrets.token_urlsafe(_SECRET_BYTES), secrets.token_bytes(_SALT_BYTES)
    key = BearerKey(
        id=secrets.token_hex(_ID_BYTES),
        name=name,
        scopes=wanted,
        salt=salt.hex(),
        sha256=_digest(salt, secret.encode()),
        created_s=now_s,
        expires_s=expires_s,
    )
    return f"roo_{key.id}_{secret}", key


def parse_key(text: bytes) -> tuple[str, bytes] | None:
    """Return (id, secret) of a key as it is sent, or None if it is malformed."""
    found = _TEXT.fullmatch(text)
    return (found[1].decode(), found[2]) if found else None


def encode_key_file(keys: Iterable[BearerKey]) -> bytes:
    """The content of the key file."""
    return msgspec.json.format(msgspec.json.encode(_KeyFile(FORMAT, tuple(keys))), indent=1) + b"\n"


def decode_key_file(data: bytes) -> tuple[BearerKey, ...]:
    """The entries of a key file. Raises ConfigError: it is malformed."""
    try:
        file = msgspec.json.decode(data, type=_KeyFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"expected the JSON that `roostream keys new` writes, got something else ({error}); restore the "
            "file, or make a new one"
        ) from None
    if file.format != FORMAT:
        raise ConfigError(f"expected a key file of format {FORMAT}, got {file.format}")
    for key in file.keys:
        check_name("key", key.name)
        _check_scopes(key.scopes)
    if len({key.id for key in file.keys}) < len(file.keys):
        raise ConfigError("expected each id once")
    return file.keys


def _check_scopes(scopes: Iterable[str]) -> None:
    for scope in scopes:
        if scope not in SCOPES:
            raise ConfigError(
                f"expected a scope of {', '.join(SCOPES)}, got {scope!r}{nearest(str(scope), SCOPES)}"
            )


def _digest(salt: bytes, secret: bytes) -> str:
    return hashlib.sha256(salt + secret).hexdigest()


log = logging.getLogger("roostream.serving.access")

_LOOK_S = 1.0
_SCHEME = b"bearer"
ANY = ""
"""Instead of a scope: any valid key will do."""


class Keyring:
    """The keys in force. `check` is cheap: one lookup, one hash, one comparison. Thread-safe."""

    def __init__(self, file: Path, now_s: Callable[[], float] = time.time) -> None:
        """Raises ConfigError: the file cannot be read or is malformed."""
        self.file, self.now_s = file, now_s
        self.refused = ""  # why the current file is not in force; "" = it is
        self._watch = FileWatcher(file)
        self._keys = _by_id(read_keys(file))

    @property
    def keys(self) -> tuple[BearerKey, ...]:
        return tuple(self._keys.values())

    def check(self, authorization: bytes, scope: str) -> BearerKey:
        """Return the key of an `Authorization: Bearer …` header. Raises RequestError: 401 unknown or expired;
        403 it lacks the scope."""
        scheme, _, text = authorization.strip().partition(b" ")
        is_bearer = scheme.lower() == _SCHEME
        parsed = parse_key(text.lstrip()) if is_bearer else None
        if parsed is None:
            got = "a malformed key" if is_bearer else "another scheme" if scheme else "no such header"
            raise RequestError(
                401, f"expected the header 'authorization: Bearer KEY' with a key of this serving, got {got}"
            )
        key = self._keys.get(parsed[0])
        if key is None or not key.fits(parsed[1]):
            raise RequestError(
                401, "expected a key of this serving, got an unknown one; it may have been revoked"
            )
        if key.expires_s and self.now_s() >= key.expires_s:
            raise RequestError(401, "expected a key of this serving, got one that has expired")
        if scope and scope not in key.scopes:
            raise RequestError(
                403, f"expected a key with scope {scope}, got {key.name!r} with {', '.join(key.scopes)}"
            )
        return key

    def poll(self) -> None:
        """Load the file if it has changed. If it cannot be read or is invalid, the error is logged once, the
        old keys stay in force, and the file is tried again at every call."""
        if not (self._watch.changed() or self.refused):
            return
        try:
            self._keys = _by_id(read_keys(self.file))
        except ConfigError as error:
            if str(error) != self.refused:
                log.error("%s; the previous keys stay in force", error)
            self.refused = str(error)
        else:
            self.refused = ""
            log.info("%s: %d keys are in force", self.file, len(self._keys))

    def run(self, stop: threading.Event) -> None:
        """Poll until `stop`."""
        while not stop.wait(_LOOK_S):
            self.poll()


def _by_id(keys: Iterable[BearerKey]) -> dict[str, BearerKey]:
    return {key.id: key for key in keys}


def read_keys(file: Path) -> tuple[BearerKey, ...]:
    """The keys of a file. Raises ConfigError with the file's name."""
    try:
        return decode_key_file(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a file of keys ({error.strerror}); make one with `roostream keys new`"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def write_keys(file: Path, keys: Iterable[BearerKey]) -> None:
    """Replace the file atomically. It keeps its owner and mode, so that serving can read it under another
    account; a new one is readable by its owner only. Raises ConfigError: it cannot be written and is
    unchanged."""
    file = Path(os.path.realpath(file))  # a link to it stays a link
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(encode_key_file(keys))
            out.flush()
            if file.exists():
                before = file.stat()
                os.fchown(out.fileno(), before.st_uid, before.st_gid)
                os.fchmod(out.fileno(), stat.S_IMODE(before.st_mode))
            os.fsync(out.fileno())
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
