"""Workers that hold rows meet twice: to sum gradients, and to swap rows (`param_server/row_exchange.py`).

Two groups, since a push may be made by a thread of its own beside the sum of the next turn.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from param_server.row_exchange import Peers, RowExchange
from trainer.process_group import GroupSpec, Reduction

_ROWS = " rows"


class ProcessGroup(Reduction, Peers, Protocol):
    """Who can do both; each meeting is for one of the two."""


class PeerRendezvous(Protocol):
    """As `Team`, for either."""

    address: str

    def join(self, meeting: GroupSpec) -> ProcessGroup: ...


class DualRendezvous:
    """See `Team`: that of `team`, and with each incarnation `rows` get the peers that they swap with."""

    def __init__(self, team: PeerRendezvous, rows: RowExchange) -> None:
        self.team, self.rows, self.address = team, rows, team.address

    def join(self, meeting: GroupSpec) -> Reduction:
        swapping = self.team.join(meeting._replace(about=_ROWS))
        self.rows.meet(swapping)
        return DualProcessGroup(self.team.join(meeting), swapping)


class DualProcessGroup:
    """See `Reduction`: sums by one of two meetings, and whatever ends ends both."""

    def __init__(self, summing: Reduction, swapping: Reduction) -> None:
        self.summing, self.swapping = summing, swapping
        self.index, self.workers = summing.index, summing.workers

    def sum(self, bucket_N: Tensor) -> None:
        self.summing.sum(bucket_N)

    def interrupt(self) -> None:
        self.summing.interrupt()
        self.swapping.interrupt()

    def leave(self) -> None:
        self.summing.leave()
        self.swapping.leave()
