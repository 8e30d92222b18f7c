"""Who read which split, kept in the store for `roostream inspect session --leases`, during a run and behind it."""

from __future__ import annotations

import json
import logging

from roostream.errors import UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from trainer.control.reader_master import ReaderMaster

log = logging.getLogger("roostream.controller")

LEASES = "control/leases"
"""Plain JSON, see `LeaseLog.body`. Nothing of ours goes on from it."""
KEEP_S = 5.0


class LeaseRecorder:
    """`turned` by one thread, as often as it likes."""

    def __init__(self, master: ReaderMaster, store: CheckpointStore, clock: Clock) -> None:
        self.master, self.store, self.clock = master, store, clock
        self._version, self._due_s = 0, 0.0

    def turned(self, *, last: bool = False) -> None:
        """Writes what is new, at most each KEEP_S. A store that is away is tried again then."""
        now_s = self.clock.monotonic_s()
        if (now_s < self._due_s and not last) or self.master.log.version == self._version:
            return
        self._due_s, version = now_s + KEEP_S, self.master.log.version
        try:
            self.store.put(LEASES, json.dumps(self.master.kept()).encode())
            self._version = version
        except UnavailableError as error:
            log.debug("leases can't be kept now: %s", error)
