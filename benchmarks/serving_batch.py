"""What does it save to compute the request side once for all candidates?

Scores the candidates of a request as one request, and as one request per candidate.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.common import samples as data
from benchmarks.common.http_interface import NOW_MS
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.serving_request import distinct, fill
from param_server.replica.replica import Replica
from roostream.models.config import RankerConfig
from roostream.wire.block import nro_columns, ro_columns
from roostream.wire.lookup import build_lookup
from serving.request_batch import RequestColumns, build_batch
from serving.scorer import build_version, first_version

HISTORY = 50
_TOLERANCE = 1e-5


@contextlib.contextmanager
def once(candidates: int) -> Iterator[Work]:
    case = Case(candidates)
    yield Work(case.once)


@contextlib.contextmanager
def repeated(candidates: int) -> Iterator[Work]:
    """One request for each candidate, in one pass. Raises AssertionError if the logits differ."""
    case = Case(candidates)
    np.testing.assert_allclose(case.repeated(), case.once(), rtol=0, atol=_TOLERANCE)
    yield Work(case.repeated)


class Case:
    def __init__(self, candidates: int) -> None:
        torch.set_num_threads(1)
        schema = data.demo_schema()
        self.schema = dataclasses.replace(
            schema, transforms=tuple(t for t in schema.transforms if t.op == "log1p")
        )
        model = RankerConfig(list_layers=0)
        first = first_version(self.schema, model, 0)
        weights = {
            name: x + 0.02 * torch.sin(torch.arange(x.numel())).view(x.shape)
            for name, x in first.model.state_dict().items()
        }
        self.version = build_version("1-1", self.schema, model, 0, weights)
        self.replica = Replica(self.schema, 0)
        rng = np.random.default_rng(1)
        items_n = distinct(data.zipf_ids(rng, 100 * candidates))[:candidates]
        ro = ro_columns(self.schema, data.ro_values(self.schema, rng, HISTORY))
        columns = data.nro_columns(self.schema, rng, items_n)
        whole = nro_columns(self.schema, columns, candidates)
        self.whole = [RequestColumns(ro, whole, items_n, NOW_MS)]
        self.single = [
            RequestColumns(
                ro,
                nro_columns(self.schema, {name: x[i : i + 1] for name, x in columns.items()}, 1),
                items_n[[i]],
                NOW_MS,
            )
            for i in range(candidates)
        ]
        fill(self.replica, self.schema, build_lookup(build_batch(self.schema, self.whole)))

    def once(self) -> np.ndarray:
        return self._scored(self.whole)

    def repeated(self) -> np.ndarray:
        return self._scored(self.single)

    def _scored(self, requests: list[RequestColumns]) -> np.ndarray:
        score: Callable[..., list[np.ndarray]] = self.version.score_all
        return np.concatenate(score(self.replica, requests))


_HERE = "benchmarks.serving_batch"


def _request(candidates: int) -> Row:
    return Row(
        name=f"a request of {candidates} candidates",
        unit="requests",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("request's side once", f"{_HERE}:once", (candidates,)),
            Subject("repeated for each candidate", f"{_HERE}:repeated", (candidates,), "peer"),
        ),
    )


BENCHMARK = Benchmark(
    name="serving-batch",
    summary="What does it save to compute a request's side once for all its candidates?",
    rows=tuple(_request(n) for n in (10, 50, 200, 1000)),
    interpretation="""\
The figure covers a request's values to its logits: batch, lookup, rows, forward pass. "Repeated" gives the
same code each candidate as a request with a copy of the request's features, all in one pass. The logits are
compared to 1e-5 before the timing, so the model has no attention over the list and the schema no transforms
over it. The demo schema has histories of 50; HTTP, Redis, JSON and encoding are left out.""",
)
