"""The streaming protocol of MLPerf's DLRMv4 benchmark: train on a window of event time, then evaluate on the
next one (mlcommons/training, recommendation_v4, mode `streaming-train-eval`).

    samples ──► windows of request time:   T        T + 1               T + 2
                                           train    evaluate, train     evaluate, train

A window is evaluated with the weights and rows that were trained on the windows before it; then it is trained
as without windows, each request scored before its batch. The online features of a request stay those of its
own time, so they contain earlier engagements of the same window, as in that benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.runtime.kafka.topics import SAMPLES
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.monitoring.progressive_metrics import (
    METRIC_NAMES,
    Metrics,
    Report,
    ScoredBatch,
    sampling_weights,
)

_MAX_SCORES = 1 << 20
_AT_ONCE = 256


class Window(NamedTuple):
    """The samples of one window, in the order of their close."""

    number: int  # from 0, the window of the first request
    begin_ms: int
    end_ms: int
    records: list[Record]


class SampleWindows:
    """Groups samples by the time of their request: window T is [first + T·length, first + (T + 1)·length),
    where `first` is the time of the first request. Windows without samples are left out.

    Call `add` with samples in the order of their close. A window is complete when a sample closes one join
    window after its end. A sample that closes later still belongs to the oldest window that is not complete.
    Memory: the samples of the windows that are not complete.
    """

    def __init__(self, length_ms: int, join_window_ms: int) -> None:
        self._length_ms, self._join_window_ms = length_ms, join_window_ms
        self._first_ms: int | None = None
        self._oldest = 0
        self._waiting: dict[int, list[Record]] = {}

    def add(self, record: Record) -> list[Window]:
        """Add a sample or a correction of one; returns the windows that are complete without it."""
        time_ms = pb.Sample.FromString(record.value[2:]).header.time_ms
        if self._first_ms is None:
            self._first_ms = time_ms
        closed_before_ms = record.timestamp_ms - self._join_window_ms
        complete = self._take(max(self._oldest, (closed_before_ms - self._first_ms) // self._length_ms))
        number = max(self._oldest, (time_ms - self._first_ms) // self._length_ms)
        self._waiting.setdefault(number, []).append(record)
        return complete

    def take_remaining(self) -> list[Window]:
        """Remove and return the windows that are left at the end of the input."""
        return self._take(max(self._waiting, default=self._oldest) + 1)

    def _take(self, end: int) -> list[Window]:
        """Remove and return the windows before number `end`."""
        self._oldest = end
        first_ms, length_ms = self._first_ms or 0, self._length_ms
        return [
            Window(n, first_ms + n * length_ms, first_ms + (n + 1) * length_ms, self._waiting.pop(n))
            for n in sorted(self._waiting)
            if n < end
        ]


class StreamingEvaluation:
    """The metrics of one model, by evaluated window."""

    def __init__(self, schema: Schema, decoder: Decoder, scores: Callable[[Batch], np.ndarray]) -> None:
        """`scores`: probabilities [B, T] with the current weights and rows."""
        self._schema, self._decoder, self._scores = schema, decoder, scores
        self._overall = Metrics(schema.tasks, _MAX_SCORES)
        self._windows: list[Report] = []

    def evaluate(self, window: Window, trained_requests: int) -> None:
        """Score a window with the current weights and rows, which change nothing. `trained_requests`: number
        of requests that they were trained on."""
        metrics = Metrics(self._schema.tasks, _MAX_SCORES)
        samples = [record for record in window.records if record.topic == SAMPLES]
        for start in range(0, len(samples), _AT_ONCE):
            batch, _ = self._decoder.decode(samples[start : start + _AT_ONCE])
            labels = (batch.label_BT, batch.weight_BT)
            columns = (self._scores(batch), *labels, batch.request_index_B, batch.time_ms_R)
            metrics.update(ScoredBatch(*columns, self._schema.labels, sampling_weights(batch)))
        self._overall.merge(metrics)
        about = {"window": window.number, "begin_ms": window.begin_ms, "end_ms": window.end_ms}
        self._windows.append({**about, "trained_requests": trained_requests, **metrics.report()})

    def report(self) -> Report:
        """The metrics of the windows so far. `windows`: the metrics of each evaluated window. `mean`: the
        mean of the windows' metrics, each window once. `overall`: all evaluated windows together."""
        return {"windows": self._windows, "mean": _mean(self._windows), "overall": self._overall.report()}


def _mean(windows: Sequence[Mapping[str, Any]]) -> Report:
    """The mean of each metric over the windows that have it, of the first task and of all; None = none has
    it."""
    names = list(windows[0]["tasks"]) if windows else []
    tasks = {task: _mean_metrics([window["tasks"][task] for window in windows]) for task in names}
    return {"windows": len(windows), **_mean_metrics(windows), "tasks": tasks}


def _mean_metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    found = {name: [r[name] for r in reports if r[name] is not None] for name in METRIC_NAMES}
    return {name: float(np.mean(values)) if values else None for name, values in found.items()}
