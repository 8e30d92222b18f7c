"""Decides which training errors a restore may fix, and saves the failing batch with a diagnosis of its
non-finite numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from roostream.errors import FencedError, RoostreamError, UnavailableError, describe_error
from roostream.schema.registry import to_toml
from trainer import corrections
from trainer.chunks import Chunk, build_part
from trainer.dead_letter_quarantine import NotFiniteError
from trainer.device.numerics import forward_logits
from trainer.loop import TrainLoop
from trainer.saved_batch import SavedBatch, fitting

log = logging.getLogger("roostream.worker")

MAX_RELAPSES = 3
MAX_FINDINGS = 40


class FailurePolicy:
    """A NotFiniteError after each of MAX_RELAPSES restores of the same manifest is permanent: the same
    batches and weights come again. The loop's thread only, except `saved`."""

    def __init__(self, loop: TrainLoop, worker: int) -> None:
        self.loop, self.worker = loop, worker
        self.saved = loop.saved.newest() if loop.saved else ""  # path of the newest saved batch
        self._incarnation, self._manifest, self._checksum = 0, "", ""
        self._num_failures = 0

    def restored(self, incarnation: int, manifest: str, checksum: str) -> None:
        """Everyone is being restored to `manifest` ("" = the beginning). A different manifest counts as
        progress."""
        if manifest != self._manifest:
            self._num_failures = 0
        self._incarnation, self._manifest, self._checksum = incarnation, manifest, checksum

    def permanent_reason(self, error: RoostreamError) -> str:
        """Why no restore can fix this error; "" if one may."""
        if not isinstance(error, NotFiniteError):
            return ""
        self._num_failures += 1
        if self._num_failures < MAX_RELAPSES:
            return ""
        restored_to = self._manifest or "the beginning"
        times = f"this happened {self._num_failures} times after a restore to {restored_to}"
        reason = f"{describe_error(error)}; {times}"
        path = self.save(describe_error(error), diagnose=True)
        return f"{reason}; `roostream inspect batch {path}` shows the batch" if path else reason

    def save(self, reason: str, *, diagnose: bool = False) -> str:
        """Save the current batch. Returns its path; "" if there is no batch or it cannot be written."""
        chunk, loop = self.loop.quarantine.current, self.loop
        if chunk is None or loop.saved is None:
            return ""
        records = fitting(chunk.records)
        batch = SavedBatch(
            reason=reason,
            findings=find_non_finite(loop, chunk) if diagnose else (),
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
            log.warning("the batch at which training failed could not be saved: %s", error)
            return ""
        log.error("training failed at a batch; see it with `roostream inspect batch %s`", self.saved)
        return self.saved


def find_non_finite(loop: TrainLoop, chunk: Chunk) -> tuple[str, ...]:
    """Describe which numbers are not finite: weights, rows, scores by task, gradients. Pulls the chunk's rows
    and runs one forward and backward pass. Weights stay unchanged but gradients do not, so the loop must be
    restored before it trains again. Never raises, because the state it inspects is corrupt."""
    found: list[str] = []
    try:
        found.extend(islice(_non_finite_tensors(loop, chunk), MAX_FINDINGS))
    except Exception as error:
        log.exception("the search for non-finite numbers failed")
        found.append(f"the search stopped here: {error!r:.300}")
    return tuple(found)


def _non_finite_tensors(loop: TrainLoop, chunk: Chunk) -> Iterator[str]:
    yield from _count_non_finite("dense weight", loop.model.named_parameters())
    if not chunk.batch.num_requests:
        return
    try:
        pulled = loop.pull_part(build_part(chunk.batch, trains=True))
    except (UnavailableError, FencedError) as error:
        yield f"the rows of the batch could not be pulled: {error}"
        return
    yield from _count_non_finite("rows of stack", pulled.ready().rows.items())
    logits_BT = forward_logits(loop.model, pulled.inputs, loop.config)
    yield from _count_non_finite("scores of task", zip(loop.schema.tasks, logits_BT.detach().T, strict=True))
    loop.optimizer.zero_grad()
    loss = loop.model.loss(pulled.inputs, logits_BT, corrections.build_targets(chunk.batch, loop.config))
    if not bool(torch.isfinite(loss)):
        yield "the loss is not finite"
    loss.backward()  # type: ignore[no-untyped-call]
    yield from _count_non_finite(
        "gradient of dense weight",
        ((n, p.grad) for n, p in loop.model.named_parameters() if p.grad is not None),
    )
    yield from _count_non_finite(
        "gradient of rows of stack",
        ((n, r.grad) for n, r in pulled.inputs.rows.items() if r.grad is not None),
    )


def _count_non_finite(what: str, named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    for name, tensor in named:
        count = int((~torch.isfinite(tensor.detach())).sum())
        if count:
            yield f"{what} {name}: {count:,} of {tensor.numel():,} numbers are not finite"
