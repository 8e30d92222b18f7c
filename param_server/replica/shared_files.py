"""The files that rows are shared by: one head, and one of each stack, which is replaced by a larger one when it is full.

    head     words (uint64): magic · format · schema's fingerprint · seed · this start of the machine · stacks ·
             ready · when the rows were known to be current (ms, monotonic; 0 = never) · rows ·
             from word GENERATIONS on, a stack's generation (0 = none yet)
    <stack>-<generation>   words: magic · format · width · words of a slot · slots · places; from word FIRST on the index, then
             the slab (shared_kernels.py)
    lock     held by the one process that writes

A reader maps all of it read-only. Memory of a file is taken when it is made, so that a full disk is an error and no signal.
A file that is replaced is unlinked: who reads it keeps it until he looks again. Nothing is ever cut short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import xxhash

from param_server.replica.shared_kernels import HEAD_WORDS
from roostream.errors import ConfigError, SetupError, UnavailableError
from roostream.schema.schema import Schema

MAGIC, FORMAT = int.from_bytes(b"ROOROWS1", "little"), 1
READY, CURRENT_MS, NUM_ROWS, GENERATIONS = 6, 7, 8, 64
FIRST = 64
_MAX_STACKS = 448
_HEAD_BYTES = 8 * (GENERATIONS + _MAX_STACKS)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, eq=False)
class StackMap:
    """One stack's memory; `slab` and `numbers` are the same bytes."""

    generation: int
    num_words: int  # of a slot
    num_slots: int
    shift: np.uint64
    index_C: np.ndarray  # uint64
    slab: np.ndarray  # uint64
    numbers: np.ndarray  # float32


class SharedFolder:
    """Where the files are. `identity` is what owner and readers must agree in."""

    def __init__(self, folder: Path, schema: Schema, seed: int) -> None:
        if len(schema.stacks) > _MAX_STACKS:
            raise ConfigError(
                f"expected at most {_MAX_STACKS} stacks for rows in shared memory, got {len(schema.stacks)}"
            )
        self.folder, self.stacks = folder, list(schema.stacks)
        self.identity = (MAGIC, FORMAT, schema.fingerprint, seed & (1 << 64) - 1, _boot(), len(schema.stacks))

    @property
    def head_path(self) -> Path:
        return self.folder / "head"

    def lock(self) -> int:
        """Be the one that writes, until this descriptor is closed.

        Raises:
            SetupError: another one is, or the folder can't be used.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(
                f"rows_home {self.folder} can't be used: {error.strerror}; choose another"
            ) from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise SetupError(
                f"rows_home {self.folder} is written by another program; end it, or choose another"
            ) from None
        return held

    def open_head(self) -> np.ndarray:
        """The head, writable: the one that is there, if it is of the same rows, else a new one in its place."""
        try:
            return self.map_head(writable=True)
        except (ConfigError, UnavailableError):
            words = self._create(self.head_path, _HEAD_BYTES, replacing=True)
            words[: len(self.identity)] = self.identity
            return words

    def map_head(self, writable: bool = False) -> np.ndarray:
        """uint64 words.

        Raises:
            UnavailableError: there is none yet, or it is of an earlier start of this machine.
            ConfigError: it is of another schema or seed.
        """
        words = _mapped(self.head_path, writable)
        found = tuple(words[: len(self.identity)].tolist()) if len(words) * 8 == _HEAD_BYTES else ()
        if found[:2] != self.identity[:2] or found[4:5] != self.identity[4:5]:
            raise UnavailableError(
                f"{self.folder}: no rows of this start of the machine yet; waiting for `roostream serving-rows`"
            )
        if found != self.identity:
            raise ConfigError(
                f"{self.folder}: expected rows of schema {self.identity[2]:016x} and seed {self.identity[3]}, got schema "
                f"{found[2]:016x} and seed {found[3]}; give serving and serving-rows the same"
            )
        return words

    def inode(self) -> int:
        """Of the head that is there now; 0 = none."""
        try:
            return self.head_path.stat().st_ino
        except OSError:
            return 0

    def create_stack(self, stack: int, generation: int, width: int, capacity: int) -> StackMap:
        """An empty file.

        Raises:
            UnavailableError: no room.
        """
        num_words, places = HEAD_WORDS + (width + 1) // 2, 1 << (2 * capacity - 1).bit_length()
        words = self._create(self._path(stack, generation), 8 * (FIRST + places + capacity * num_words))
        words[:6] = (MAGIC, FORMAT, width, num_words, capacity, places)
        return _view(words, generation)

    def map_stack(self, stack: int, generation: int, width: int) -> StackMap:
        """Raises UnavailableError: it isn't there (any more), or isn't what the head says."""
        words = _mapped(self._path(stack, generation), writable=False)
        head = words[:6].tolist() if len(words) >= FIRST else []
        num_words = HEAD_WORDS + (width + 1) // 2
        if (
            head[:4] != [MAGIC, FORMAT, width, num_words]
            or len(words) != FIRST + head[5] + head[4] * num_words
        ):
            raise UnavailableError(f"{self._path(stack, generation)} is not what it should be")
        return _view(words, generation)

    def newest_generation(self) -> int:
        """Of any stack's file that is there; 0 = none."""
        names = [path.name.rpartition("-")[2] for path in self.folder.glob("*-*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def forget(self, stack: int, generation: int) -> None:
        """Unlink one file."""
        self._path(stack, generation).unlink(missing_ok=True)

    def keep_only(self, generations: dict[int, int]) -> None:
        """Unlink every stack's file but these (stack → generation)."""
        kept = {self._path(stack, generation) for stack, generation in generations.items()}
        for path in self.folder.glob("*-*"):
            if path.name.rpartition("-")[2].isdecimal() and path not in kept:
                path.unlink(missing_ok=True)

    def _path(self, stack: int, generation: int) -> Path:
        return self.folder / f"{stack}-{generation}"

    def _create(self, path: Path, num_bytes: int, replacing: bool = False) -> np.ndarray:
        made = path.with_name(f"{path.name}.new")
        try:
            made.unlink(missing_ok=True)
            descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
                words = np.frombuffer(_with_large_pages(mmap.mmap(descriptor, num_bytes)), np.uint64)
            finally:
                os.close(descriptor)
            made.rename(path)
        except OSError as error:
            made.unlink(missing_ok=True)
            raise UnavailableError(
                f"{path}: no room for {num_bytes} bytes of rows: {error.strerror}"
            ) from None
        return words


def _mapped(path: Path, writable: bool) -> np.ndarray:
    try:
        with path.open("r+b" if writable else "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{path} can't be read: {error}") from None
    return np.frombuffer(_with_large_pages(memory), np.uint64, len(memory) // 8)


def _with_large_pages(memory: mmap.mmap) -> mmap.mmap:
    """Where kernel and file system have them, rows that are far apart cost less."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _view(words: np.ndarray, generation: int) -> StackMap:
    _, _, _, num_words, num_slots, places = words[:6].tolist()
    slab = words[FIRST + places :]
    shift = np.uint64(64 - (places - 1).bit_length())
    return StackMap(
        generation, num_words, num_slots, shift, words[FIRST : FIRST + places], slab, slab.view(np.float32)
    )


def _boot() -> int:
    """Which start of the machine this is: monotonic times of another one mean nothing."""
    try:
        return xxhash.xxh3_64_intdigest(_BOOT_ID.read_bytes())
    except OSError:
        return 0
