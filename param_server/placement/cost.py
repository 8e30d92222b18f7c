"""What a piece of a table costs its owner, and how even a plan is.

    memory    a unique row is read, then read and written with its state: (row + 64) + 2 (row + state + 64) bytes
    network   it goes to the requester and its gradient comes back: 2 rows + 8 bytes
    ids       each id that asks for it
    fixed     each piece, however small

The constants are assumed until a bench has measured them, and a prediction of time says so: of two fits on a real exchange of two
processes neither predicted held-out times better than 29 % in the median. Loads in bytes and their imbalance need no constants.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from roostream.errors import ConfigError

_ACCESS_BYTES = 64
_ID_BYTES = 8
_MOST = 1e18  # of a constant


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnerCosts:
    """Of an owner's machine."""

    memory_bytes_s: float = 720e9
    network_bytes_s: float = 100e9
    id_s: float = 0.15e-9
    piece_s: float = 0.4e-6
    error: float | None = None  # median relative error on held-out times; None = the constants are assumed

    @property
    def said(self) -> str:
        """Beside every time."""
        if self.error is None:
            return "predicted from assumed constants; loads and imbalance are counted, times are not measured"
        return f"predicted, median error {self.error:.0%} on held-out times"


def costs_of(text: str, where: str = "costs") -> OwnerCosts:
    """From a bench's JSON.

    Raises:
        ConfigError: not such JSON.
    """
    try:
        given = json.loads(text)
        found = OwnerCosts(**given)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{where}: expected JSON of {', '.join(OwnerCosts.__annotations__)}, got another thing ({error})"
        ) from None
    for name, value in given.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        divides = name.endswith("bytes_s")
        if (value is None and name == "error") or (
            is_number and 0 <= value < _MOST and (value or not divides)
        ):
            continue
        raise ConfigError(
            f"{where}: {name}: expected a number {'above 0' if divides else 'of 0 or more'}, got {value!r}"
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedTable:
    """A table as a plan sees it. `uniques` and `ids`: of one requester's batch; None: nobody has counted them."""

    name: str
    dim: int
    row_wise_rule: bool  # its rule keeps one state a row
    rows: int = 0  # 0 = not known
    uniques: float | None = None
    ids: float | None = None

    @property
    def state_bytes(self) -> int:
        return 4 if self.row_wise_rule else 4 * self.dim

    @property
    def bytes(self) -> int:
        """Of all rows with their state."""
        return self.rows * (4 * self.dim + self.state_bytes)


def moved_bytes(table: PlacedTable, width: int) -> float:
    """Memory and network of one unique row's visit, of `width` of its columns."""
    row, state = 4 * width, 4 if table.row_wise_rule else 4 * width
    return (row + _ACCESS_BYTES) + 2 * (row + state + _ACCESS_BYTES) + 2 * row + _ID_BYTES


def piece_cost(
    table: PlacedTable, requesters: int, costs: OwnerCosts, *, rows: float = 1.0, width: int = 0
) -> float:
    """Seconds a step for the owner of a share `rows` of the table's rows and `width` columns of it (0 = all)."""
    width = width or table.dim
    uniques, ids = (table.uniques or 0.0) * rows * requesters, (table.ids or 0.0) * rows * requesters
    row, state = 4 * width, 4 if table.row_wise_rule else 4 * width
    memory = uniques * ((row + _ACCESS_BYTES) + 2 * (row + state + _ACCESS_BYTES))
    network = uniques * (2 * row + _ID_BYTES)
    return memory / costs.memory_bytes_s + network / costs.network_bytes_s + ids * costs.id_s + costs.piece_s


def imbalance(load_N: np.ndarray) -> float:
    """N · max / sum: 1 = even, N = all at one owner. 1 of no load."""
    total = float(load_N.sum())
    return len(load_N) * float(load_N.max()) / total if total else 1.0


def plain(costs: OwnerCosts) -> Mapping[str, Any]:
    """For JSON; `costs_of` takes it back."""
    return dataclasses.asdict(costs)
