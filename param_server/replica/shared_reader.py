"""Rows that another process of this machine keeps: the readers' side. Nothing here writes, waits for the owner, or needs it."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from pathlib import Path

import numpy as np

from param_server.index import Keys
from param_server.replica.shared_files import CURRENT_MS, GENERATIONS, NUM_ROWS, READY, SharedFolder, StackMap
from param_server.replica.shared_rows import SharedOwner, gather_from
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.clock import Clock, SystemClock
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup

log = logging.getLogger("roostream.rows")

_EMPTY = StackMap(
    0, 3, 0, np.uint64(63), np.zeros(2, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.float32)
)
_TRIES = 8


class SharedReader:
    """`gather` from several threads; `look` from one, now and then."""

    def __init__(self, folder: SharedFolder, schema: Schema, seed: int, clock: Clock) -> None:
        self.folder, self.seed, self.clock = folder, seed, clock
        self.num_again = 0  # keys that were begun anew, since their row was being replaced
        self._head: np.ndarray | None = None
        self._inode = 0
        self._said = ""
        self._maps = dict.fromkeys(schema.stacks, _EMPTY)
        self._stacks = {
            name: (
                number,
                tables[0].dim,
                np.array([t.id for t in tables], np.uint32),
                np.array([t.init_scale for t in tables], np.float32),
            )
            for number, (name, tables) in enumerate(schema.stacks.items())
        }
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether there are rows at all."""
        return self._head is not None and bool(self._head[READY])

    @property
    def num_rows(self) -> int:
        return int(self._head[NUM_ROWS]) if self._head is not None else 0

    @property
    def current_s(self) -> float | None:
        """When the rows were last known to be current, by the machine's monotonic clock; None = they never were."""
        current_ms = int(self._head[CURRENT_MS]) if self._head is not None else 0
        return current_ms / 1000 if current_ms else None

    def age_s(self) -> float | None:
        """Time since then."""
        current_s = self.current_s
        return None if current_s is None else max(self.clock.monotonic_s() - current_s, 0.0)

    def look(self) -> None:
        """Take the head that is there now, if it is another one; what can't be used is said once, and the old one stays."""
        inode = self.folder.inode()
        if self._head is not None and inode == self._inode:
            return
        try:
            head = self.folder.map_head()
        except (UnavailableError, ConfigError) as error:
            if str(error) != self._said:
                log.warning("%s", error)
            self._said = str(error)
            return
        self._head, self._inode, self._said = head, inode, ""

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]; keys without a row give the initial value that training begins with. Each row is one that was
        written whole; two rows of one gather can be of different moments."""
        out: dict[str, np.ndarray] = {}
        for name, found in lookup.stacks.items():
            _, width, table_K, scale_K = self._stacks[name]
            out[name], again = gather_from(
                self._map(name), Keys(found.table_U, found.id_U), width, self.seed, table_K, scale_K
            )
            self.num_again += again
        return out

    def _map(self, name: str) -> StackMap:
        if (
            self._head is None
            or int(self._head[GENERATIONS + self._stacks[name][0]]) == self._maps[name].generation
        ):
            return self._maps[name]
        with self._lock:
            return self._follow(self._head, name)

    def _follow(self, head: np.ndarray, name: str) -> StackMap:
        """The file that the head names; it may be replaced again before it is opened."""
        number, width, _, _ = self._stacks[name]
        for _ in range(_TRIES):
            generation = int(head[GENERATIONS + number])
            if generation == self._maps[name].generation:
                break
            try:
                self._maps[name] = self.folder.map_stack(number, generation, width)
            except UnavailableError as error:
                log.debug("rows of %s: %s", name, error)
        return self._maps[name]


def warm() -> None:
    """Compile the kernels of both sides into numba's cache."""
    schema = schema_from_dict(
        {"tables": {"warm": {"dim": 2}}, "label": [{"name": "click", "action": "click"}]}
    )
    stack, (table,) = next(iter(schema.stacks.items()))
    found = StackLookup(np.full(3, table.id, np.uint32), np.arange(3), {})
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.closing(
            SharedOwner(SharedFolder(Path(place), schema, 0), schema, 0, 4, SystemClock()).open()
        ) as owner,
    ):
        keys = Keys(found.table_U, found.id_U)
        owner.stores[stack].put(keys, np.ones((3, 2), np.float32))
        owner.stores[stack].replace(0, keys.take(np.arange(1)), np.zeros((1, 2), np.float32))
        owner.stores[stack].remove(keys)
        owner.stores[stack].gather(keys)
        owner.publish()
        reader = SharedReader(owner.folder, schema, 0, SystemClock())
        reader.gather(Lookup({stack: found}))  # of nothing: arrays that can be written
        reader.look()
        reader.gather(Lookup({stack: found}))
