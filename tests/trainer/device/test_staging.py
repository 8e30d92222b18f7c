"""The ring of pinned buffers for copies to the GPU: no buffer is filled while a copy may read it, and no
computation starts before its copy is complete."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from roostream.models.inputs import Inputs, build_inputs, change_tensors
from roostream.wire.lookup import build_lookup
from tests.models.model_cases import make_batch, make_rows, make_schema
from tests.trainer import samples
from tests.trainer.loops import Built, build
from tests.trainer.pipelines import pipelined
from trainer.device.staging import SLOTS, CopyStream, Staging, open_staging

SCHEMA = make_schema("everything")
N24 = samples.records(list(range(1, 25)))


@dataclasses.dataclass(eq=False)
class DelayedCopy:
    """A copy that happens only when something waits for it. Code that does not wait reads wrong bytes."""

    stream: DelayedCopyStream
    number: int
    host_N: Tensor
    device_N: Tensor
    done: bool = False

    def wait_read(self) -> None:
        self.stream.log.append(f"read {self.number}")
        self.stream.complete_copies(self.number)

    def wait_on_compute_stream(self) -> None:
        self.stream.log.append(f"first {self.number}")
        self.stream.complete_copies(self.number)


class DelayedCopyStream:
    """A fake copy stream that delays each copy as long as possible. Copies happen in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copies: list[DelayedCopy] = []
        self.full = False

    def pinned(self, num_bytes: int) -> Tensor:
        if self.full:
            raise torch.OutOfMemoryError("no more can be pinned")
        self.log.append(f"pinned {num_bytes}")
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def copy(self, host_N: Tensor) -> DelayedCopy:
        number = len(self.copies)
        self.log.append(f"copy {number}")
        self.copies.append(DelayedCopy(self, number, host_N, torch.full_like(host_N, 0xFF)))
        return self.copies[-1]

    def complete_copies(self, number: int) -> None:
        for copy in self.copies[: number + 1]:
            if not copy.done:
                copy.device_N.copy_(copy.host_N)
                copy.done = True


def inputs_of(seed: int, counts: tuple[int, ...] = (3, 0, 20, 2)) -> Inputs:
    batch = make_batch(SCHEMA, list(counts), seed=seed)
    lookup = build_lookup(batch)
    return build_inputs(batch, lookup, make_rows(SCHEMA, lookup), None, train=True)


def tensors(inputs: Inputs) -> list[Tensor]:
    tensors_found: list[Tensor] = []

    def find(x: Tensor) -> Tensor:
        tensors_found.append(x)
        return x

    change_tensors(inputs, find)
    return tensors_found


def assert_same(got: Inputs, expected: Inputs) -> None:
    pairs = list(zip(tensors(got), tensors(expected), strict=True))
    assert len(pairs) > 20
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_every_tensor_arrives_with_its_type_shape_and_bits() -> None:
    ring, inputs = Staging(DelayedCopyStream()), inputs_of(1)
    staged = ring.stage(inputs)
    staged.copied.wait_on_compute_stream()
    assert_same(staged.inputs, inputs)
    assert staged.inputs.num_candidates_R is inputs.num_candidates_R, "arrays for the host are not copied"
    assert all(rows_UD.is_leaf and rows_UD.requires_grad for rows_UD in staged.inputs.rows.values())
    assert not staged.inputs.ro_float_RG.requires_grad


