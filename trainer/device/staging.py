"""A batch's inputs on their way to a device: packed into one pinned buffer, copied at once, beside what the device computes.

    preparing thread   pack i+1 into slot 1 ─┐         wait: slot 0 is read? pack i+2 into slot 0 ─┐
    copy stream        ── copy i ── event ───┴─ copy i+1 ── event ─────────────────────────────────┴─ copy i+2
    compute stream     wait(event i) ── forward i, backward i ── wait(event i+1) ── forward i+1 …

A slot is filled again when its last copy has read it: no device memory is shared with it, so it needn't wait for the step. The
compute stream waits for a copy where its batch's forward begins; the host waits for nothing there. On a CPU none of this is made.

Letters: N bytes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from roostream.models.inputs import Inputs, change_tensors

SLOTS = 2  # one is filled while the other is read
_MIN_BYTES = 1 << 16
_ALIGNED = 256  # bytes: as the device's own allocator places a tensor


class DeviceCopy(Protocol):
    """A copy that has begun."""

    @property
    def device_N(self) -> Tensor:
        """uint8, on the device; nobody may look at it but behind `comes_first`."""

    def wait_read(self) -> None:
        """The calling thread waits until the pinned buffer has been read."""

    def wait_on_compute_stream(self) -> None:
        """What the calling thread computes on the device from now on comes behind the copy; the thread waits for nothing. The
        memory is not used again before all of that is done."""


class CopyStream(Protocol):
    """What the ring needs of a device."""

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the host that the device can read by itself."""

    def copy(self, host_N: Tensor) -> DeviceCopy:
        """Begin to copy `host_N` (pinned), behind the copies that began before, beside what is computed. Any thread."""


@dataclasses.dataclass(eq=False)
class _Pinned:
    buffer_N: Tensor
    reader: DeviceCopy | None = None  # of what it was filled with last


class Staged(NamedTuple):
    inputs: Inputs
    copied: DeviceCopy


class Staging:
    """The ring. Any thread; memory: `SLOTS` pinned buffers, each of the next power of two of the largest inputs that it held."""

    def __init__(self, lane: CopyStream) -> None:
        self.lane = lane
        self._slots = [_Pinned(lane.pinned(_MIN_BYTES)) for _ in range(SLOTS)]
        self._num_staged = 0
        self._lock = threading.Lock()

    def stage(self, inputs: Inputs) -> Staged:
        """What is on the host goes to the device; what is elsewhere stays there. The caller may change what it gave when this
        returns.

        Raises:
            torch.OutOfMemoryError, RuntimeError: there is no room, pinned or on the device. The ring is as before.
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
        """Pinned."""
        return sum(len(slot.buffer_N) for slot in self._slots)

    def _copied(self, tensors: Sequence[Tensor]) -> DeviceCopy:
        slot = self._slots[self._num_staged % SLOTS]
        if slot.reader is not None:
            slot.reader.wait_read()
            slot.reader = None
        num_bytes = sum(_room(x) for x in tensors)
        if num_bytes > len(slot.buffer_N):
            slot.buffer_N = self.lane.pinned(1 << (num_bytes - 1).bit_length())
        for x, place in zip(tensors, _views(slot.buffer_N, tensors), strict=True):
            place.copy_(x)
        slot.reader = self.lane.copy(slot.buffer_N[:num_bytes])
        self._num_staged += 1
        return slot.reader


def _room(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED


def _views(bytes_N: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes as tensors behind each other, of these types and shapes."""
    at = 0
    for x in like:
        yield bytes_N[at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        at += _room(x)


class _CudaCopy(NamedTuple):
    device_N: Tensor
    done: torch.cuda.Event

    def wait_read(self) -> None:
        self.done.synchronize()

    def wait_on_compute_stream(self) -> None:
        stream = torch.cuda.current_stream(self.device_N.device)
        stream.wait_event(self.done)
        self.device_N.record_stream(stream)


class CudaCopyStream:
    """See `CopyLane`: a stream of its own. Device memory is that stream's; `record_stream` keeps it from being copied to again
    while another one may still look at it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, host_N: Tensor) -> DeviceCopy:
        with torch.cuda.stream(self.stream):
            device_N = torch.empty(len(host_N), dtype=torch.uint8, device=self.stream.device)
            device_N.copy_(host_N, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # whoever waits sleeps
            done.record(self.stream)
        return _CudaCopy(device_N, done)


def open_staging(device: str) -> Staging | None:
    """None on a CPU: inputs are there."""
    return Staging(CudaCopyStream(device)) if device.startswith("cuda") else None
