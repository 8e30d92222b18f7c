"""The file of bearer keys: read anew when it changes, written whole or not at all."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from roostream.errors import ConfigError
from roostream.runtime.file_watcher import FileWatcher
from serving.access.bearer_keys import BearerKey, file_of, id_and_secret, keys_of
from serving.errors import RequestError

log = logging.getLogger("roostream.serving.access")

_LOOK_S = 1.0
_SCHEME = b"bearer "
ANY = ""
"""In place of a scope: whatever the key's are."""


class Keyring:
    """The keys in force. `check` is for the hot path: a look-up, a hash, a comparison. Thread-safe."""

    def __init__(self, file: Path, now_s: Callable[[], float] = time.time) -> None:
        """Raises ConfigError: the file can't be read, or isn't one of keys."""
        self.file, self.now_s = file, now_s
        self.refused = ""  # why the file as it is now isn't in force; "" = it is
        self._watch = FileWatcher(file)
        self._keys = _by_id(read_keys(file))

    @property
    def keys(self) -> tuple[BearerKey, ...]:
        return tuple(self._keys.values())

    def check(self, authorization: bytes, scope: str) -> BearerKey:
        """The key in a header `Authorization: Bearer …`. Raises RequestError: 401 it isn't one of ours, or no more; 403 it may
        not do this."""
        told = (
            id_and_secret(authorization[len(_SCHEME) :])
            if authorization[: len(_SCHEME)].lower() == _SCHEME
            else None
        )
        if told is None:
            raise RequestError(
                401, "expected the header 'authorization: Bearer KEY' with a key of this serving"
            )
        key = self._keys.get(told[0])
        if key is None or not key.fits(told[1]):
            raise RequestError(
                401, "expected a key of this serving, got one that it doesn't know; it may be revoked"
            )
        if key.expires_s and self.now_s() >= key.expires_s:
            raise RequestError(401, "expected a key of this serving, got one that has expired")
        if scope and scope not in key.scopes:
            raise RequestError(
                403, f"expected a key with scope {scope}, got {key.name!r} with {', '.join(key.scopes)}"
            )
        return key

    def fits(self, authorization: str) -> bool:
        """For the admin port: whether a header has a key with that scope."""
        try:
            self.check(authorization.encode("latin-1", "replace"), "admin")
        except RequestError:
            return False
        return True

    def poll(self) -> None:
        """Take the file if it has changed. One that can't be taken is told, and leaves the old keys in force."""
        if not self._watch.changed():
            return
        try:
            self._keys = _by_id(read_keys(self.file))
        except ConfigError as error:
            self.refused = str(error)
            log.error("%s; the keys of before stay in force", error)
        else:
            self.refused = ""
            log.info("%s: %d keys are in force", self.file, len(self._keys))

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        while not stop.wait(_LOOK_S):
            self.poll()


def _by_id(keys: Iterable[BearerKey]) -> dict[str, BearerKey]:
    return {key.id: key for key in keys}


def read_keys(file: Path) -> tuple[BearerKey, ...]:
    """Raises ConfigError, naming the file."""
    try:
        return keys_of(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a file of keys ({error.strerror}); make one with `roostream keys new`"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def write_keys(file: Path, keys: Iterable[BearerKey]) -> None:
    """Only its owner may read it. Raises ConfigError: it can't be written; then it is as it was."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(file_of(keys))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{file}: it can't be written: {error.strerror}") from None
