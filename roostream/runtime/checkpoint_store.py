"""Stores of committed data (manifests, incarnations, dense parts, schemas) in a directory or an S3 bucket.

A store is a flat space of names such as `manifests/00000012` or `dense/12-3.safetensors`. A commit is one
`create`: it makes the whole object visible under its name, or changes nothing if the name exists.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from roostream.errors import (
    CheckpointError,
    ConfigError,
    SetupError,
    UnavailableError,
    mask_secrets,
    nearest,
    reason_of,
)

_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}(/[a-z0-9][a-z0-9._-]{0,63})*$")
_S3_REFUSAL = re.compile(r"<Code>(\w+)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL)
_PROBE = "probes/create"  # always has the same bytes and is never deleted
_PROBE_ATTEMPTS = 3  # an older version of Roostream may delete the object between two creates
UNFINISHED = ".roostream-unfinished."  # begins the name of a file that is being written
UNFINISHED_S = 600.0
"""A file that nobody has written to for so long belongs to a writer that was killed."""
PART_BYTES = 8 << 20
"""A larger object is written and read in parts of this size."""
_MAX_PARTS = 9_000  # S3 takes 10,000
_PARTS_AT_ONCE = 4
_RETRY_S = 20.0  # far below the time limit of a step of a commit


class CheckpointStore(Protocol):
    """Every method raises UnavailableError where the store can't be read or written now: full, gone, or
    access denied."""

    def create(self, name: str, data: bytes) -> bool:
        """Durable, atomic, exclusive. True if this call created the object; False if the name existed.

        **If it fails** (UnavailableError): the name does not exist, or exists completely; call again to learn
        which.
        """

    def put(self, name: str, data: bytes) -> None:
        """Durable and atomic; replaces. For parts that a manifest lists with their checksum.

        **If it fails** (UnavailableError): the object is unchanged, or has the new bytes.
        """

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        """As `put`, of `size` bytes that come in chunks and need not fit into memory. A name is written with
        the same bytes only, so parts of it may be sent again. Whatever `chunks` raises is raised, and the
        object is unchanged then."""

    def get(self, name: str) -> bytes:
        """The object's bytes. Raises CheckpointError if absent. Does not verify: the manifest has the
        checksums."""

    def get_range(self, name: str, start: int, size: int) -> bytes:
        """`size` bytes from `start`. Raises CheckpointError: absent, or shorter. Several threads may call it
        at once."""

    def list(self, prefix: str) -> list[str]:
        """Names directly below `prefix/`, sorted; never unfinished objects."""

    def delete(self, name: str) -> None:
        """Delete an object. A name that does not exist is no error."""

    def sweep(self) -> None:
        """Delete what writers that were killed have left unfinished. Writes in progress are left alone."""


def check_name(name: str) -> str:
    """`name`. Raises CheckpointError: it could lead out of the store, or mean something else in another kind
    of store."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"expected a name like 'manifests/00000012', got {name!r}")
    return name


def check_range(name: str, start: int, size: int, data: bytes) -> bytes:
    """`data`. Raises CheckpointError: it has fewer than `size` bytes."""
    if len(data) != size:
        raise CheckpointError(f"{name} is cut off: expected {size} bytes from {start}, got {len(data)}")
    return data


