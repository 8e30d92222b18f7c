"""The Flink operator: bytes in, bytes out, bytes as state, around `join.py`. Thread mode: it runs inside the JVM.

One value state a key (joiner/state.py's bytes) and one event-time timer a key, at the state's `due_ms`: what the timer was
can be read from the state as it was, so nothing else is stored.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyflink.common import Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, TimerService
from pyflink.datastream.state import ValueStateDescriptor

from joiner import state
from joiner.build import Output
from joiner.config import JoinerConfig
from joiner.envelope import pack, unpack
from joiner.ingest import Reader
from joiner.join import Join
from roo.schema import load_schema
from roo.schema_registry import lookup
from runtime.checkpoint_store import open_store


class JoinFunction(KeyedProcessFunction):  # type: ignore[misc]
    """Key: the record's 8 key bytes as an integer. Input: an envelope. Output: an output envelope."""

    def __init__(self, config: JoinerConfig) -> None:
        self.config = config

    def open(self, runtime_context: RuntimeContext) -> None:
        schema, registry = load_schema(self.config.schema), lookup(open_store(self.config.store))
        self.reader = Reader(registry, schema.limits)
        self.join = Join(self.config.rules, registry, schema.limits.max_candidates)
        # Pickled bytes are the only state type that gives bytes back in thread mode; the values are ours and versioned.
        self.stored = runtime_context.get_state(ValueStateDescriptor("requests", Types.PICKLED_BYTE_ARRAY()))

    def process_element(self, value: bytes, ctx: KeyedProcessFunction.Context) -> Iterator[bytes]:
        record = unpack(value)
        event = self.reader.read(record)
        if event is None or isinstance(event, Output):
            return iter(()) if event is None else iter((pack(event),))
        assert record.key is not None
        timers = ctx.timer_service()
        known = state.decode(self.stored.value())
        was_due_ms = known.due_ms
        outputs = self.join.apply(known, record.key, event, timers.current_watermark())
        self._store(known, was_due_ms, timers)
        return map(pack, outputs)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[bytes]:
        timers = ctx.timer_service()
        known = state.decode(self.stored.value())
        key = (ctx.get_current_key() & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
        outputs = self.join.advance(known, key, timers.current_watermark())
        self._store(known, timestamp, timers)
        return map(pack, outputs)

    def _store(self, known: state.State, was_due_ms: int, timers: TimerService) -> None:
        due_ms = known.due_ms
        if due_ms != was_due_ms:
            if was_due_ms < state.END:
                timers.delete_event_time_timer(was_due_ms)
            if due_ms < state.END:
                timers.register_event_time_timer(due_ms)
        if known.requests:
            self.stored.update(state.encode(known))
        else:
            self.stored.clear()
