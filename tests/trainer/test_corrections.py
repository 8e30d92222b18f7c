"""Training on corrections, which are labels that changed after the close of a sample: what is trained,
exactly once, and which counts a correction must not change."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roostream.models.build import build_model
from roostream.models.config import RankerConfig
from roostream.models.inputs import build_inputs
from roostream.models.model import Model
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from roostream.wire.records import Record
from tests.models.model_cases import CASES, make_batch, make_rows, make_schema
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS, Built, build
from trainer.config import LoopConfig
from trainer.corrections import build_targets, record_due_ms, without_unchanged_corrections

BOTH = (*PARTITIONS, ("corrections", 0), ("corrections", 1))
N8 = samples.records(list(range(1, 9)))


def build_with_corrections(records: list[Record], **settings: Any) -> Built:
    return build(samples.with_offsets(records), partitions=BOTH, **{"corrections": "on", **settings})


def unclicked(number: int) -> int:
    """The index of a candidate of this sample whose label is 0."""
    return sample_labels(number).index(0.0)


def sample_labels(number: int) -> list[float]:
    return [float(x) for x in samples.pb.Sample.FromString(samples.sample(number)[2:]).labels]


def state_of(built: Built) -> dict[str, np.ndarray]:
    rows = {f"{table}/{id_}": row.value_D.copy() for (table, id_), row in built.shard.rows.items()}
    return {**{k: v.detach().numpy().copy() for k, v in built.loop.model.state_dict().items()}, **rows}


# Gradients


def as_correction(batch: Batch, before_BT: np.ndarray) -> Batch:
    return dataclasses.replace(
        batch, label_before_BT=before_BT, correction_R=np.ones(batch.num_requests, np.bool_)
    )


def gradients(model: Model, batch: Batch, config: LoopConfig) -> list[Tensor]:
    """The gradients of dense parameters and rows, in float64."""
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, make_rows(batch.schema, lookup))
    doubles = {
        f.name: value.double()
        for f in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, f.name), Tensor) and value.dtype == torch.float32
    }
    rows = {stack: rows_UD.double().requires_grad_() for stack, rows_UD in inputs.rows.items()}
    bags = tuple(
        dataclasses.replace(bag, weight_L=None if bag.weight_L is None else bag.weight_L.double())
        for bag in inputs.bags
    )
    inputs = dataclasses.replace(inputs, **doubles, rows=rows, bags=bags)
    model.zero_grad()
    targets = build_targets(batch, config)
    model.loss(inputs, model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    # "curvature" parameters are step sizes, which do not follow the loss.
    parameters = [p for name, p in model.named_parameters() if not name.endswith("curvature")]
    leaves = [*(p.grad for p in parameters), *(r.grad for r in rows.values())]
    return [g.clone() for g in leaves if g is not None]


def test_gradients_of_sample_and_correction_add_up_to_those_of_the_corrected_sample() -> None:
    """The model uses ranks and attention within the list. A correction holds the whole list, so it has the
    same features as its sample."""
    schema = make_schema("everything")
    model = build_model(schema, RankerConfig(width=8, deep_layers=(8,), task_layers=(4,)), seed=1).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(
                0.1
                * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) + i).view(parameter.shape)
            )
    after, config = make_batch(schema, [4, 1, 6], seed=3), LoopConfig(corrections="on")
    before_BT = np.where(
        np.arange(after.label_BT.size).reshape(after.label_BT.shape) % 3 == 0, 0, after.label_BT
    )
    before_BT = before_BT.astype(np.float32)
    assert (before_BT != after.label_BT).any()
    sample = gradients(model, dataclasses.replace(after, label_BT=before_BT), config)
    correction = gradients(model, as_correction(after, before_BT), config)
    expected = gradients(model, after, config)
    assert len(sample) == len(expected) > 20
    for s, c, e in zip(sample, correction, expected, strict=True):
        torch.testing.assert_close(s + c, e, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("objective", "kept"), [("event", 0), ("amount", 1)])
def test_a_changed_value_of_a_value_label_is_a_correction(objective: str, kept: int) -> None:
    label = {"name": "read_s", "action": "read", "fold": "sum", "objective": objective, "scale": 600.0}
    schema = schema_from_dict({**CASES["everything"], "label": [label]})
    batch = make_batch(schema, [2])
    batch = dataclasses.replace(
        batch, label_BT=np.full_like(batch.label_BT, 30.0), weight_BT=np.ones_like(batch.weight_BT)
    )
    for before_BT, expected in ((batch.label_BT / 3, kept), (batch.label_BT, 0)):
        correction = as_correction(batch, before_BT)
        left = without_unchanged_corrections(correction, LoopConfig(corrections="on"))
        assert left.num_requests == expected


# The training loop


def test_a_correction_changes_weights_and_rows_but_is_not_counted_as_a_request() -> None:
    plain = build(N8).train_all()
    built = build_with_corrections([*N8, samples.correction(3, unclicked(3))]).train_all()
    assert (built.loop.counts.requests, built.loop.counts.corrections) == (8, 1)
    assert [p.sample_id for p in built.predicted] == [p.sample_id for p in plain.predicted]
    assert built.loop.partitions.num_requests == 8 and built.loop.report()["requests"] == 8
    assert built.pushes()[3] == 2 and built.pushes()[4] == 1
    assert built.loop.watermark_ms == plain.loop.watermark_ms, "a correction must not move the watermark"
    assert any((state_of(plain)[k] != v).any() for k, v in state_of(built).items())


def test_corrections_of_one_sample_are_all_trained_and_each_only_once() -> None:
    first, second = (
        samples.correction(3, 0, before=0.0, event=1),
        samples.correction(3, 1, before=0.0, event=2),
    )
    built = build_with_corrections([*N8, first, second, first, second]).train_all()
    assert built.loop.counts.corrections == 2 and built.loop.counts.duplicates == 2


def test_a_correction_may_come_before_its_sample() -> None:
    correction = samples.correction(8, unclicked(8))._replace(timestamp_ms=samples.T0)
    built = build_with_corrections([*N8, correction], batch_requests=1).train_all()
    assert built.loop.counts.corrections == 1 and built.pushes()[8] == 2
    assert built.predicted[0].sample_id == 1 and len(built.predicted) == 8


def test_a_correction_without_a_change_is_skipped() -> None:
    built = build_with_corrections([*N8, samples.correction(3, 0, before=1.0, after=1.0)]).train_all()
    assert built.loop.counts.corrections == 0 and built.pushes()[3] == 1
    assert built.loop.partitions.progress["corrections", 1] == 1


@pytest.mark.parametrize(("before", "after", "trained"), [(1.0, 0.0, 1), (0.0, 1.0, 0), (2.0, 1.0, 0)])
def test_downgrades_trains_only_corrections_to_negative(before: float, after: float, trained: int) -> None:
    built = build_with_corrections(
        [*N8, samples.correction(3, 0, before=before, after=after)], corrections="downgrades"
    ).train_all()
    assert built.loop.counts.corrections == trained


def test_downgrades_ignores_the_upgraded_labels_of_a_correction() -> None:
    batch = make_batch(make_schema("floats only"), [2])
    before_BT = np.array([[1, 0], [0, 1]], np.float32)
    batch = dataclasses.replace(as_correction(batch, before_BT), label_BT=1 - before_BT)
    targets = build_targets(batch, LoopConfig(corrections="downgrades"))
    assert targets.before_BT is not None and targets.before_BT.tolist() == [[1, 1], [1, 1]], (
        "the label before an upgrade is set to the current one, so it changes nothing"
    )


def test_corrections_of_requests_that_are_only_scored_are_not_trained() -> None:
    built = build_with_corrections(
        [*N8, samples.correction(3, unclicked(3))], freeze_at_ms=samples.T0 + 3_000
    ).train_all()
    assert built.loop.counts.corrections == 0 and built.loop.counts.frozen == 6


def test_a_correction_is_due_with_its_engagement() -> None:
    decoder = Decoder(samples.schema(), {}.get)
    batch, _ = decoder.decode([N8[2], samples.correction(3, unclicked(3))], corrections=True)
    assert record_due_ms(batch).tolist() == [samples.T0 + 3_500, samples.T0 + 13_500]


def test_a_restore_at_any_step_loses_and_repeats_nothing() -> None:
    """A run that is restored from the snapshot of any step ends with the weights and rows of an undisturbed
    run, bit for bit."""
    corrections = [samples.correction(n, unclicked(n), event=n) for n in (1, 2, 5, 6)]
    log = samples.with_offsets([*N8, *corrections, *corrections[:2]])
    settings = {"partitions": BOTH, "corrections": "on", "batch_requests": 3, "max_batch_wait_ms": 0}
    expected = build(log, **settings).train_all()
    for steps in range(expected.loop.num_steps + 1):
        built = build(log, **settings)
        for _ in range(steps):
            built.loop.step()
        snapshot, rows = built.loop.snapshot(), {k: v.copy() for k, v in built.shard.rows.items()}
        built.loop.step()
        built.shard.rows.clear()
        built.shard.rows.update(rows)
        built.loop.restore(snapshot)
        built.train_all()
        assert built.loop.partitions.progress == expected.loop.partitions.progress
        for name, value in state_of(expected).items():
            np.testing.assert_array_equal(state_of(built)[name], value, err_msg=f"{name} after {steps} steps")


def test_corrections_continue_after_being_off() -> None:
    log = [*N8, *(samples.correction(n, unclicked(n), event=n) for n in (3, 5))]
    first = build_with_corrections(log).train_all()
    off = build(samples.with_offsets(log))
    off.loop.restore(first.loop.snapshot())
    assert off.loop.snapshot().progress == first.loop.partitions.progress, (
        "a run without corrections must keep their offsets"
    )
    again = build_with_corrections([*log, samples.correction(7, unclicked(7))])
    again.loop.restore(off.loop.snapshot())
    again.train_all()
    assert again.loop.counts.corrections == 1 and list(again.pushes()) == [7]


def test_corrections_start_at_the_beginning_when_first_enabled() -> None:
    before = build(N8).train_all()
    built = build_with_corrections([*N8, samples.correction(3, unclicked(3))])
    built.loop.restore(before.loop.snapshot())
    built.train_all()
    assert built.loop.counts.corrections == 1 and not built.predicted


def test_the_known_share_of_labels_follows_from_the_join_window() -> None:
    batch = make_batch(make_schema("floats only"), [1, 1])
    batch = dataclasses.replace(batch, close_ms_R=batch.time_ms_R + np.array([0, 60_000]))
    targets = build_targets(batch, LoopConfig(loss="es_dfm", label_delay_ms=60_000))
    assert targets.known_BT is not None
    assert targets.known_BT[:, 0].tolist() == pytest.approx([0.0, 1 - np.exp(-1)])
    assert build_targets(batch, LoopConfig(loss="fnw")).known_BT is None
