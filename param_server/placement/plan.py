"""The placement planner: which owner gets which piece of which table. Greedy, with a lower bound on every
plan.

    for thresholds t from coarse to fine   cut each table into the fewest equal row pieces that cost at most t
      tables, the largest piece first      place its pieces at the least loaded owners, each at another one
    the best of all                        and no worse than everything row-wise

A table without a profile is cut over all owners: a wrong guess would cost far more. Column pieces are cut
only on request, and rejected for rules with one state a row, because each piece would have its own state
(TorchRec accepts that; weights trained that way were off by 6.7e-2).

    bound = max( Σ cheapest cost of a table / N, max over tables of a piece of 1 / N of it )

What a piece costs its owner:
    memory    a unique row is read, then read and written with its state:
              (row + 64) + 2 (row + state + 64) bytes
    network   it goes to the requester and its gradient comes back: 2 rows + 8 bytes
    ids       each id that reads it
    fixed     each piece, however small

The constants are assumed until a benchmark has measured them, and every predicted time says so. Loads in
bytes and their imbalance need no constants. Letters: N owners.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from roostream.errors import ConfigError, SchemaError

Kind = Literal["table", "row", "column"]
_THRESHOLDS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePiece:
    """A piece of a table at one owner."""

    table: str
    kind: Kind
    owner: int
    number: int  # of this piece, from 0
    of: int  # number of pieces of the table
    columns: tuple[int, int]  # from, to


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Which owner has which piece of which table, and what a step is predicted to cost. `plan` makes equal
    plans of equal inputs, byte for byte."""

    owners: int
    pieces: tuple[TablePiece, ...]
    predicted_s: float  # a step of the busiest owner
    bound_s: float
    time_imbalance: float
    bytes_imbalance: float
    time_accuracy: str  # how reliable the times are
    warnings: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def kind_of(self, table: str) -> str:
        """How a table is cut, as text."""
        pieces = [piece for piece in self.pieces if piece.table == table]
        if not pieces:
            return "not in it"
        return f"whole at {pieces[0].owner}" if len(pieces) == 1 else f"{len(pieces)} {pieces[0].kind} pieces"


def plan(
    tables: Sequence[PlannedTable],
    owners: int,
    costs: CostModel | None = None,
    *,
    memory_bytes: int = 0,
    columns: Mapping[str, int] | None = None,
    whole_or_all: bool = False,
) -> PlacementPlan:
    """Plan for `owners` that are also the requesters (workers), or shards with as many requesters.

    `memory_bytes`: of one owner, 0 = unlimited. `columns`: table → number of column pieces. `whole_or_all`:
    place a table's rows at one owner or all of them, as TorchRec does (sharding_file.py).

    Raises:
        SchemaError: column pieces of a table whose rule keeps one state a row, or that do not divide its
        columns. ConfigError: more column pieces than owners; or the rows, or column pieces, do not fit: what
        is needed.
    """
    costs, columns = costs or CostModel(), columns or {}
    for table in tables:
        _check_columns(table, columns.get(table.name, 1), owners)
    _check_memory(tables, owners, memory_bytes)
    unknown = [table.name for table in tables if columns.get(table.name, 1) == 1 and table.uniques is None]
    warnings = (f"no profile of {', '.join(unknown)}: spread over all owners",) if unknown else ()
    ways = [{t.name: owners for t in tables}, *_cuts_by_threshold(tables, owners, costs)]
    if whole_or_all:
        ways = [{name: pieces if pieces == 1 else owners for name, pieces in way.items()} for way in ways]
    best: tuple[float, list[TablePiece]] | None = None
    for way in ways:
        pieces, load_N = _place_pieces(tables, way, columns, owners, costs, memory_bytes)
        if best is None or load_N.max() < best[0] * (1 - 1e-12):
            best = float(load_N.max()), pieces
    assert best is not None
    if memory_bytes and math.isinf(best[0]):
        raise ConfigError(
            f"expected column pieces that fit into {memory_bytes / (1 << 30):.1f} GiB of one owner, got none "
            f"for {', '.join(sorted(name for name, cuts in columns.items() if cuts > 1))}; cut these tables "
            "into more columns, or by rows"
        )
    time_N, bytes_N = loads(best[1], tables, owners, costs)
    return PlacementPlan(
        owners=owners,
        pieces=tuple(best[1]),
        predicted_s=float(time_N.max(initial=0.0)),
        bound_s=bound(tables, owners, costs),
        time_imbalance=imbalance(time_N),
        bytes_imbalance=imbalance(bytes_N),
        time_accuracy=costs.time_accuracy,
        warnings=warnings,
    )


def round_robin(tables: Sequence[PlannedTable], owners: int) -> list[TablePiece]:
    """A placement to compare plans with: table n is whole, at owner n mod `owners`."""
    return [
        TablePiece(table=t.name, kind="table", owner=n % owners, number=0, of=1, columns=(0, t.dim))
        for n, t in enumerate(tables)
    ]


