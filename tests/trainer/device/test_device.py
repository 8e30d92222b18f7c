"""Training on a GPU. Some tests need no device; the others run where there is one (`make gpu`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roostream.models.build import build_model
from roostream.models.inputs import Inputs, build_inputs
from roostream.models.model import Targets
from roostream.wire.batch import Batch
from roostream.wire.lookup import build_lookup
from tests.models.kind_cases import CONFIGS
from tests.models.model_cases import make_batch, make_rows, make_schema
from tests.models.model_checks import trained_model
from tests.trainer import samples
from tests.trainer.loops import Built, build
from trainer.device.numerics import forward_logits

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
PRECISIONS = ("float32", "bfloat16")
N24 = samples.records(list(range(1, 25)))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_forward_pass_reads_no_value_from_the_device(name: str) -> None:
    schema = make_schema("everything")
    model, batch = build_model(schema, CONFIGS[name], 0), make_batch(schema, [3, 0, 2])
    assert model.to("meta")(inputs_on("meta", batch)).shape == (5, len(schema.tasks))


def inputs_on(device: str, batch: Batch) -> Inputs:
    lookup = build_lookup(batch)
    rows = {stack: torch.from_numpy(r).to(device) for stack, r in make_rows(batch.schema, lookup).items()}
    return build_inputs(batch, lookup, rows, device, train=True)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_a_device_agrees_with_the_host_without_synchronizing(
    name: str,
) -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [3, 0, 20, 2], seed=5)
    targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
    results = {}
    for device in ("cpu", "cuda"):
        model, inputs = trained_model(schema, CONFIGS[name]).to(device), inputs_on(device, batch)
        model(inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits_BT = model(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        device_targets = targets._replace(
            label_BT=targets.label_BT.to(device), weight_BT=targets.weight_BT.to(device)
        )
        model.loss(inputs, logits_BT, device_targets).backward()  # type: ignore[no-untyped-call]
        leaves = [*(p.grad for p in model.parameters()), *(rows_UD.grad for rows_UD in inputs.rows.values())]
        results[device] = [logits_BT.detach().cpu(), *(g.cpu() for g in leaves if g is not None)]
    for device_x, host_x in zip(results["cuda"], results["cpu"], strict=True):
        torch.testing.assert_close(device_x, host_x, rtol=1e-3, atol=1e-4)


def train(device: str) -> Built:
    return build(N24, device=device).train_all()


@gpu
@needs_gpu
def test_a_device_trains_as_the_host_does() -> None:
    host, device = train("cpu"), train("cuda")
    assert device.pushes() == host.pushes() and device.offsets() == host.offsets()
    device_state, host_state = device.loop.snapshot().shared, host.loop.snapshot().shared
    assert all(np.allclose(device_state[name], host_state[name], rtol=1e-3, atol=1e-4) for name in host_state)


@gpu
@needs_gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_prefetched_forward_pass_does_not_synchronize(precision: str) -> None:
    built = build(N24, device="cuda", precision=precision)
    chunk = built.loop.source.poll(4, 0.0)
    assert chunk is not None
    prepared = built.loop.pull(built.loop.claim(chunk))
    assert prepared.first is not None
    built.loop.dense_trainer.forward(prepared.first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_logits(built.loop.model, prepared.first.ready(), built.loop.config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
