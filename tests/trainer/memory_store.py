"""An in-memory checkpoint store with injected faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.checkpoint_store import check_range
from roostream.runtime.store_identity import IDENTITY_NAME


class MemoryStore:
    """A `CheckpointStore` in a dict. `fail_next("create", "after")` makes the next `create` fail after the
    object exists."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {IDENTITY_NAME: json.dumps({"store": "0" * 32}).encode()}
        self.before_create: Callable[[str], object] = lambda name: None
        self.before_part: Callable[[str, int], object] = lambda name, part: None
        self._faults: list[tuple[str, str]] = []

    def fail_next(self, method: str, when: str = "before") -> None:
        self._faults.append((method, when))

    def damage(self, name: str) -> None:
        """Flip one bit in the middle of an object."""
        data = bytearray(self.objects[name])
        data[len(data) // 2] ^= 1
        self.objects[name] = bytes(data)

    def create(self, name: str, data: bytes) -> bool:
        self._fault("create", "before")
        self.before_create(name)
        if name in self.objects:
            return False
        self.objects[name] = data
        self._fault("create", "after")
        return True

    def put(self, name: str, data: bytes) -> None:
        self._fault("put", "before")
        self.objects[name] = data

    def put_stream(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        """`before_part(name, n)` is called before the n-th part of an upload, and once more before the object
        exists."""
        parts: list[bytes] = []
        for chunk in chunks:
            self.before_part(name, len(parts))
            self._fault("put_stream", "before")
            parts.append(chunk)
        self.before_part(name, len(parts))
        data = b"".join(parts)
        assert len(data) == size, (name, len(data), size)
        self.objects[name] = data
        self._fault("put_stream", "after")

    def get(self, name: str) -> bytes:
        if name != IDENTITY_NAME:  # every other call reads it, and would use up the fault
            self._fault("get", "before")
        if name not in self.objects:
            raise CheckpointError(f"{name} is absent")
        return self.objects[name]

    def get_range(self, name: str, start: int, size: int) -> bytes:
        return check_range(name, start, size, self.get(name)[start : start + size])

    def list(self, prefix: str) -> list[str]:
        self._fault("list", "before")
        return sorted(n for n in self.objects if n.startswith(f"{prefix}/"))

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def sweep(self) -> None:
        """Do nothing: this store has no unfinished writes."""

    def _fault(self, method: str, when: str) -> None:
        if (method, when) in self._faults:
            self._faults.remove((method, when))
            raise UnavailableError("the store can't be written (No space left on device)")
