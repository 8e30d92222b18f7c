"""How fast is a whole training step on a CUDA device?"""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject
from benchmarks.harness.machine import no_device

_OPENS = "benchmarks.train_step:on_device"


def _row(kind: str, requests: int, history: int, others: Mapping[str, Mapping[str, Any]]) -> Row:
    """`others`: subjects beside float32, by their names, with their settings."""

    def subject(name: str, settings: Mapping[str, Any], role: Role = "stage") -> Subject:
        return Subject(name, _OPENS, (kind, requests, history, {"device": "cuda", **settings}), role)

    return Row(
        name=f"{kind}: {requests} requests as EB-NeRD's, histories of {history}",
        unit="requests",
        subjects=(
            subject("float32", {}, "ours"),
            *(subject(name, settings) for name, settings in others.items()),
            subject("the host, one thread", {"device": "cpu"}, "peer"),
        ),
        skipped=no_device(),
    )


_BFLOAT16, _KERNEL = {"precision": "bfloat16"}, {"attention": "triton"}

BENCHMARK = Benchmark(
    name="device-step",
    summary="How fast is a whole training step on a CUDA device?",
    rows=(
        _row(
            "ranker", 512, 50, {"bfloat16": _BFLOAT16, "bfloat16, compiled": {**_BFLOAT16, "compile": True}}
        ),
        _row(
            "hstu",
            256,
            250,
            {"bfloat16": _BFLOAT16, "Triton": _KERNEL, "Triton, bfloat16": {**_KERNEL, **_BFLOAT16}},
        ),
        _row("two_tower", 512, 50, {"bfloat16": _BFLOAT16}),
    ),
    slice_s=0.5,
    rounds=5,
    interpretation="""\
A step is everything that a worker does for a batch: read samples from memory, lookup, pull from a shard in
the same process, copy to the device, forward, backward, dense step, push, predictions. The parts run one
after another; a worker with staleness 1 pulls and copies during the step before. If the host's part
dominates, a faster device changes little; train-step measures that part.""",
)
