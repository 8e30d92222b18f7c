"""A fake parameter-server shard for simulations of the commit. Its disk survives its death, and it counts the
pushes to each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from roostream.errors import CheckpointError, FencedError, TransportError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock, FakeClock
from roostream.runtime.rpc.transport import Header, Transport
from roostream.schema.schema import Schema
from roostream.wire.lookup import Lookup
from tests.trainer.actors import wait_until

RowKey = tuple[int, int]


class Row:
    def __init__(self, value_D: np.ndarray, squares_D: np.ndarray, pushes: int) -> None:
        self.value_D, self.squares_D, self.pushes = value_D, squares_D, pushes

    def copy(self) -> Row:
        return Row(self.value_D.copy(), self.squares_D.copy(), self.pushes)


def initial(table: int, id_: int, dim: int) -> np.ndarray:
    return np.random.default_rng([table, abs(id_)]).uniform(-0.05, 0.05, dim).astype(np.float32)


class FakeShard:
    """A shard whose rows are in a dict. `disk` (segment → rows) survives the process; nothing else does."""

    def __init__(
        self,
        index: int,
        schema: Schema,
        store: CheckpointStore,
        disk: dict[str, dict[RowKey, Row]],
        clock: Clock | None = None,
    ) -> None:
        self.index, self.schema, self.store, self.disk = index, schema, store, disk
        self.clock = clock or FakeClock(0)
        self.dims = {t.id: t.dim for t in schema.tables}
        self.incarnation = 0
        self.restored = False
        self.rows: dict[RowKey, Row] = {}
        self.frozen: tuple[int, dict[RowKey, Row]] | None = None
        self.aborted = 0
        self.seen: set[tuple[int, int]] = set()
        # Worker → its push of the current step, while the pushes of other workers are missing.
        self.held: dict[int, tuple[Header, Sequence[np.ndarray]]] = {}
        self.is_dead = False
        self.push_headers: list[Header] = []

    def die(self) -> None:
        """End the process. Callers that wait for an answer get an error."""
        self.is_dead = True

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, list[np.ndarray]]:
        if not self.restored:
            raise UnavailableError(f"shard {self.index} awaits RESTORE")
        if header["incarnation"] != self.incarnation:
            raise FencedError(f"expected incarnation {self.incarnation}, got {header['incarnation']}")
        return self._pull(header, arrays) if method == "pull" else self._push(header, arrays)

    def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        return dict(getattr(self, f"_{command['kind']}")(command))

    def report(self) -> dict[str, Any]:
        return {"ready": self.restored}

    def bits(self) -> dict[str, bytes]:
        return {
            f"row {key}": row.value_D.tobytes() + row.squares_D.tobytes() for key, row in self.rows.items()
        }

    def _pull(self, header: Header, arrays: Sequence[np.ndarray]) -> tuple[Header, list[np.ndarray]]:
        out = []
        for at, stack in enumerate(header["stacks"]):
            dim = self.schema.stacks[stack][0].dim
            keys = list(zip(arrays[2 * at].tolist(), arrays[2 * at + 1].tolist(), strict=True))
            rows = [self.rows[k].value_D if k in self.rows else initial(*k, dim) for k in keys]
            out.append(np.array(rows, dtype=np.float32).reshape(len(keys), dim))
        return {}, out

    def _push(self, header: Header, arrays: Sequence[np.ndarray]) -> tuple[Header, list[np.ndarray]]:
        self.push_headers.append(header)
        update = header["worker"], header["sequence"]
        if update in self.seen:
            return {"applied": False}, []
        if header.get("workers", 1) > 1:
            self._push_with_others(header, arrays)
        else:
            self.seen.add(update)
            self._apply([arrays])
        return {"applied": True}, []

    def _push_with_others(self, header: Header, arrays: Sequence[np.ndarray]) -> None:
        """Hold the push until every worker has pushed this step, as `param_server.gradient_barrier` does."""
        worker, held, incarnation = header["worker"], self.held, self.incarnation
        if any(other["step"] != header["step"] for other, _ in held.values()):
            raise FencedError("the workers are not in step")
        held.setdefault(worker, (header, arrays))
        if len(held) == header["workers"]:
            self.held = {}
            self.seen.update((header["worker"], header["sequence"]) for header, _ in held.values())
            self._apply([arrays for _, (_, arrays) in sorted(held.items())])

        def is_over() -> bool:
            return (
                self.held is not held or self.is_dead or self.incarnation != incarnation or not self.restored
            )

        try:
            wait_until(is_over, self.clock, "the other workers' push")
        except UnavailableError:
            self.held = {}
            raise
        if self.is_dead:
            raise TransportError("the connection was closed")
        if (worker, header["sequence"]) not in self.seen or self.incarnation != incarnation:
            raise UnavailableError("the step was given up")

    def _apply(self, pushes: Sequence[Sequence[np.ndarray]]) -> None:
        sums: dict[RowKey, np.ndarray] = {}
        for arrays in pushes:
            for table_U, id_U, gradient_UD in zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True):
                for table, id_, gradient_D in zip(table_U.tolist(), id_U.tolist(), gradient_UD, strict=True):
                    before_D = sums.get((table, id_), 0.0)
                    sums[table, id_] = before_D + gradient_D.astype(np.float64)
        for (table, id_), sum_D in sums.items():
            dim, gradient_D = self.dims[table], sum_D.astype(np.float32)
            row = self.rows.get((table, id_)) or Row(
                initial(table, id_, dim), np.full(dim, 0.1, np.float32), 0
            )
            row.squares_D += gradient_D * gradient_D
            row.value_D -= np.float32(0.05) * gradient_D / np.sqrt(row.squares_D)
            row.pushes += 1
            self.rows[table, id_] = row

    def _restore(self, command: dict[str, Any]) -> dict[str, Any]:
        self.restored, self.frozen, self.aborted, rows = False, None, 0, {}
        if command["manifest"]:
            manifest = manifests.load(self.store, command["manifest"]).manifest
            for segment in manifest.shards[self.index]["segments"]:
                if segment["name"] not in self.disk:
                    raise CheckpointError(f"segment {segment['name']} of shard {self.index} is damaged")
                rows = {k: row.copy() for k, row in self.disk[segment["name"]].items()}
        self.rows, self.incarnation, self.restored = rows, command["incarnation"], True
        self.seen.clear()
        self.held = {}
        return {}

    def _freeze(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["seq"] <= self.aborted or self.frozen is not None:
            raise FencedError(f"commit {command['seq']} was aborted, or an older one wasn't")
        self.frozen = command["seq"], {k: row.copy() for k, row in self.rows.items()}
        return {"rows": len(self.rows), "paused_ms": 0.0}

    def _write(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.frozen is not None and self.frozen[0] == command["seq"]
        name = f"{command['seq']}-{command['incarnation']}"
        self.disk[name] = self.frozen[1]
        return {"segments": [{"name": name, "rows": len(self.frozen[1])}], "rows_end": {0: 0}}

    def _commit(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.frozen is not None and self.frozen[0] == command["seq"]
        self.frozen = None
        return {}

    def _abort(self, command: dict[str, Any]) -> dict[str, Any]:
        self.aborted = command["seq"]
        self.frozen = None
        return {}


class FakeRows:
    """A client of fake shards. Shard (id mod number of shards) owns a row."""

    def __init__(self, schema: Schema, transports: Sequence[Transport], worker: int = 0) -> None:
        self.schema, self.transports, self.worker = schema, transports, worker
        self.incarnation = 0
        self.sequence, self.workers = 0, 1
        self.owners: BucketMap | None = None  # recorded only: this client ignores the bucket map
        self.before_push: Callable[[], None] = lambda: None

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.incarnation, self.workers, self.sequence, self.owners = incarnation, workers, 0, owners

    def pull(self, lookup: Lookup) -> dict[str, np.ndarray]:
        out = {
            s: np.zeros((len(at.id_U), self.schema.stacks[s][0].dim), np.float32)
            for s, at in lookup.stacks.items()
        }
        for index, transport in enumerate(self.transports):
            arrays, owned = self._owned(lookup, index)
            header = {"incarnation": self.incarnation, "stacks": list(lookup.stacks)}
            _, rows = transport.call("pull", header, arrays)
            for stack, of_stack in zip(lookup.stacks, rows, strict=True):
                out[stack][owned[stack]] = of_stack
        return out

    def push(self, lookup: Lookup, gradients: Mapping[str, np.ndarray], **header: Any) -> None:
        self.sequence += 1
        for index, transport in enumerate(self.transports):
            self.before_push()
            keys, owned = self._owned(lookup, index)
            arrays: list[np.ndarray] = []
            for at, stack in enumerate(lookup.stacks):
                if stack in gradients:
                    arrays += [*keys[2 * at : 2 * at + 2], gradients[stack][owned[stack]]]
            fields = {"worker": self.worker, "sequence": self.sequence, "stacks": list(gradients)}
            fields |= {"incarnation": self.incarnation, "workers": self.workers}
            transport.call("push", {**fields, **header}, arrays)

    def _owned(self, lookup: Lookup, index: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        owned = {s: at.id_U % len(self.transports) == index for s, at in lookup.stacks.items()}
        return [a[owned[s]] for s, at in lookup.stacks.items() for a in (at.table_U, at.id_U)], owned
