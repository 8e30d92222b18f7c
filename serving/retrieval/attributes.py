"""By what items can be filtered: names and values of a catalogue. An item has none, one or several values of a name.

Letters: I items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from roostream.errors import nearest
from serving.errors import RequestError, shown

AttributeValue: TypeAlias = bool | int | str


class Attributes:
    """Name → value → the items that have it. Immutable."""

    def __init__(self, given_I: Sequence[Mapping[str, Any]]) -> None:
        """Of each item, in the catalogue's order. `check_attributes` has seen them."""
        self.num_items = len(given_I)
        found: dict[str, dict[str, list[int]]] = {}
        for slot, given in enumerate(given_I):
            for name, value in given.items():
                for each in dict.fromkeys(_texts(value)):
                    found.setdefault(name, {}).setdefault(each, []).append(slot)
        self._slots = {
            name: {v: np.array(s, np.int64) for v, s in values.items()} for name, values in found.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def allowed(self, wanted: Mapping[str, AttributeValue | Sequence[AttributeValue]]) -> np.ndarray:
        """bool [I]: items that have, of each name, one of its values. Raises RequestError 400: no item has that name."""
        allowed_I = np.ones(self.num_items, np.bool_)
        for name, value in wanted.items():
            if name not in self._slots:
                message = f"no item has attribute {shown(name)!r}{nearest(shown(name), self._slots)}"
                raise RequestError(400, message, f"$.filter.{shown(name)}")
            have_I = np.zeros(self.num_items, np.bool_)
            for each in _texts(value):
                have_I[self._slots[name].get(each, _NONE)] = True
            allowed_I &= have_I
        return allowed_I


_NONE = np.zeros(0, np.int64)


def _texts(value: AttributeValue | Iterable[AttributeValue]) -> list[str]:
    """As JSON, where true isn't 1."""
    return [msgspec.json.encode(v).decode() for v in (value if isinstance(value, list | tuple) else (value,))]


def check_attributes(given: object) -> str:
    """What is wrong with an item's `attributes`; "" = nothing."""
    if not isinstance(given, dict):
        return f"expected attributes as an object, got {shown(given)!r}"
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, AttributeValue):
                return f"expected attribute {shown(name)!r} as a text, an integer, true, false or a list of them, got {shown(each)}"
    return ""
