"""What each worker has for each other one, in one exchange where it is about as much as the last time, in two else.

    exchange   a peer's block: [size of its part · size of its sender's largest part · the first `room` bytes of the part]
    another    what is beyond, of all parts: only if somebody's largest is beyond `room`, which all have been told
    room       from what everyone's largest part was at the last swap of the same name, so the same for all

torch's groups exchange what both sides know the size of. To tell sizes first would be an exchange of its own at each swap.

Letters: W workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Exchange = Callable[[np.ndarray, np.ndarray, list[int], list[int]], None]
"""(got, sent, sizes got, sizes sent): uint8 of all workers behind each other, and how many each has; `got` is written."""

_HEAD = 16
_MIN_ROOM = 1 << 10
_MAX_ROOM = 8 << 20  # what one unusual swap may cost the next


class AllToAll:
    """Of one worker of a meeting. All call it, in the same order and with the same names."""

    def __init__(self, index: int, workers: int, exchange: Exchange) -> None:
        self.index, self.workers, self.exchange = index, workers, exchange
        self.rooms: dict[str, int] = {}
        self.num_exchanges = 0

    def swap(self, parts: Sequence[np.ndarray], about: str) -> list[np.ndarray]:
        """What each worker has for this one (uint8), given what this one has for each; its own part comes back as it is. `about`:
        the swap's name. Raises as `exchange`."""
        room, others = self.rooms.get(about, _MIN_ROOM), [n for n in range(self.workers) if n != self.index]
        largest = max((len(parts[n]) for n in others), default=0)
        sent_WB = np.empty((self.workers - 1, _HEAD + room), np.uint8)
        for block_B, n in zip(sent_WB, others, strict=True):
            block_B[:_HEAD].view(np.int64)[:] = len(parts[n]), largest
            block_B[_HEAD : _HEAD + len(parts[n])] = parts[n][:room]
        got_WB = np.empty_like(sent_WB)
        blocks = [0 if n == self.index else _HEAD + room for n in range(self.workers)]
        self._exchange(got_WB.reshape(-1), sent_WB.reshape(-1), blocks, blocks)
        sizes, largest_W = got_WB[:, :_HEAD].copy().view(np.int64).T
        most = max(largest, int(largest_W.max(initial=0)))
        got = {
            n: block_B[_HEAD : _HEAD + size]
            for n, block_B, size in zip(others, got_WB, sizes.tolist(), strict=True)
        }
        if most > room:
            beyond = self._beyond(parts, dict(zip(others, sizes.tolist(), strict=True)), room)
            got = {n: np.concatenate([got[n], beyond[n]]) for n in others}
        self.rooms[about] = min(max(most + most // 16, _MIN_ROOM) // 8 * 8, _MAX_ROOM)
        return [parts[n] if n == self.index else got[n] for n in range(self.workers)]

    def _beyond(self, parts: Sequence[np.ndarray], sizes: dict[int, int], room: int) -> list[np.ndarray]:
        wanted = [max(0, sizes.get(n, 0) - room) for n in range(self.workers)]
        rests = [part[:0] if n == self.index else part[room:] for n, part in enumerate(parts)]
        got = np.empty(sum(wanted), np.uint8)
        self._exchange(got, np.concatenate(rests), wanted, [len(rest) for rest in rests])
        return np.split(got, np.cumsum(wanted)[:-1])

    def _exchange(
        self, got: np.ndarray, sent: np.ndarray, sizes_got: list[int], sizes_sent: list[int]
    ) -> None:
        self.num_exchanges += 1
        self.exchange(got, sent, sizes_got, sizes_sent)