class FileStore:
    """A store in a directory.

    A file is written under a temporary name, fsynced, then linked (link(2) is exclusive) or renamed. Then its
    directory is fsynced, and so is the parent of each directory that had to be created.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        fsync: Callable[[int], None] = os.fsync,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.root, self._fsync, self._now_s = Path(root), fsync, now_s

    def make_root(self) -> None:
        """Create the directory. Raises UnavailableError: it cannot be created."""
        with _disk_errors(f"{self.root} can't be created"):
            self._make_directory(self.root)

    def path(self, name: str) -> Path:
        return self.root / check_name(name)

    def create(self, name: str, data: bytes) -> bool:
        target = self.path(name)
        with _disk_errors(f"{target} can't be written"):
            temporary = self._write(target, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            self._sync_directory(target.parent)
        return True

    def put(self, name: str, data: bytes) -> None:
        target = self.path(name)
        with _disk_errors(f"{target} can't be written"):
            os.replace(self._write(target, data), target)
            self._sync_directory(target.parent)

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        target = self.path(name)
        with _disk_errors(f"{target} can't be written"):
            os.replace(self._write_chunks(target, chunks), target)
            self._sync_directory(target.parent)

    def get(self, name: str) -> bytes:
        path = self.path(name)
        with _disk_errors(f"{path} can't be read"):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                raise CheckpointError(f"{name} is absent from {self.root}") from None

    def get_range(self, name: str, start: int, size: int) -> bytes:
        path = self.path(name)
        with _disk_errors(f"{path} can't be read"):
            try:
                with path.open("rb", buffering=0) as file:
                    found = os.pread(file.fileno(), size, start)
            except FileNotFoundError:
                raise CheckpointError(f"{name} is absent from {self.root}") from None
        return check_range(name, start, size, found)

    def list(self, prefix: str) -> list[str]:
        base = self.path(prefix)
        with _disk_errors(f"{base} can't be read"):
            try:
                with os.scandir(base) as entries:
                    names = [e.name for e in entries if e.is_file() and not e.name.startswith(".")]
            except FileNotFoundError:
                return []
        return sorted(f"{prefix}/{name}" for name in names)

    def delete(self, name: str) -> None:
        path = self.path(name)
        with _disk_errors(f"{path} can't be deleted"):
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete unfinished files in the directory of this store and in the folders of its names. A folder
        below may be another store, such as a warehouse."""
        with _disk_errors(f"{self.root} can't be swept"):
            for path in [*self.root.glob(f"{UNFINISHED}*"), *self.root.glob(f"*/{UNFINISHED}*")]:
                with contextlib.suppress(FileNotFoundError):  # its writer has just finished
                    if self._now_s() - path.stat().st_mtime >= UNFINISHED_S:
                        path.unlink()

    def _write(self, target: Path, data: bytes) -> Path:
        return self._write_chunks(target, (data,))

    def _write_chunks(self, target: Path, chunks: Iterable[bytes]) -> Path:
        self._make_directory(target.parent)
        handle, name = tempfile.mkstemp(prefix=UNFINISHED, dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(chunks)
                file.flush()
                self._fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _make_directory(self, path: Path) -> None:
        """Make a directory and its parents, and sync the parents: only then does it survive a power
        failure."""
        if path.is_dir():
            return
        self._make_directory(path.parent)
        path.mkdir(exist_ok=True)
        self._sync_directory(path.parent)

    def _sync_directory(self, path: Path) -> None:
        sync_path(path, self._fsync)


def sync_path(path: Path, fsync: Callable[[int], None] = os.fsync) -> None:
    """Make a file, or the names in a directory, survive a power failure. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"{what} ({error.strerror or error}); free disk space or make the directory available again"
        ) from None


class ObjectStore:
    """A store in a bucket that speaks S3, `s3://bucket/prefix`. Thread-safe; nothing is read or written
    before the first call.

    Credentials, region and endpoint come from the environment variables that all S3 programs use
    (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP=true, a role's
    token). `create` is a PUT with `If-None-Match: *`, so that the store decides who was first. A store that
    ignores this header would let every writer succeed; therefore the first `create` of a process tests it
    (docs/decisions/0036).
    """

    def __init__(self, location: str) -> None:
        """`location`: bucket, or bucket/prefix.

        Raises:
            ConfigError: another form, or the environment's settings are invalid.
            SetupError: obstore is not installed.
        """
        bucket, _, prefix = location.rstrip("/").partition("/")
        if not bucket or (prefix and not _NAME.fullmatch(prefix)):
            raise ConfigError(
                f"expected a store like s3://bucket/prefix, got {'s3://' + location!r}; name a bucket"
            )
        self.url = f"s3://{location.rstrip('/')}"
        self._client = _client(bucket, prefix)
        self._retrying_client = _client(bucket, prefix, max_retries=3)  # for what may be repeated
        self._create_is_exclusive = False
        self._lock = threading.Lock()

    def create(self, name: str, data: bytes) -> bool:
        self._check_exclusive_create()
        return self._create(name, data)

    def put(self, name: str, data: bytes) -> None:
        with _s3_errors(f"{self.url}/{name} can't be written"):
            _obstore().put(self._client, check_name(name), data, use_multipart=False)

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        """In parts, of which four are on their way at once; the object exists once all are there. Parts of a
        writer that was killed stay hidden in the bucket until a rule of its life cycle deletes them
        (docs/operations/backup.md)."""
        failed: list[Exception] = []

        def guarded() -> Iterator[bytes]:
            try:
                yield from chunks
            except Exception as error:  # obstore would hide its type
                failed.append(error)
                raise

        data: bytes | Iterator[bytes] = guarded() if size > PART_BYTES else b"".join(chunks)
        try:
            with _s3_errors(f"{self.url}/{name} can't be written"):
                _obstore().put(
                    self._retrying_client,
                    check_name(name),
                    data,
                    use_multipart=size > PART_BYTES,
                    chunk_size=max(PART_BYTES, -(-size // _MAX_PARTS)),
                    max_concurrency=_PARTS_AT_ONCE,
                )
        except Exception:
            if failed:
                raise failed[0] from None
            raise

    def get(self, name: str) -> bytes:
        with _s3_errors(f"{self.url}/{name} can't be read", f"{name} is absent from {self.url}"):
            return bytes(_obstore().get(self._client, check_name(name)).bytes())

    def get_range(self, name: str, start: int, size: int) -> bytes:
        if not size:
            return b""
        with _s3_errors(f"{self.url}/{name} can't be read", f"{name} is absent from {self.url}"):
            found = bytes(
                _obstore().get_range(self._retrying_client, check_name(name), start=start, length=size)
            )
        return check_range(name, start, size, found)

    def list(self, prefix: str) -> list[str]:
        with _s3_errors(f"{self.url} can't be listed"):
            listed = _obstore().list_with_delimiter(self._client, prefix=check_name(prefix))
        return sorted(str(entry["path"]) for entry in listed["objects"])

    def delete(self, name: str) -> None:
        with _s3_errors(f"{self.url}/{name} can't be deleted"), contextlib.suppress(FileNotFoundError):
            _obstore().delete(self._client, check_name(name))

    def sweep(self) -> None:
        """An object exists once it is complete, so nothing that can be listed is ever unfinished."""

    def _create(self, name: str, data: bytes) -> bool:
        """Never retried: after a lost answer, a second try would find its own object and report that another
        writer has it."""
        obstore = _obstore()
        with _s3_errors(f"{self.url}/{name} can't be written"):
            try:
                obstore.put(self._client, check_name(name), data, mode="create", use_multipart=False)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError) as error:
                if s3_reason(error).startswith("ConditionalRequestConflict"):
                    raise  # another request for the name is under way; the name may be free after it
                return False
        return True

    def _check_exclusive_create(self) -> None:
        """Create one object twice. All programs use the same object with the same bytes, and none deletes it.

        Raises:
            SetupError: in this store two writers can create the same name.
        """
        with self._lock:
            for _ in range(_PROBE_ATTEMPTS):
                if self._create_is_exclusive:
                    return
                self._create(_PROBE, b"")
                self._create_is_exclusive = not self._create(_PROBE, b"")
            if not self._create_is_exclusive:
                raise SetupError(
                    f"{self.url}: expected the store to refuse to create a name twice, but it did: it "
                    "ignores If-None-Match, so two controllers could commit; use a store that supports it"
                )


def _obstore() -> Any:
    """The package obstore. Imported on first use, because most programs have their store in a directory."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise SetupError("a store at s3://… needs the package obstore; install roostream[s3]") from None
    return obstore


def _allows_http() -> bool:
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")


def _client(bucket: str, prefix: str, *, max_retries: int = 0) -> Any:
    """Only the caller knows which calls may be repeated."""
    obstore = _obstore()
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint.startswith("http://") and not _allows_http():
        raise ConfigError(
            f"AWS_ENDPOINT_URL: expected https://…, got {mask_secrets(endpoint)}; set AWS_ALLOW_HTTP=true to "
            "send keys and data unencrypted"
        )
    try:
        return obstore.store.S3Store(
            bucket,
            prefix=prefix or None,
            client_options={"timeout": "30s", "connect_timeout": "5s", "allow_http": _allows_http()},
            retry_config={"max_retries": max_retries, "retry_timeout": timedelta(seconds=_RETRY_S)},
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"s3://{bucket}: the environment's AWS_… settings are invalid: {s3_reason(error)}"
        ) from None


@contextlib.contextmanager
def _s3_errors(what: str, absent: str = "") -> Iterator[None]:
    obstore = _obstore()
    try:
        yield
    except FileNotFoundError as error:
        reason = s3_reason(error)
        if absent and not reason.startswith("NoSuchBucket"):
            raise CheckpointError(absent) from None
        raise UnavailableError(f"{what} ({reason}); create the bucket or correct its address") from None
    except (obstore.exceptions.BaseError, OSError) as error:
        raise UnavailableError(f"{what} ({s3_reason(error)}); make it available again") from None


def s3_reason(error: Exception) -> str:
    """The code and message with which an object store refused a call, else the first line of the error; and
    the proxy of the environment through which a store was not reached."""
    text = reason_of(error).strip()
    if found := _S3_REFUSAL.search(text):
        text = f"{found[1]}: {found[2].strip()}"
    text = text.split("\n", 1)[0][:300]
    scheme = "https" if "https://" in text else "http"
    if "error sending request" in text and (proxy := urllib.request.getproxies().get(scheme)):
        text += f", through the proxy {mask_secrets(proxy)} unless NO_PROXY has this host"
    return text


def _file_store(path: str) -> FileStore:
    if not path.startswith("/"):
        raise ConfigError(
            f"expected a store like file:///a/directory, got {'file://' + path!r}; add the third slash"
        )
    return FileStore(path)


STORES: Mapping[str, Callable[[str], CheckpointStore]] = {"file": _file_store, "s3": ObjectStore}
"""URL scheme → function that opens the rest of the URL. A new kind of store is one class and one entry."""


def is_object_store(url: str | Path) -> bool:
    """Whether the store at `url` is a bucket, and not a directory."""
    scheme, is_url, _ = str(url).partition("://")
    return bool(is_url) and scheme != "file"


def open_store(url: str | Path) -> CheckpointStore:
    """`/a/directory`, `a/directory`, `file:///a/directory` or `s3://bucket/prefix`. Reads and writes nothing
    yet.

    Raises:
        ConfigError: an unknown scheme (lists the known ones), or the rest of the URL does not fit the scheme.
        SetupError: the kind of store needs a package that isn't installed.
    """
    scheme, is_url, path = str(url).partition("://")
    if not is_url:
        return FileStore(url)
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise ConfigError(
            f"expected a store that is a path or begins with {known}, got "
            f"{str(url)!r}{nearest(scheme, STORES)}"
        )
    return STORES[scheme](path)
