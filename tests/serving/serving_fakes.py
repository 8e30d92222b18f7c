"""Stand-ins behind the interfaces of other programs, driven by tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from roo.errors import UnavailableError
from roo.lookup import Lookup, StackLookup
from roo.schema import Schema
from roo.wire import Record
from serving.feature_log.format import LogRecord
from serving.feature_log.sender import Done, Outcome
from serving.row_topic import RowsGoneError


class FakeSink:
    """Kafka as the sender sees it; `plan` says what becomes of a record, None = it never answers."""

    def __init__(self, taken: list[LogRecord], plan: Callable[[LogRecord], Outcome | None] = lambda _: "delivered") -> None:
        self.taken, self.plan, self.closed = taken, plan, False
        self.queue: list[tuple[LogRecord, Done]] = []

    def send(self, record: LogRecord, done: Done) -> None:
        self.queue.append((record, done))

    def poll(self, timeout_s: float) -> None:
        """A batch with one refused record is refused whole, as a broker does."""
        queue, self.queue = self.queue, []
        outcomes = [self.plan(record) for record, _ in queue]
        refused = "refused" in outcomes
        for (record, done), outcome in zip(queue, outcomes, strict=True):
            if outcome is None:
                self.queue.append((record, done))
            elif outcome == "delivered" and not refused:
                self.taken.append(record)
                done("delivered", "")
            else:
                done("refused" if refused else outcome, "a fault of the test")

    def flush(self, timeout_s: float) -> None:
        self.poll(timeout_s)

    def close(self) -> None:
        self.closed = True


class FakeHydrator:
    """Gives the same values for everyone; `away` makes it fail as Redis does."""

    def __init__(self, ro: Mapping[str, object] | None = None, nro: Mapping[str, float] | None = None) -> None:
        self.ro, self.nro, self.away, self.num_reads = dict(ro or {}), dict(nro or {}), False, 0

    def read(self, user_id: int, item_ids: np.ndarray, time_ms: int) -> tuple[dict[str, object], dict[str, np.ndarray]]:
        self.num_reads += 1
        if self.away:
            raise UnavailableError("Redis is away")
        return dict(self.ro), {name: np.full(len(item_ids), value, np.float32) for name, value in self.nro.items()}


class FakeRows:
    """Rows of the row replica: pseudo-random, a function of (table, id) and of `salt`."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.salt = schema, 0

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        return {stack: self._rows(stack, entry) for stack, entry in lookup.stacks.items()}

    def _rows(self, stack: str, entry: StackLookup) -> np.ndarray:
        dim = self.schema.stacks[stack][0].dim
        keys_UD = entry.id_U[:, None] * 31 + entry.table_U[:, None].astype(np.int64) * 7 + np.arange(dim) * 13 + self.salt
        return (np.sin(keys_UD.astype(np.float64) % 1000) * 0.5).astype(np.float32)


class FakeRowTopic:
    """The `rows` topic as one list; `away` calls of `end_offsets` fail, `gone` polls have lost their place."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.at = 0
        self.away = self.gone = 0
        self.on_poll: Callable[[], object] = lambda: None
        self.on_away: Callable[[], object] = lambda: None
        self.closed = False

    def add(self, value: bytes) -> None:
        self.values.append(value)

    def end_offsets(self) -> dict[int, int]:
        if self.away:
            self.away -= 1
            self.on_away()
            raise UnavailableError("Kafka is away")
        return {0: len(self.values)}

    def start(self, offsets: dict[int, int]) -> None:
        self.at = offsets[0]

    def poll(self, timeout_s: float) -> list[Record]:
        self.on_poll()
        if self.gone:
            self.gone -= 1
            raise RowsGoneError("the place is gone")
        at, self.at = self.at, len(self.values)
        return [Record("rows", 0, i, 0, None, self.values[i]) for i in range(at, self.at)]

    def lag(self) -> int:
        return len(self.values) - self.at

    def close(self) -> None:
        self.closed = True
