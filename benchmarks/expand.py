"""What does training on impressions cost?

A step of the training loop with a shard in the same process, on requests and with `expand = "impressions"`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, Work
from benchmarks.train_step import BATCHES, Case
from roostream.models.build import KINDS

_IMPRESSIONS, _HISTORY = 640, 50
# Without attention over the list, which an impression does not have.
_MODELS: dict[str, dict[str, Any]] = {"dlrm": {}, "dcn": {}, "ranker": {"list_layers": 0}}


@contextlib.contextmanager
def trained(kind: str, expand: str, impressions: int, candidates: int) -> Iterator[Work]:
    """`impressions`: of a batch, a multiple of `candidates`; `candidates`: of a request. Units are
    impressions."""
    schema, requests = data.demo_schema(), impressions // candidates
    records = data.sample_records(schema, requests * BATCHES, candidates=candidates, history=_HISTORY)
    model, settings = (
        KINDS[kind].config(**_MODELS[kind]),
        {"expand": expand, "batch_impressions": impressions},
    )
    with tempfile.TemporaryDirectory() as folder:
        case = Case(folder, schema, records, model, **settings)
        yield Work(case.whole, impressions)


def _price(results: Mapping[str, SubjectResult]) -> Mapping[str, float]:
    return {"impressions / requests": results["impressions"].cost_us / results["requests"].cost_us}


def _row(kind: str, candidates: int) -> Row:
    setup, size = "benchmarks.expand:trained", (_IMPRESSIONS, candidates)
    return Row(
        name=f"{kind}, {candidates} candidates a request",
        unit="impressions",
        clock="cpu",
        subjects=(
            Subject("requests", setup, (kind, "off", *size)),
            Subject("impressions", setup, (kind, "impressions", *size), "peer"),
        ),
        derives=_price,
    )


BENCHMARK = Benchmark(
    name="expand",
    summary="What does the training loop pay for impressions instead of requests?",
    rows=tuple(_row(kind, candidates) for kind in _MODELS for candidates in (5, 20)),
    slice_s=0.5,
    rounds=3,
    interpretation="""\
Both train the same 640 impressions a step, with histories of 50 entries, in one thread: decoding,
predictions, metrics, pull, dense step and push. With "impressions", requests are scored as a whole, then
expanded and trained in a batch of 640 impressions, whose rows are pulled once more.""",
)
