"""The shard's calls as they come over a transport (docs/protocols.md, "Shard"): what they carry is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from param_server.index import Keys, join_keys, no_keys
from param_server.server import Shard
from param_server.step_sum import check_workers
from param_server.table import StackTable, Update
from roostream.errors import RoostreamError, SchemaError, WireError
from roostream.runtime.rpc.transport import Header

MAX_SCAN_ROWS = 1 << 20

Asked: TypeAlias = tuple[StackTable, Keys, Sequence[np.ndarray]]


class Calls:
    """`handle` is an RPC handler over one shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        """One call.

        Raises:
            FencedError: `incarnation` is not the shard's, or a key's bucket isn't.
            UnavailableError: RESTORE has not come, or not worked, yet; or other workers' pushes of this step didn't come.
            SchemaError, WireError: what was sent doesn't fit; nothing of it was applied.
        """
        match method:
            case "pull":
                asked = self._asked(header, arrays, 2)
                return {}, self.shard.pull(
                    integer(header, "incarnation"), [(table, keys) for table, keys, _ in asked]
                )
            case "read":
                incarnation, read = self.shard.read(
                    [(table, keys) for table, keys, _ in self._asked(header, arrays, 2)]
                )
                return {"incarnation": incarnation}, [array for rows in read for array in rows]
            case "push":
                return {"applied": self._push(header, arrays)}, ()
            case "scan":
                return self._scan(header)
            case "owners":
                (incarnation, _), owners = self.shard.read([]), self.shard.owners
                return {
                    "incarnation": incarnation,
                    "version": owners.version,
                    "num_owners": owners.num_owners,
                }, [owners.owner_B]
            case "stats":
                return self.shard.stats(), ()
        raise RoostreamError(f"expected a call of owners, pull, push, read, scan or stats, got {method!r}")

    def _push(self, header: Header, arrays: Sequence[np.ndarray]) -> bool:
        return self.shard.push(integer(header, "incarnation"), self.update_of(header, arrays))

    def update_of(self, header: Header, arrays: Sequence[np.ndarray]) -> Update:
        """What a push carries, checked. Raises SchemaError, WireError: it doesn't fit."""
        asked = self._asked(header, arrays, 3)
        for table, keys, (gradient_UD,) in asked:
            table.check_gradient(keys, gradient_UD)
        workers = integer(header, "workers") if "workers" in header else 1
        if workers != 1:
            check_workers(integer(header, "worker"), workers)
        return Update(
            worker=integer(header, "worker"),
            sequence=integer(header, "sequence"),
            time_ms=integer(header, "time_ms"),
            oldest_engagement_ms=integer(header, "oldest_engagement_ms"),
            oldest_close_ms=integer(header, "oldest_close_ms"),
            parts=[(table, keys, gradient_UD) for table, keys, (gradient_UD,) in asked],
            step=integer(header, "step") if workers > 1 else 0,
            workers=workers,
            clip_row_norm=_norm(header) if workers > 1 else 0.0,
        )

    def _scan(self, header: Header) -> tuple[Header, Sequence[np.ndarray]]:
        """Whole buckets from number `cursor` on, until `limit` rows are reached. Each comes as it is at one moment: `buckets`
        says [bucket, incarnation, sequence, settles at], see `server.BucketPage`."""
        table = self._table(header.get("stack", ""))
        cursor, limit = integer(header, "cursor"), min(integer(header, "limit"), MAX_SCAN_ROWS)
        pages, left = self.shard.scan(table, cursor, limit)
        answer = {
            "cursor": left[0] if left else -1,
            "incarnation": max((p.incarnation for p in pages), default=0),
            "buckets": [[p.bucket, p.incarnation, p.sequence, p.settles_at] for p in pages],
        }
        keys = join_keys(no_keys(), *(p.keys for p in pages))
        rows_ND = np.concatenate([np.zeros((0, table.width), np.float32), *(p.rows_MD for p in pages)])
        counts = [len(p.keys) for p in pages]
        return answer, [
            keys.table_U,
            keys.id_U,
            rows_ND,
            np.repeat(np.array([p.sequence for p in pages], np.uint64), counts),
        ]

    def _asked(self, header: Header, arrays: Sequence[np.ndarray], each: int) -> list[Asked]:
        """Per stack named in the header: its table, keys and further arrays."""
        stacks = header.get("stacks")
        if not isinstance(stacks, list) or len(arrays) != each * len(stacks):
            raise WireError(
                "bad_shape", f"expected stacks: [name…] and {each} arrays for each, got {len(arrays)} arrays"
            )
        out: list[Asked] = []
        for n, name in enumerate(stacks):
            table = self._table(name)
            table_U, id_U, *rest = arrays[each * n : each * (n + 1)]
            if (
                table_U.dtype != np.uint32
                or id_U.dtype != np.int64
                or table_U.ndim != 1
                or table_U.shape != id_U.shape
            ):
                raise WireError(
                    "bad_shape",
                    f"stack {name}: expected table u4[U] and id i8[U], got {table_U.shape} {id_U.shape}",
                )
            keys = Keys(table_U, id_U)
            table.check_keys(keys)
            out.append((table, keys, rest))
        return out

    def _table(self, name: object) -> StackTable:
        table = self.shard.tables.get(str(name))
        if table is None:
            known = ", ".join(self.shard.tables)
            raise SchemaError(f"expected a stack of {known}, got {name!r}; use the same schema as the shards")
        return table


def _norm(header: Header) -> float:
    value = header.get("clip_row_norm", 0.0)
    if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise WireError(
            "bad_shape", f"expected a number from 0 on as 'clip_row_norm' in the header, got {value!r}"
        )
    return float(value)


def integer(header: Header, key: str) -> int:
    """A header's 64-bit integer; raises WireError where there is none."""
    value = header.get(key)
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise WireError("bad_shape", f"expected an integer {key!r} in the header, got {value!r}")
    return value