def test_all_tensors_are_copied_at_once_without_overlap() -> None:
    stream = DelayedCopyStream()
    staged = Staging(stream).stage(inputs_of(1))
    assert [entry for entry in stream.log if entry.startswith("copy")] == ["copy 0"]
    spans = sorted(
        (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())
        for x in tensors(staged.inputs)
        if x.numel()
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    base = staged.copied.device_N.data_ptr()
    assert all((start - base) % 256 == 0 for start, _ in spans)


def test_padding_indices_are_part_of_the_copy() -> None:
    staged = Staging(DelayedCopyStream()).stage(inputs_of(1))
    base, size = staged.copied.device_N.data_ptr(), staged.copied.device_N.numel()
    slots, sequences = staged.inputs.groups.slots, staged.inputs.sequences.values()
    assert slots is not None and all(sequence.padding is not None for sequence in sequences)
    tensors_found = [slots.slot_B, slots.candidate_S, *(group.mask_GK for group in slots.groups)]
    tensors_found += [x for s in sequences if s.padding for x in (s.padding.entry_RN, s.padding.mask_RN)]
    paddings = [x for x in tensors_found if x is not None]
    assert len(paddings) > 3 and all(base <= x.data_ptr() < base + size for x in paddings)


def test_a_slot_is_reused_only_after_its_copy() -> None:
    stream = DelayedCopyStream()
    ring = Staging(stream)
    inputs_list = [inputs_of(seed) for seed in range(5)]
    staged = [ring.stage(inputs) for inputs in inputs_list]
    assert [e for e in stream.log if not e.startswith("pinned")] == [
        "copy 0", "copy 1", "read 0", "copy 2", "read 1", "copy 3", "read 2", "copy 4",
    ]  # fmt: skip
    for copied, expected in zip(staged, inputs_list, strict=True):
        copied.copied.wait_on_compute_stream()
        assert_same(copied.inputs, expected)


def test_inputs_may_change_during_the_copy() -> None:
    ring, inputs, unchanged = Staging(DelayedCopyStream()), inputs_of(1), inputs_of(1)
    staged = ring.stage(inputs)
    inputs.nro_float_BG.fill_(7)
    staged.copied.wait_on_compute_stream()
    assert_same(staged.inputs, unchanged)


def test_the_ring_grows_to_the_largest_inputs() -> None:
    stream = DelayedCopyStream()
    ring = Staging(stream)
    initial_bytes = ring.num_bytes
    large = inputs_of(1, counts=(4000,))
    for seed in range(3):
        ring.stage(inputs_of(seed))
    assert ring.num_bytes == initial_bytes == SLOTS << 16
    for _ in range(6):
        ring.stage(large)
    grown = ring.num_bytes
    assert grown > initial_bytes and len([e for e in stream.log if e.startswith("pinned")]) == 2 * SLOTS
    ring.stage(inputs_of(9))
    assert ring.num_bytes == grown


def test_out_of_memory_leaves_the_ring_unchanged() -> None:
    stream = DelayedCopyStream()
    ring = Staging(stream)
    first = ring.stage(inputs_of(1))
    stream.full = True
    with pytest.raises(torch.OutOfMemoryError):
        ring.stage(inputs_of(2, counts=(4000,)))
    later = [ring.stage(inputs_of(seed)) for seed in (3, 4)]
    for staged, seed in zip([first, *later], (1, 3, 4), strict=True):
        staged.copied.wait_on_compute_stream()
        assert_same(staged.inputs, inputs_of(seed))


def test_a_cpu_has_no_ring() -> None:
    assert open_staging("cpu") is None and build(N24).loop.staging is None


def weights(built: Built) -> dict[str, np.ndarray]:
    return built.loop.snapshot().shared


def test_staging_does_not_change_training() -> None:
    built, plain = build(N24), build(N24).train_all()
    stream = DelayedCopyStream()
    built.loop.staging = Staging(stream)
    built.train_all()
    assert all(np.array_equal(weights(built)[name], bits) for name, bits in weights(plain).items())
    firsts = [entry for entry in stream.log if entry.startswith("first")]
    assert len(stream.copies) == len(firsts) == 6, "each copy is waited for once, before its first use"


def test_prefetched_rows_are_staged() -> None:
    with pipelined(N24, staleness=1) as piped:
        stream = DelayedCopyStream()
        piped.built.loop.staging = Staging(stream)
        piped.built.train_all()
        assert {f"first {copy.number}" for copy in stream.copies if copy.done} <= set(stream.log)
        assert len(stream.copies) >= 6 and np.isfinite(weights(piped.built)["optimizer.step"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_copies_during_computation_are_correct_on_a_device() -> None:
    ring = open_staging("cuda")
    assert ring is not None and isinstance(ring.copy_stream, CopyStream)
    busy = torch.randn(2048, 2048, device="cuda")
    inputs_list, staged = [inputs_of(seed) for seed in range(8)], []
    for inputs in inputs_list:
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        staged.append(ring.stage(inputs))
    for copied, expected in zip(staged, inputs_list, strict=True):
        copied.copied.wait_on_compute_stream()
        assert all(x.device.type == "cuda" for x in tensors(copied.inputs))
        assert_same(change_tensors(copied.inputs, lambda x: x.cpu()), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_memory_that_the_device_still_reads_is_not_overwritten() -> None:
    """A batch is dropped while the device is behind. Later batches must not overwrite memory that the device
    has yet to read."""
    ring = open_staging("cuda")
    assert ring is not None
    busy, sums, expected = torch.randn(2048, 2048, device="cuda"), [], []
    for seed in range(8):
        inputs = inputs_of(seed)
        expected.append(float(inputs.nro_float_BG.double().sum()))
        staged = ring.stage(inputs)
        staged.copied.wait_on_compute_stream()
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        sums.append(staged.inputs.nro_float_BG.double().sum())
        del staged
    assert torch.stack(sums).cpu().tolist() == pytest.approx(expected, rel=1e-9)
