"""What of a model isn't finite, in sentences: weights, rows, scores by task, gradients. For a batch at which training ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from roostream.errors import FencedError, UnavailableError
from trainer import corrections
from trainer.batch_source import Chunk
from trainer.device.numerics import forward_logits
from trainer.feed import part_of
from trainer.loop import TrainLoop

log = logging.getLogger("roostream.worker")

MAX_FINDINGS = 40


def diagnosis(loop: TrainLoop, chunk: Chunk) -> tuple[str, ...]:
    """As far as it can be known now: pulls the chunk's rows and goes forward and back once. Weights stay as they are, gradients
    don't: the loop must be restored before it trains again. Never raises: what it is asked about is in disorder."""
    found: list[str] = []
    try:
        found.extend(islice(_findings(loop, chunk), MAX_FINDINGS))
    except Exception as error:
        log.exception("what is not finite can't be found out")
        found.append(f"the rest could not be found out: {error!r:.300}")
    return tuple(found)


def _findings(loop: TrainLoop, chunk: Chunk) -> Iterator[str]:
    yield from _not_finite("dense weight", loop.model.named_parameters())
    if not chunk.batch.num_requests:
        return
    try:
        pulled = loop.pull_part(part_of(chunk.batch, trains=True))
    except (UnavailableError, FencedError) as error:
        yield f"its rows could not be pulled: {error}"
        return
    yield from _not_finite("rows of stack", pulled.ready().rows.items())
    logits_BT = forward_logits(loop.model, pulled.inputs, loop.config)
    yield from _not_finite("scores of task", zip(loop.schema.tasks, logits_BT.detach().T, strict=True))
    loop.optimizer.zero_grad()
    loss = loop.model.loss(pulled.inputs, logits_BT, corrections.targets_of(chunk.batch, loop.config))
    if not bool(torch.isfinite(loss)):
        yield "the loss is not finite"
    loss.backward()  # type: ignore[no-untyped-call]
    yield from _not_finite(
        "gradient of dense weight",
        ((n, p.grad) for n, p in loop.model.named_parameters() if p.grad is not None),
    )
    yield from _not_finite(
        "gradient of rows of stack",
        ((n, r.grad) for n, r in pulled.inputs.rows.items() if r.grad is not None),
    )


def _not_finite(what: str, named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    for name, tensor in named:
        wrong = int((~torch.isfinite(tensor.detach())).sum())
        if wrong:
            yield f"{what} {name}: {wrong:,} of {tensor.numel():,} numbers are not finite"
