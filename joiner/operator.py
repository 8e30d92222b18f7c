"""The Flink operator: bytes in, bytes out, bytes as state, around `join.py`. Thread mode: it runs inside the JVM.

One map state, name → bytes (joiner/entries.py): Flink reads and writes the entries that an event touches. An event-time timer for
each time at which something of the key is due.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyflink.common import Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, TimerService
from pyflink.datastream.state import MapStateDescriptor

from joiner.build import Output
from joiner.config import JoinerConfig
from joiner.entries import Entries
from joiner.envelope import pack, unpack
from joiner.ingest import Reader
from joiner.join import Join
from joiner.rules import LATE
from joiner.state import Engagement, Impression
from joiner.turn import Turn
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.flink_rest import LATE_REQUESTS
from roostream.runtime.program import tune_garbage_collector
from roostream.schema.registry import open_registry
from roostream.schema.schema_file import load_schema


class JoinFunction(KeyedProcessFunction):  # type: ignore[misc]
    """Key: the record's 8 key bytes as an integer. Input: an envelope. Output: an output envelope."""

    def __init__(self, config: JoinerConfig) -> None:
        self.config = config

    def open(self, runtime_context: RuntimeContext) -> None:
        tune_garbage_collector()
        schema, registry = load_schema(self.config.schema), open_registry(open_store(self.config.store))
        self.reader = Reader(registry, schema.limits)
        self.join = Join(self.config.rules, registry, schema.limits)
        # Pickled bytes are the only state type that gives bytes back in thread mode; the values are ours and versioned.
        described = MapStateDescriptor("entries", Types.STRING(), Types.PICKLED_BYTE_ARRAY())
        self.state = Entries(runtime_context.get_map_state(described))
        self.late = runtime_context.get_metrics_group().counter(LATE_REQUESTS)

    def process_element(self, value: bytes, ctx: KeyedProcessFunction.Context) -> Iterator[bytes]:
        record = unpack(value)
        event = self.reader.read(record)
        if isinstance(event, Output):
            return iter((pack(event),))
        if not isinstance(event, (Impression, Engagement)):
            return iter(())
        assert record.key is not None
        timers = ctx.timer_service()
        self.state.forget()
        return self._finish(
            self.join.apply(self.state, record.key, event, timers.current_watermark()), timers
        )

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[bytes]:
        timers = ctx.timer_service()
        key = (ctx.get_current_key() & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
        self.state.forget()
        return self._finish(self.join.advance(self.state, key, timestamp, timers.current_watermark()), timers)

    def _finish(self, turn: Turn, timers: TimerService) -> Iterator[bytes]:
        """Write the entries that have changed, set the timers, give the outputs."""
        self.state.flush()
        if num_late := sum(output.why == LATE for output in turn.outputs):
            self.late.inc(num_late)
        for due_ms in turn.timers_ms:
            timers.register_event_time_timer(due_ms)
        return map(pack, turn.outputs)
