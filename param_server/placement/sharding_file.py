"""A placement plan as JSON in TorchRec's terms; trainer/torchrec_plan.py turns it into TorchRec's own object.

    {"format": 1, "owners": N, "module": path of the collection in the model,
     "tables": {TABLE: {"sharding_type": "table_wise" | "row_wise" | "column_wise",
                        "shards": [{"rank": r, "offsets": [row, column], "sizes": [rows, columns]}, …]}}}

TorchRec cuts a table's rows over all ranks, in blocks of ceil(rows / N), or not at all; plans for it are made
that way (`plan(…, whole_or_all=True)`). Rows are numbers from 0, as `checkpoint export` gives them, never
ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from param_server.placement.plan import PlacementPlan, PlannedTable, TablePiece
from roostream.errors import ConfigError

FORMAT = 1
_COLUMN_MULTIPLE = 4  # FBGEMM processes four columns at a time
_EXPECTED = "expected JSON of `roostream placement plan --write-torchrec`"
_TYPES = {"table": "table_wise", "row": "row_wise", "column": "column_wise"}


def sharding_of(plan: PlacementPlan, tables: Sequence[PlannedTable], module: str = "") -> dict[str, Any]:
    """The content of the file. `module`: path of the collection in the model; "" = the model itself.

    Raises:
        ConfigError: a table with an unknown number of rows, one cut into row pieces for some of the owners,
        or pieces of a width that FBGEMM rejects.
    """
    if missing := [table.name for table in tables if not table.rows]:
        raise ConfigError(
            f"expected how many rows each table has, got none for {', '.join(missing)}; TorchRec's "
            "shards are row ranges: give the numbers by --rows TABLE=N or --collection FILE"
        )
    return {
        "format": FORMAT,
        "owners": plan.owners,
        "module": module,
        "tables": {
            table.name: _table_entry(table, _pieces(plan, table.name), plan.owners) for table in tables
        },
    }


def read_sharding(text: str, where: str = "sharding plan") -> Mapping[str, Any]:
    """Parse the JSON of `sharding_of`.

    Raises:
        ConfigError: it is something else.
    """
    try:
        found = json.loads(text)
        valid = (
            found["format"] == FORMAT
            and isinstance(found["owners"], int)
            and isinstance(found["module"], str)
        )
        for table in found["tables"].values():
            valid &= table["sharding_type"] in _TYPES.values() and bool(table["shards"])
            valid &= all(
                0 <= shard["rank"] < found["owners"] and len(shard["offsets"]) == 2
                for shard in table["shards"]
            )
            valid &= all(len(shard["sizes"]) == 2 for shard in table["shards"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {_EXPECTED}, got something else ({error!r})") from None
    if not valid:
        raise ConfigError(f"{where}: {_EXPECTED}, got another format, or shards at unknown ranks")
    return found


def _pieces(plan: PlacementPlan, table: str) -> list[TablePiece]:
    return sorted((piece for piece in plan.pieces if piece.table == table), key=lambda piece: piece.number)


def _table_entry(table: PlannedTable, pieces: Sequence[TablePiece], owners: int) -> dict[str, Any]:
    kind = pieces[0].kind
    if kind == "row" and len(pieces) != owners:
        raise ConfigError(
            f"table {table.name!r}: expected it uncut or cut over all {owners} owners, as TorchRec cuts "
            f"rows, got {len(pieces)} row pieces; plan with whole_or_all"
        )
    if any(piece.columns[1] % _COLUMN_MULTIPLE for piece in pieces):
        raise ConfigError(
            f"table {table.name!r}: expected pieces of a multiple of {_COLUMN_MULTIPLE} columns, as FBGEMM "
            f"has them, got {table.dim} columns in {len(pieces)} {kind} pieces; change dim or --columns"
        )
    if kind == "row":
        return {"sharding_type": _TYPES[kind], "shards": _row_blocks(table, owners)}
    spans = [(piece.owner, piece.columns) for piece in pieces]
    shards = [
        {"rank": rank, "offsets": [0, first], "sizes": [table.rows, end - first]}
        for rank, (first, end) in spans
    ]
    return {"sharding_type": _TYPES[kind], "shards": shards}


def _row_blocks(table: PlannedTable, owners: int) -> list[dict[str, Any]]:
    """Blocks of equally many rows, one per rank. The last ranks may have fewer rows, or none."""
    block = -(-table.rows // owners)
    firsts = [min(rank * block, table.rows) for rank in range(owners + 1)]
    sizes = [[firsts[rank + 1] - firsts[rank], table.dim] for rank in range(owners)]
    return [{"rank": rank, "offsets": [firsts[rank], 0], "sizes": sizes[rank]} for rank in range(owners)]
