"""How one worker's training breaks: what a restore may mend, what none does, and the batch in hand as a file."""

from __future__ import annotations

import logging

from roostream.errors import RoostreamError, UnavailableError, describe_error
from roostream.schema.registry import to_toml
from trainer.dead_letter_quarantine import NotFiniteError
from trainer.loop import TrainLoop
from trainer.nonfinite_diagnosis import diagnosis
from trainer.saved_batch import SavedBatch, fitting

log = logging.getLogger("roostream.worker")

MAX_RELAPSES = 3


class FailurePolicy:
    """NotFiniteError after MAX_RELAPSES restores of the same manifest is for good: the same batches come again, and so do the
    weights. The loop's thread alone, but for `saved`."""

    def __init__(self, loop: TrainLoop, worker: int) -> None:
        self.loop, self.worker = loop, worker
        self.saved = (
            loop.saved.newest() if loop.saved else ""
        )  # path of the newest batch at which training ended
        self._incarnation, self._manifest, self._checksum = 0, "", ""
        self._num = 0

    def restored(self, incarnation: int, manifest: str, checksum: str) -> None:
        """Everyone is being restored to `manifest` ("" = the beginning). Another one than before is progress."""
        if manifest != self._manifest:
            self._num = 0
        self._incarnation, self._manifest, self._checksum = incarnation, manifest, checksum

    def broke(self, error: RoostreamError) -> str:
        """Why no restore mends it, "" = one may."""
        if not isinstance(error, NotFiniteError):
            return ""
        self._num += 1
        if self._num < MAX_RELAPSES:
            return ""
        reason = f"{describe_error(error)}; so it was {self._num} times after a restore to {self._manifest or 'the beginning'}"
        path = self.save(describe_error(error), diagnose=True)
        return f"{reason}; `roostream inspect batch {path}` shows the batch" if path else reason

    def save(self, reason: str, *, diagnose: bool = False) -> str:
        """The batch in hand, as a file; where it is, "" where there is none or it can't be written."""
        chunk, loop = self.loop.burial.in_hand, self.loop
        if chunk is None or loop.saved is None:
            return ""
        records = fitting(chunk.records)
        batch = SavedBatch(
            reason=reason,
            findings=diagnosis(loop, chunk) if diagnose else (),
            manifest=self._manifest,
            checksum=self._checksum,
            incarnation=self._incarnation,
            worker=self.worker,
            step=loop.num_steps,
            time_ms=loop.clock.now_ms(),
            schema=to_toml(loop.schema),
            left_out=len(chunk.records) - len(records),
            records=records,
        )
        try:
            self.saved = str(loop.saved.save(batch))
        except UnavailableError as error:
            log.warning("the batch at which training ended can't be saved: %s", error)
            return ""
        log.error("the batch at which training ended: roostream inspect batch %s", self.saved)
        return self.saved