def spread(tables: Sequence[PlannedTable], owners: int) -> list[TablePiece]:
    """Every table cut by rows over all owners."""
    return [
        TablePiece(table=t.name, kind="row", owner=owner, number=owner, of=owners, columns=(0, t.dim))
        for t in tables
        for owner in range(owners)
    ]


def loads(
    pieces: Sequence[TablePiece], tables: Sequence[PlannedTable], owners: int, costs: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and bytes moved, of each owner a step, float64 [N]; a table's rows count as spread evenly over
    its pieces."""
    by_name = {table.name: table for table in tables}
    time_N, bytes_N = np.zeros(owners), np.zeros(owners)
    for piece in pieces:
        table, width = by_name[piece.table], piece.columns[1] - piece.columns[0]
        share = 1 / piece.of if piece.kind == "row" else 1.0
        time_N[piece.owner] += piece_cost(table, owners, costs, rows=share, width=width)
        bytes_N[piece.owner] += (table.uniques or 0.0) * share * owners * moved_bytes(table, width)
    return time_N, bytes_N


def bound(tables: Sequence[PlannedTable], owners: int, costs: CostModel) -> float:
    """No plan of uncut tables or row pieces is faster. An unprofiled table's fixed cost counts once for each
    owner."""
    if not tables:
        return 0.0
    pieces = [1 if table.uniques is not None else owners for table in tables]
    work = sum(
        piece_cost(t, owners, costs) + (n - 1) * costs.piece_s for t, n in zip(tables, pieces, strict=True)
    )
    return max(work / owners, max(piece_cost(t, owners, costs, rows=1 / owners) for t in tables))


def _cuts_by_threshold(tables: Sequence[PlannedTable], owners: int, costs: CostModel) -> list[dict[str, int]]:
    whole = [piece_cost(table, owners, costs) for table in tables if table.uniques is not None]
    if not whole:
        return []
    lower_bound = bound(tables, owners, costs)
    highest = max(max(whole), lower_bound)
    if not highest:  # nothing costs anything
        return []
    out = []
    for step in range(_THRESHOLDS):
        max_s = highest * (lower_bound / 8 / highest) ** (step / (_THRESHOLDS - 1))
        out.append({table.name: _pieces_within(table, max_s, owners, costs) for table in tables})
    return out


def _pieces_within(table: PlannedTable, max_s: float, owners: int, costs: CostModel) -> int:
    """The fewest pieces, a power of two or all owners."""
    if table.uniques is None:
        return owners
    work = piece_cost(table, owners, costs) - costs.piece_s
    if max_s <= costs.piece_s:
        return owners
    needed = math.ceil(work / (max_s - costs.piece_s) - 1e-9)
    return min(1 << max(needed - 1, 0).bit_length(), owners)


def _place_pieces(
    tables: Sequence[PlannedTable],
    way: Mapping[str, int],
    columns: Mapping[str, int],
    owners: int,
    costs: CostModel,
    memory_bytes: int,
) -> tuple[list[TablePiece], np.ndarray]:
    """The pieces for these cuts, and the load of each owner in seconds."""
    load_N, used_N, pieces = np.zeros(owners), np.zeros(owners), list[TablePiece]()
    sized = []
    for at, table in enumerate(tables):
        cuts = columns.get(table.name, 1)
        n, share = (cuts, 1.0) if cuts > 1 else (way[table.name], 1 / way[table.name])
        sized.append((-piece_cost(table, owners, costs, rows=share, width=table.dim // cuts), at, n, cuts))
    for cost, at, n, cuts in sorted(sized):
        table = tables[at]
        chosen = _least_loaded(load_N, used_N, n, table.bytes / n, memory_bytes)
        load_N[chosen] += -cost
        used_N[chosen] += table.bytes / n
        kind: Kind = "column" if cuts > 1 else "row" if n > 1 else "table"
        width = table.dim // cuts
        for number, owner in enumerate(chosen.tolist()):
            span = (number * width, (number + 1) * width) if cuts > 1 else (0, table.dim)
            pieces.append(
                TablePiece(table=table.name, kind=kind, owner=owner, number=number, of=n, columns=span)
            )
    if memory_bytes and used_N.max() > memory_bytes * (1 + 1e-9):  # a sum of shares may be rounded up
        return pieces, np.full(owners, math.inf)
    return pieces, load_N


def _least_loaded(
    load_N: np.ndarray, used_N: np.ndarray, n: int, each_bytes: float, memory_bytes: int
) -> np.ndarray:
    """The `n` least loaded owners that have memory left, then others; ties by number."""
    if n >= len(load_N):
        return np.arange(len(load_N))
    full_N = (used_N + each_bytes > memory_bytes) if memory_bytes else np.zeros(len(load_N), np.bool_)
    return np.lexsort((np.arange(len(load_N)), load_N, full_N))[:n]


def _check_columns(table: PlannedTable, cuts: int, owners: int) -> None:
    if cuts == 1:
        return
    if table.row_wise_rule:
        raise SchemaError(
            f"table {table.name!r}: expected rows in one piece, because its rule keeps one state a row, "
            f"got {cuts} column pieces; cut it row-wise, or give it an element-wise rule"
        )
    if table.dim % cuts:
        raise SchemaError(
            f"table {table.name!r}: expected column pieces that divide dim = {table.dim}, got {cuts}"
        )
    if cuts > owners:
        raise ConfigError(
            f"table {table.name!r}: expected at most {owners} column pieces, one an owner, got {cuts}; "
            "request fewer, or use more owners"
        )


def _check_memory(tables: Sequence[PlannedTable], owners: int, memory_bytes: int) -> None:
    needed = sum(table.bytes for table in tables)
    if not memory_bytes or needed <= owners * memory_bytes:
        return
    largest, gib = max(tables, key=lambda table: table.bytes), float(1 << 30)
    raise ConfigError(
        f"expected owners with {needed / gib:.1f} GiB together, got {owners} of "
        f"{memory_bytes / gib:.1f}; the largest table is {largest.name!r} with {largest.bytes / gib:.1f} "
        f"GiB; {math.ceil(needed / memory_bytes)} owners suffice"
    )


_ACCESS_BYTES = 64
_ID_BYTES = 8
_MAX_CONSTANT = 1e18  # largest constant


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost constants of an owner's machine."""

    memory_bytes_s: float = 720e9
    network_bytes_s: float = 100e9
    id_s: float = 0.15e-9
    piece_s: float = 0.4e-6
    error: float | None = None  # median relative error on held-out times; None = the constants are assumed

    @property
    def time_accuracy(self) -> str:
        """Shown beside every predicted time."""
        if self.error is None:
            return "predicted from assumed constants; loads and imbalance are counted, times are not measured"
        return f"predicted, median error {self.error:.0%} on held-out times"


def costs_of(text: str, where: str = "costs") -> CostModel:
    """Parse a benchmark's JSON.

    Raises:
        ConfigError: it is something else.
    """
    try:
        given = json.loads(text)
        found = CostModel(**given)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{where}: expected JSON of {', '.join(CostModel.__annotations__)}, got something else ({error})"
        ) from None
    for name, value in given.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        divides = name.endswith("bytes_s")
        if (value is None and name == "error") or (
            is_number and 0 <= value < _MAX_CONSTANT and (value or not divides)
        ):
            continue
        raise ConfigError(
            f"{where}: {name}: expected a number {'above 0' if divides else 'of 0 or more'}, got {value!r}"
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """A table as the planner sees it. `uniques` and `ids`: of one requester's batch; None: no profile."""

    name: str
    dim: int
    row_wise_rule: bool  # its rule keeps one state a row
    rows: int = 0  # 0 = not known
    uniques: float | None = None
    ids: float | None = None
    impression_ids: float | None = None  # if every impression had all ids of its request

    @property
    def state_bytes(self) -> int:
        return 4 if self.row_wise_rule else 4 * self.dim

    @property
    def bytes(self) -> int:
        """Of all rows with their state."""
        return self.rows * (4 * self.dim + self.state_bytes)


def exchanged_bytes(tables: Sequence[PlannedTable], owners: int, *, expanded: bool = False) -> float:
    """Bytes of ids, rows and gradients between a requester and the other owners in a step, if rows are spread
    evenly: each distinct id of its batch once, or `expanded`: the ids of a request once for each impression.
    Tables without a profile count nothing."""
    crossing = (owners - 1) / owners
    return crossing * sum(
        ((table.impression_ids if expanded else table.uniques) or 0.0) * (8 * table.dim + _ID_BYTES)
        for table in tables
    )


def moved_bytes(table: PlannedTable, width: int) -> float:
    """Memory and network bytes of one unique row, for `width` of its columns."""
    row, state = 4 * width, 4 if table.row_wise_rule else 4 * width
    return (row + _ACCESS_BYTES) + 2 * (row + state + _ACCESS_BYTES) + 2 * row + _ID_BYTES


def piece_cost(
    table: PlannedTable, requesters: int, costs: CostModel, *, rows: float = 1.0, width: int = 0
) -> float:
    """Seconds a step for the owner of a share `rows` of the table's rows and `width` columns of it (0 =
    all)."""
    width = width or table.dim
    uniques, ids = (table.uniques or 0.0) * rows * requesters, (table.ids or 0.0) * rows * requesters
    row, state = 4 * width, 4 if table.row_wise_rule else 4 * width
    memory = uniques * ((row + _ACCESS_BYTES) + 2 * (row + state + _ACCESS_BYTES))
    network = uniques * (2 * row + _ID_BYTES)
    return memory / costs.memory_bytes_s + network / costs.network_bytes_s + ids * costs.id_s + costs.piece_s


def imbalance(load_N: np.ndarray) -> float:
    """N · max / sum: 1 = even, N = all at one owner; 1 without any load."""
    total = float(load_N.sum())
    return len(load_N) * float(load_N.max()) / total if total else 1.0
