"""What a shard shows when it is scraped."""

from __future__ import annotations

from param_server.main import shard_metrics
from param_server.publish import Publisher
from param_server.rows_topic import InMemoryRows
from roostream.runtime.clock import FakeClock
from tests.param_server.shard_support import begun

ALWAYS = {
    "rows",
    "incarnation",
    "committed_seq",
    "segments",
    "bytes",
    "changed_rows",
    "expiry_skipped_rows",
    "unpublishable_rows",
    "clipped_gradient_rows",
    "largest_accumulator",
    "damaged_segment_parts",
    "found_damaged_segment_parts",
    "pulls",
    "pushes",
    "duplicate_pushes",
    "waiting_pushes",
    "ready",
}


def test_names_are_those_that_status_and_dashboards_know() -> None:
    shard = begun()
    shown = {family.name for family in shard_metrics(shard, None).collect()}
    assert shown == {f"roostream_shard_{name}" for name in ALWAYS}
    publisher = Publisher(shard, InMemoryRows(), FakeClock())
    more = {family.name for family in shard_metrics(shard, publisher).collect()} - shown
    assert more == {
        f"roostream_shard_{name}"
        for name in ("published_timestamp_seconds", "published_keys", "republished_keys")
    }
