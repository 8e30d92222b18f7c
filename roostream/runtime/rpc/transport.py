"""The interface of calls between programs: one request, one response, arrays beside a small header.

Clients hold a `Transport`. `SocketTransport` (roostream/runtime/rpc/client.py) and `InMemoryTransport`
implement it, and the contract tests run over both. Request and response are a header that msgpack can encode
and a list of contiguous numpy arrays.
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
"""(method, header, arrays) → (header, arrays). Called by many threads at once. The caller receives a
RoostreamError of the handler as the same class with the same message. A TransportError or any other exception
arrives as UnavailableError."""


class Transport(Protocol):
    """A connection to one peer."""

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        """One request, one response. Thread-safe; concurrent calls are not ordered.

        **If it fails:** TransportError means that no response arrived: the peer may or may not have acted.
        Nothing is retried here, because only the caller knows whether the method is idempotent; the next call
        connects again. Every other error is the peer's response; after UnavailableError the peer may have
        done part of the work.
        """

    def close(self) -> None:
        """Idempotent; calls in flight fail."""


class InMemoryTransport:
    """Calls the handler in the caller's thread. `fail_next` injects a fault before or after the handler
    runs."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.down = False
        self._faults: list[tuple[str, str]] = []

    def fail_next(self, method: str, when: str = "before") -> None:
        """The next call of `method` fails `before` the handler runs, or `after` it (the response is lost)."""
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
