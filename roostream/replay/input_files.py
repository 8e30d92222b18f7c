"""The files of a log: the only place that knows where they are, and how they are packed. Another file system is another branch
here."""

from __future__ import annotations

import contextlib
import gzip
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from roostream.errors import ConfigError, SetupError
from roostream.schema.settings import setting_error

_CHUNK = 1 << 20


def open_file(path: str) -> BinaryIO:
    """A log's file, to read and to seek; the caller closes it. What is packed (`.gz`, `.zst`) or comes through a pipe is first
    copied to an unnamed file among the temporary ones.

    Raises:
        ConfigError: it isn't there, can't be read, or isn't what its name says.
        SetupError: there is no room for the copy.
    """
    file = _open(path)
    if Path(path).suffix not in (".gz", ".zst") and file.seekable():
        return file
    with file:
        return _copied(path, _unpacked(path, file))


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise ConfigError(f"{path}: expected a file that can be read, got {error.strerror}") from None


def _unpacked(path: str, file: BinaryIO) -> Iterator[bytes]:
    """The content in pieces. Raises EOFError, OSError, zlib.error or ZstdError: damaged or cut."""
    if path.endswith(".zst"):
        yield from _frames(file)
        return
    source = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
    while piece := source.read(_CHUNK):
        yield piece


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """Zstandard, frame after frame; the library's own reader takes a cut file for a whole one."""
    frame = None
    while piece := file.read(_CHUNK):
        while piece:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(piece)
            piece = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends within a frame")


def _copied(path: str, pieces: Iterator[bytes]) -> BinaryIO:
    """All of it in an unnamed file, at its beginning."""
    with contextlib.ExitStack() as opened:
        try:
            copy = opened.enter_context(tempfile.TemporaryFile())
            while piece := _next(path, pieces):
                copy.write(piece)
            copy.seek(0)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise SetupError(
                f"{path}: it can't be unpacked into {folder} ({error.strerror}); make room or set TMPDIR"
            ) from None
        opened.pop_all()
        return cast(BinaryIO, copy)


def _next(path: str, pieces: Iterator[bytes]) -> bytes:
    try:
        return next((piece for piece in pieces if piece), b"")
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise ConfigError(
            f"{path}: expected a whole {Path(path).suffix} file, got one that can't be unpacked ({error})"
        ) from None


def check_files(key: str, paths: Sequence[str], *, needed: bool) -> None:
    """Told when settings are made, before hours of work; a pipe is not opened, since it can be read once only.

    Raises:
        SettingError: `needed`, and there is none.
        ConfigError: one isn't there or can't be read.
    """
    if needed and not paths:
        raise setting_error(key, "at least one file", paths, "name one")
    for path in paths:
        if not Path(path).is_fifo():
            _open(path).close()
