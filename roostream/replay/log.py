"""A log and its settings as one stream of records: which reader, which features, which end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from roostream.errors import ConfigError
from roostream.online.counter_seed import seed
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import Clicks, Skipped, load_dataset
from roostream.replay.edge import Edge
from roostream.replay.events import Event
from roostream.replay.late import late
from roostream.replay.replay import HEARTBEAT_MS, records
from roostream.replay.survey import Survey
from roostream.schema.schema import Schema
from roostream.wire.records import Record

_OFTEN_MS = 30_000  # between heartbeats where it matters when a request closes; servers beat more often still


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """`records` once, in the order of one producer; `skipped` is whole when it has ended."""

    records: Iterator[Record]
    num_requests: int  # 0 = not known beforehand
    skipped: Callable[[], Skipped]  # events left out so far
    survey: Survey  # of what has been read


def open_log(config: ReplayConfig, schema: Schema) -> Log:
    """Checks the files' form, counts what lies before the log, and gives the stream.

    Raises:
        ConfigError, SchemaError: a file or the schema can't be used; names file and column. While the stream is read, LogError
            for a bad line, WireError for features that don't fit the schema, and at its end ConfigError if nothing was in it.
    """
    source = load_dataset(config.dataset).open(config.options, schema, config.window_ms)
    survey = Survey(schema)
    edge = Edge(
        schema, label_delay_ms=config.label_delay_ms, freeze_at_ms=config.freeze_counters_at_ms, survey=survey
    )
    events = (
        late(source.events, config.engagement_delay_ms, config.window_ms)
        if config.engagement_delay_ms
        else source.events
    )
    if source.clicks_elsewhere is not None:
        events = _counted(events, edge, source.clicks_elsewhere)
    beat_ms = _OFTEN_MS if config.as_served else HEARTBEAT_MS
    stream = records(events, edge, settle_ms=settle_ms(config), heartbeat_ms=beat_ms, refuse=source.refuse)
    return Log(
        records=_not_empty(stream, survey),
        num_requests=source.num_requests,
        skipped=source.skipped,
        survey=survey,
    )


def _counted(events: Iterator[Event], edge: Edge, clicks: Clicks) -> Iterator[Event]:
    """The events, before whose first the clicks that are known by then are counted at once; the others wait at the edge."""
    first = next(events, None)
    if first is None:
        return
    known = int(np.searchsorted(clicks.time_ms_N + edge.label_delay_ms, first.time_ms, side="right"))
    if edge.freeze_at_ms:
        known = min(known, int(np.searchsorted(clicks.time_ms_N + edge.label_delay_ms, edge.freeze_at_ms)))
    seed(edge.counters, *(column[:known] for column in clicks))
    edge.elsewhere(Clicks(*(column[known:] for column in clicks)))
    if edge.survey is not None:
        edge.survey.num_clicks_elsewhere = (known, len(clicks.time_ms_N) - known)
    yield from itertools.chain((first,), events)


def _not_empty(stream: Iterator[Record], survey: Survey) -> Iterator[Record]:
    yield from stream
    if not survey.num_impressions:
        raise ConfigError(
            "the log has no impression that can be used, so nothing can be learned from it; check its files"
        )


def begun(stream: Iterator[Record]) -> Iterator[Record]:
    """The stream, once its first record is there: a log of nothing, and one that is wrong from the start, is told before
    anything is started for it. Raises as the stream."""
    return itertools.chain((next(stream),), stream)


def settle_ms(config: ReplayConfig) -> int:
    """From the last event to the end marker: beyond it nothing is open, waiting or remembered (late horizon + bound)."""
    return 10 * config.window_ms + config.lateness_ms + 1000
