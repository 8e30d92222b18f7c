"""From settings to retrieval's objects. Nothing runs yet."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from roostream.runtime.clock import Clock
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.schema.schema import Schema
from serving.rank import RankService
from serving.retrieval.config import ServesItems
from serving.retrieval.item_keeper import ItemKeeper
from serving.retrieval.recall_samples import RecallSamples
from serving.retrieval.retriever import Retriever
from serving.versions.quiet import Quiet

_HELPS = {
    "items": "items with a vector",
    "items_due": "of those, the ones whose rows changed and whose vectors wait to be made anew",
    "items_lag_s": "how long the first of those has waited",
    "items_refreshed": "vectors made anew because rows changed",
    "items_built": "times that all vectors were made, by another version or catalogue",
    "items_build_s": "how long that took last",
    "items_refused": "catalogues and versions that can't be used",
    "items_recall": "share of the truly nearest items that the index finds, of recent sampled requests",
    "items_recall_samples": "requests that it was measured with",
    "items_compared_whole": "searches that compared every item although there is an index",
}
_COUNTERS = (
    "items_refreshed",
    "items_built",
    "items_refused",
    "items_recall_samples",
    "items_compared_whole",
)


def open_retrieval(
    settings: ServesItems,
    schema: Schema,
    service: RankService,
    quiet: Quiet,
    clock: Clock,
    registry: CollectorRegistry,
) -> ItemKeeper | None:
    """None: without a catalogue. Raises ConfigError: the index can't be had."""
    if not settings.items:
        return None
    retriever = Retriever(schema, service.rows, service.hydrator, RecallSamples(clock))
    retriever.rows_ready = lambda: service.rows_ready()
    keeper = ItemKeeper(
        schema, settings, retriever, lambda: service.versions.served.version, service.rows, quiet, clock
    )
    MetricsCollector("serving", keeper.numbers, {}, helps=_HELPS, counters=_COUNTERS).register(registry)
    return keeper
