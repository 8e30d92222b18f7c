"""Calls between our programs: one request, one answer, arrays beside a small header.

`Transport` is what clients hold; `SocketTransport` (roostream/runtime/rpc/client.py) and `InMemoryTransport` implement it, and the contract
tests run over both. A call names a method, gives a msgpack-able header and a list of contiguous numpy arrays, and gets the
same back. Frames are versioned and their sizes checked before memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from roostream.errors import RoostreamError, TransportError, UnavailableError

Header: TypeAlias = dict[str, Any]
Arrays: TypeAlias = Sequence[np.ndarray]
Answer: TypeAlias = tuple[Header, list[np.ndarray]]
Handler: TypeAlias = Callable[[str, Header, list[np.ndarray]], tuple[Header, Arrays]]
"""(method, header, arrays) → (header, arrays). Called from many threads at once. A RoostreamError that it raises reaches
the caller as the same class with the same message, but a TransportError, and anything else, as UnavailableError."""


class Transport(Protocol):
    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        """One call, one answer. Thread-safe; concurrent calls are not ordered.

        **If it fails:** TransportError means that no answer came: the peer may or may not have acted; nothing is retried here,
        because only the caller knows whether the method is idempotent. The next call dials again. Every other error is the
        peer's answer; UnavailableError may mean that it failed in the middle.
        """

    def close(self) -> None:
        """Idempotent; calls in flight fail."""


class InMemoryTransport:
    """Calls the handler in the caller's thread. `fail_next` injects a fault before or after the handler acts."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.down = False
        self._faults: list[tuple[str, str]] = []

    def fail_next(self, method: str, when: str = "before") -> None:
        """The next call of `method` fails `before` the peer acts, or `after` (the answer is lost)."""
        assert when in ("before", "after")
        self._faults.append((method, when))

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        fault = next((f for f in self._faults if f[0] == method), None)
        if fault:
            self._faults.remove(fault)
        if self.down or (fault and fault[1] == "before"):
            raise TransportError(f"{method}: injected fault before the call")
        try:
            answer_header, answer_arrays = self.handler(
                method, dict(header), [np.ascontiguousarray(a) for a in arrays]
            )
        except TransportError as error:
            raise UnavailableError(str(error)) from error
        except RoostreamError:
            raise
        except Exception as error:
            raise UnavailableError(f"{method}: the peer failed: {error!r}") from error
        if fault:
            raise TransportError(f"{method}: injected fault after the call")
        return dict(answer_header), [np.array(a) for a in answer_arrays]

    def close(self) -> None:
        self.down = True
