"""Staging of inputs for a device: packed into one pinned buffer and copied at once, while the device
computes.

    preparing thread   pack i+1 into slot 1 ─┐         wait: slot 0 is read? pack i+2 into slot 0 ─┐
    copy stream        ── copy i ── event ───┴─ copy i+1 ── event ─────────────────────────────────┴─ copy i+2
    compute stream     wait(event i) ── forward i, backward i ── wait(event i+1) ── forward i+1 …

A slot is reused as soon as its last copy has read it, without waiting for the step. The compute stream waits
for a copy where the batch's forward pass begins; the host does not wait there. Not used on a CPU.

Letters: N bytes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from roostream.models.inputs import Inputs, change_tensors

SLOTS = 2  # one is filled while the other is read
_MIN_BYTES = 1 << 16
_ALIGNED = 256  # bytes: as the device's own allocator places a tensor


class DeviceCopy(NamedTuple):
    """A copy in progress."""

    device_N: Tensor  # uint8, on the device; use it only after `wait_on_compute_stream`
    done: torch.cuda.Event

    def wait_read(self) -> None:
        """Block until the pinned buffer has been read."""
        self.done.synchronize()

    def wait_on_compute_stream(self) -> None:
        """Order what this thread computes on the device after the copy, without blocking. The memory is not
        reused before that work is done."""
        stream = torch.cuda.current_stream(self.device_N.device)
        stream.wait_event(self.done)
        self.device_N.record_stream(stream)


class CopyStream:
    """Copies to a CUDA device, in parallel with computation. Device memory belongs to the copy stream;
    `record_stream` keeps it until other streams are done."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, host_N: Tensor) -> DeviceCopy:
        """Start to copy `host_N` (pinned) after earlier copies. Any thread."""
        with torch.cuda.stream(self.stream):
            device_N = torch.empty(len(host_N), dtype=torch.uint8, device=self.stream.device)
            device_N.copy_(host_N, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread sleeps
            done.record(self.stream)
        return DeviceCopy(device_N, done)


@dataclasses.dataclass(eq=False)
class _Pinned:
    buffer_N: Tensor
    reader: DeviceCopy | None = None  # of what it was filled with last


class Staged(NamedTuple):
    """Inputs on the device, and the copy that brings them there."""

    inputs: Inputs
    copied: DeviceCopy


class Staging:
    """The ring of `SLOTS` pinned buffers. Any thread. Each buffer has the next power of two of the largest
    inputs it held."""

    def __init__(self, copy_stream: CopyStream) -> None:
        self.copy_stream = copy_stream
        self._slots = [_Pinned(copy_stream.pinned(_MIN_BYTES)) for _ in range(SLOTS)]
        self._num_staged = 0
        self._lock = threading.Lock()

    def stage(self, inputs: Inputs) -> Staged:
        """Copy what is on the host to the device. The caller may change its inputs afterwards.

        Raises:
            torch.OutOfMemoryError, RuntimeError: no pinned or device memory. The ring is unchanged.
        """
        on_host: list[Tensor] = []

        def find(x: Tensor) -> Tensor:
            on_host.extend([x] if x.device.type == "cpu" else [])
            return x

        change_tensors(inputs, find)
        with self._lock:
            copied = self._copied(on_host)
        views = _views(copied.device_N, on_host)
        return Staged(change_tensors(inputs, lambda x: next(views) if x.device.type == "cpu" else x), copied)

    @property
    def num_bytes(self) -> int:
        """Pinned memory."""
        return sum(len(slot.buffer_N) for slot in self._slots)

    def _copied(self, tensors: Sequence[Tensor]) -> DeviceCopy:
        slot = self._slots[self._num_staged % SLOTS]
        if slot.reader is not None:
            slot.reader.wait_read()
            slot.reader = None
        num_bytes = sum(_aligned_bytes(x) for x in tensors)
        if num_bytes > len(slot.buffer_N):
            slot.buffer_N = self.copy_stream.pinned(1 << (num_bytes - 1).bit_length())
        for x, place in zip(tensors, _views(slot.buffer_N, tensors), strict=True):
            place.copy_(x)
        slot.reader = self.copy_stream.copy(slot.buffer_N[:num_bytes])
        self._num_staged += 1
        return slot.reader


def _aligned_bytes(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED


def _views(bytes_N: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of the bytes with the types and shapes of `like`, one after the other."""
    at = 0
    for x in like:
        yield bytes_N[at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        at += _aligned_bytes(x)


def open_staging(device: str) -> Staging | None:
    """None on a CPU."""
    return Staging(CopyStream(device)) if device.startswith("cuda") else None
