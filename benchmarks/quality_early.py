"""From which request on is the default model at least as good as counting?

Replays the first requests of several logs in one pass, each request scored before it is trained, and compares
the default model with the baselines of a replay on the same requests.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import cast

from rich.console import Console

from benchmarks.common.dataset_paths import absent
from benchmarks.common.first_logs import LOGS, SCHEMA, samples
from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, TurnResult, WholeTurn
from roostream.cli.replay.local_replay import replay_in_process
from roostream.cli.replay.outcome import ReplayProgress
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import DatasetOptions
from roostream.runtime.program import Stop

EDGES = (0, 100, 300, 1_000, 3_000, 10_000, 30_000)
_MAX_REQUESTS = 3_000


@contextlib.contextmanager
def learned(log: str, max_requests: int, run: int) -> Iterator[WholeTurn]:
    """Units are requests. `run` is the seed of the model, and of a generated log."""
    schema, records = samples(log, max_requests, run)
    config = ReplayConfig(
        dataset="jsonl", options=DatasetOptions(), schema=str(SCHEMA), engine="local", seed=run
    )

    def turn() -> TurnResult:
        started_s = time.process_time()
        with ReplayProgress(Console(file=io.StringIO()), len(records)) as progress:
            outcome = replay_in_process(config, schema, records, progress, Stop())
        seconds = time.process_time() - started_s
        figures = {}
        metrics = outcome.statistics.metrics.report()["overall"]  # counts the last requests too
        baselines = outcome.statistics.baselines.report().values()
        for at in outcome.statistics.paired.between(EDGES):
            figures[f"model to {at.last_request}"] = at.model
            figures[f"best baseline to {at.last_request}"] = max(at.rules.values())
            figures[f"difference to {at.last_request}"], figures[f"± to {at.last_request}"] = at.difference
        figures["NE"] = cast(float, metrics["ne"])  # type: ignore[index]
        figures["best NE of a baseline"] = min(cast(float, each["overall"]["ne"]) for each in baselines)
        return TurnResult(len(records), seconds, figures)

    yield WholeTurn(turn)


BENCHMARK = Benchmark(
    name="quality-early",
    summary="From which request on is the default model at least as good as counting?",
    rows=tuple(
        Row(
            name=f"the first {_MAX_REQUESTS:,} requests of {name}, a seed a run",
            unit="requests",
            shows="cost",
            time="CPU time of replay and baselines",
            subjects=(
                Subject("default model", "benchmarks.quality_early:learned", (name, _MAX_REQUESTS, RUN)),
            ),
            skipped=absent(log.folder) if log.folder else "",
        )
        for name, log in LOGS.items()
    ),
    slice_s=0.0,
    rounds=1,
    interpretation="""\
Each figure "to N" covers the requests from the last checkpoint (100, 300, 1,000, 3,000) to N, scored before
they are trained: request AUC of the default model and of the best baseline of that interval (place, item,
recent or linear; trainer/monitoring/baselines.py), the mean of their difference request by request, and
half of its 95 % interval in one run. The best baseline is chosen afterwards, so small negative differences
are expected even of an equal model. NE covers all requests. EB-NeRD has its own schema and Criteo one of
its floats and ids; the other logs have `benchmarks/common/first_logs.toml`, as a new user would write it.
Lists of KuaiRand are ten reactions in a row of a user, those of Criteo twenty impressions in a row. A run
has its own seed of the model, and of the generated logs.""",
)
