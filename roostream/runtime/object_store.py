"""A checkpoint store in a bucket that speaks S3: `s3://bucket/prefix`.

Who we are and where it is come from the environment as every S3 program reads it (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP=true, a role's token). `create` is a PUT with `If-None-Match: *`: the store itself
decides who was first. A store that does not know that header would let everybody win, so the first `create` of a process
proves it (docs/decisions/0036).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from roostream.errors import CheckpointError, ConfigError, SetupError, UnavailableError
from roostream.runtime.store_names import NAME, checked, whole_range

_PROBE = "probes"


class ObjectStore:
    """`CheckpointStore` in a bucket. Nothing is read or written before the first call. Threads may share it."""

    def __init__(self, place: str) -> None:
        """`place`: bucket, or bucket/prefix.

        Raises:
            ConfigError: another form, or settings in the environment that can't be used. SetupError: obstore isn't installed.
        """
        bucket, _, prefix = place.rstrip("/").partition("/")
        if not bucket or (prefix and not NAME.fullmatch(prefix)):
            raise ConfigError(
                f"expected a store like s3://bucket/prefix, got {'s3://' + place!r}; name a bucket"
            )
        self.url = f"s3://{place.rstrip('/')}"
        self._client = _client(bucket, prefix)
        self._proven = False
        self._lock = threading.Lock()

    def create(self, name: str, data: bytes) -> bool:
        self._prove()
        return self._created(name, data)

    def put(self, name: str, data: bytes) -> None:
        with _told(f"{self.url}/{name} can't be written"):
            _obstore().put(self._client, checked(name), data, use_multipart=False)

    def get(self, name: str) -> bytes:
        with _told(f"{self.url}/{name} can't be read", f"{name} is absent from {self.url}"):
            return bytes(_obstore().get(self._client, checked(name)).bytes())

    def get_range(self, name: str, start: int, size: int) -> bytes:
        if not size:
            return b""
        with _told(f"{self.url}/{name} can't be read", f"{name} is absent from {self.url}"):
            found = bytes(_obstore().get_range(self._client, checked(name), start=start, length=size))
        return whole_range(name, start, size, found)

    def list(self, prefix: str) -> list[str]:
        with _told(f"{self.url} can't be listed"):
            found = _obstore().list_with_delimiter(self._client, prefix=checked(prefix))
        return sorted(str(one["path"]) for one in found["objects"])

    def delete(self, name: str) -> None:
        with _told(f"{self.url}/{name} can't be deleted"), contextlib.suppress(FileNotFoundError):
            _obstore().delete(self._client, checked(name))

    def sweep(self) -> None:
        """Nothing unfinished is ever there: each object is one PUT, which is whole or nothing."""
        for name in self.list(_PROBE):
            self.delete(name)

    def _created(self, name: str, data: bytes) -> bool:
        """Never tried twice by itself: an answer that was lost, and then "it exists", would be a claim that nobody has."""
        obstore = _obstore()
        with _told(f"{self.url}/{name} can't be written"):
            try:
                obstore.put(self._client, checked(name), data, mode="create", use_multipart=False)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                return False
        return True

    def _prove(self) -> None:
        """Raises SetupError: two may create one name in this store."""
        with self._lock:
            if self._proven:
                return
            name = f"{_PROBE}/{secrets.token_hex(16)}"
            won = [self._created(name, data) for data in (b"first", b"second")]
            if won != [True, False] or self.get(name) != b"first":
                raise SetupError(
                    f"{self.url}: expected that a name is created once, got it created twice: it does not know If-None-Match, "
                    "so that two controllers could commit; use a store that does"
                )
            self.delete(name)
            self._proven = True


def _obstore() -> Any:
    """Imported where it is used: most programs have their store in a directory."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise SetupError("a store at s3://… needs the package obstore; install roostream[s3]") from None
    return obstore


def _allows_http() -> bool:
    """As other S3 programs: only if the environment says so."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")


def _client(bucket: str, prefix: str) -> Any:
    obstore = _obstore()
    try:  # max_retries 0: callers wait and try again by their own rules, and only they know what may be tried twice
        return obstore.store.S3Store(
            bucket,
            prefix=prefix or None,
            client_options={"timeout": "30s", "connect_timeout": "5s", "allow_http": _allows_http()},
            retry_config={"max_retries": 0},
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"s3://{bucket}: the environment's AWS_… settings can't be used: {_short(error)}"
        ) from None


@contextlib.contextmanager
def _told(what: str, absent: str = "") -> Iterator[None]:
    obstore = _obstore()
    try:
        yield
    except FileNotFoundError:
        if not absent:
            raise
        raise CheckpointError(absent) from None
    except (obstore.exceptions.BaseError, OSError) as error:
        raise UnavailableError(f"{what} ({_short(error)}); bring it back") from None


def _short(error: Exception) -> str:
    """The first line, without the long form that follows it."""
    return str(error).strip().split("\n", 1)[0][:300]
