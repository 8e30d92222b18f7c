"""From which request on is the default model at least as good as counting?

Replays the first requests of several logs in one pass, each request scored before it is trained, and compares
the default model with the baselines of a replay on the same requests. quality_trees.py adds boosted trees.

Letters: B candidates, R requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich.console import Console

from benchmarks.common import boosted_trees, first_logs
from benchmarks.common.dataset_paths import absent
from benchmarks.common.first_logs import LOGS, samples
from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, TurnResult, WholeTurn
from benchmarks.harness.subject_process import interpreter_for
from roostream.cli.replay.local_replay import replay_in_process
from roostream.cli.replay.outcome import ReplayProgress
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import DatasetOptions
from roostream.runtime.program import Stop
from roostream.schema.schema import Schema
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from roostream.wire.transform import apply_transforms
from trainer.monitoring.verdict import METRICS, WORDS, PairedRequests, request_scores

EDGES = (0, 100, 300, 1_000, 3_000, 10_000, 30_000)
_MAX_REQUESTS = 30_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(DatasetOptions):
    default_schema: ClassVar[Path | None] = Path(first_logs.__file__)  # the replay gets the schema itself


@contextlib.contextmanager
def learned(log: str, max_requests: int, run: int, with_trees: bool = False) -> Iterator[WholeTurn]:
    """Units are requests, and their cost is that of the replay. `run` is the seed of the model, and of a
    generated log."""
    schema, records = samples(log, max_requests, run)
    config = ReplayConfig(dataset="jsonl", options=_Options(), engine="local", seed=run)

    def turn() -> TurnResult:
        started_s = time.process_time()
        with ReplayProgress(Console(file=io.StringIO()), len(records)) as progress:
            outcome = replay_in_process(config, schema, records, progress, Stop())
        seconds = time.process_time() - started_s
        figures = {}
        for metric in METRICS:
            for at in outcome.statistics.paired.between(EDGES, metric):
                best = max if metric == "request_auc" else min
                to = f"{WORDS[metric]} to {min(at.last_request, len(records))}"
                figures[f"model, {to}"] = at.model
                figures[f"best baseline, {to}"] = best(at.rules.values())
                figures[f"linear, {to}"] = at.rules["linear"]
                figures[f"difference, {to}"], figures[f"±, {to}"] = at.difference
        if with_trees:
            paired = outcome.statistics.paired.against(scored_by_trees(schema, records), "trees")
            for metric in METRICS:
                for at in paired.between(EDGES, metric):
                    to = f"{WORDS[metric]} to {min(at.last_request, len(records))}"
                    figures[f"trees, {to}"] = at.rules["trees"]
                    figures[f"difference to trees, {to}"], figures[f"± to trees, {to}"] = at.difference
        verdict = outcome.statistics.paired.verdict()
        figures |= {
            f"behind in {WORDS[c.metric]}, second half": float(c.state == "behind")
            for c in verdict.comparisons
        }
        return TurnResult(len(records), seconds, figures)

    yield WholeTurn(turn)


def scored_by_trees(schema: Schema, records: Sequence[Record]) -> PairedRequests:
    """The scores that boosted trees gave each request before they learned it. Their floats are those of
    candidate and request after the transforms, and the length of the list.

    Raises:
        PeerUnavailable: LightGBM can't be installed.
    """
    batch, _ = Decoder(schema, {schema.fingerprint: schema}.get).decode(records)
    of_request_RG, x_BG = apply_transforms(batch)
    floats = [
        x_BG,
        of_request_RG[batch.request_index_B],
        batch.num_candidates_R[batch.request_index_B][:, None],
    ]
    click_B = batch.label_BT[:, 0] > 0
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder) / "given.npz", Path(folder) / "got.npz"
        x_BF = np.concatenate(floats, axis=1).astype(np.float32)
        np.savez(given, x_BF=x_BF, click_B=click_B, num_candidates_R=batch.num_candidates_R)
        python = interpreter_for("lightgbm").python
        subprocess.run([python, boosted_trees.__file__, str(given), str(got)], check=True)
        with np.load(got) as found:
            score_B = found["probability_B"]
    requests = batch.num_requests
    paired = PairedRequests(())
    paired.add_model(
        batch.sample_id_R.view(np.uint64).tolist(),
        request_scores(score_B, click_B, batch.request_index_B, requests),
        place_R=np.arange(requests),
        time_ms_R=batch.time_ms_R,
        candidates_R=batch.num_candidates_R,
        positives_R=np.bincount(batch.request_index_B, click_B, requests),
    )
    return paired


def rows_by_log(max_requests: int, subject: str, *arguments: object) -> tuple[Row, ...]:
    """A row for each log, whose subject is `learned` with these further arguments."""
    setup = "benchmarks.quality_early:learned"
    return tuple(
        Row(
            name=f"up to {max_requests:,} requests of {name}, a seed a run",
            unit="requests",
            shows="cost",
            time="CPU time of replay and baselines",
            subjects=(Subject(subject, setup, (name, max_requests, RUN, *arguments)),),
            skipped=absent(log.folder) if log.folder else "",
        )
        for name, log in LOGS.items()
    )


BENCHMARK = Benchmark(
    name="quality-early",
    summary="From which request on is the default model at least as good as counting?",
    rows=rows_by_log(_MAX_REQUESTS, "default model"),
    slice_s=0.0,
    rounds=1,
    interpretation="""\
Each figure "to N" covers the requests from the last checkpoint (100, 300, 1,000, 3,000, 10,000, 30,000) to N,
or to the end of the log, scored before they are trained: the default model, the best baseline of that
interval (place, item, recent or linear; trainer/monitoring/baselines.py), the baseline linear alone, the mean
difference of the model to the best baseline, request by request, and half of its 95 % interval in one run.
The best baseline is chosen afterwards, so small differences in its favor are expected even of an equal model.
Higher is better for request AUC, lower for NE.
"behind" is the share of runs with this verdict on the second half. All logs have the schema that
`roostream init --from` writes. Lists of KuaiRand are ten reactions in a row of a user, those of Criteo twenty
impressions in a row. A run has its own seed of the model, and of the generated logs.""",
)
