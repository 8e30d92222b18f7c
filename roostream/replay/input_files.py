"""Open the input files of a log, and decompress them where needed. Support for another file system belongs
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
from roostream.replay.file_endings import packing_of
from roostream.schema.settings import setting_error

_CHUNK = 1 << 20
_PACKED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}  # and how such a file begins


def open_file(path: str) -> BinaryIO:
    """Open a file for reading and seeking; the caller closes it.

    A compressed file (`.gz`, `.zst`) or a pipe is first copied to an unnamed temporary file.

    Raises:
        ConfigError: the file does not exist, cannot be read or decompressed, or is compressed though its name
            does not say so.
        SetupError: there is no space for the copy.
    """
    file = _open(path)
    if not packing_of(path) and file.seekable():
        start = file.read(4)
        file.seek(0)
        for ending, magic in _PACKED.items():
            if start.startswith(magic):
                file.close()
                text = f"expected a file that is not compressed, got one in the form of {ending}"
                raise ConfigError(f"{path}: {text}; let its name end in {ending}")
        return file
    with file:
        return _temporary_copy(path, _decompress(path, file))


def _open(path: str) -> BinaryIO:
    if not path:
        raise ConfigError("expected a path, got an empty text; is a variable of the shell unset?")
    try:
        return Path(path).open("rb")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a file, got a folder; name the files in it") from None
    except OSError as error:
        text = f"{path}: expected a readable file, got {error.strerror}; check its permissions"
        raise ConfigError(text) from None


def _decompress(path: str, file: BinaryIO) -> Iterator[bytes]:
    """The content in pieces. Raises EOFError, OSError, zlib.error or ZstdError: the file is damaged or
    truncated."""
    if packing_of(path) == ".zst":
        yield from _decompress_zstd(file)
        return
    source = gzip.GzipFile(fileobj=file) if packing_of(path) == ".gz" else file
    while piece := source.read(_CHUNK):
        yield piece


def _decompress_zstd(file: BinaryIO) -> Iterator[bytes]:
    """Decompress frame by frame, because the library's own reader does not report a truncated file."""
    frame = None
    while piece := file.read(_CHUNK):
        while piece:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(piece)
            piece = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends within a frame")


def _temporary_copy(path: str, pieces: Iterator[bytes]) -> BinaryIO:
    """An unnamed file with all the pieces, positioned at its start."""
    with contextlib.ExitStack() as opened:
        try:
            copy = opened.enter_context(tempfile.TemporaryFile())
            while piece := _next(path, pieces):
                copy.write(piece)
            copy.seek(0)
        except OSError as error:
            folder = tempfile.gettempdir()
            text = (
                f"{path}: cannot be decompressed into {folder} ({error.strerror}); free space or set TMPDIR"
            )
            raise SetupError(text) from None
        opened.pop_all()
        return cast(BinaryIO, copy)


def _next(path: str, pieces: Iterator[bytes]) -> bytes:
    try:
        return next((piece for piece in pieces if piece), b"")
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        text = f"{path}: expected a complete {Path(path).suffix} file, but decompression failed ({error})"
        raise ConfigError(text) from None


def check_files(key: str, paths: Sequence[str], *, needed: bool) -> None:
    """Check input files when settings are loaded, before long work. A pipe is not opened, because it can be
    read only once.

    Raises:
        SettingError: `needed`, and there is none.
        ConfigError: a file does not exist or cannot be read.
    """
    if needed and not paths:
        raise setting_error(key, "at least one file", paths, "name one")
    for path in paths:
        if not Path(path).is_fifo():
            _open(path).close()
