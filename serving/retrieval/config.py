"""Settings of retrieval."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.schema.settings import Settings, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServesItems(Settings):
    """A program that finds items in a catalogue."""

    items: str = setting("", "catalogue, a JSON line an item (docs/retrieval.md); '' = no retrieval")
    items_index: Literal["exact", "ivf"] = setting(
        "exact", "every item is compared, or those of the nearest lists (package extra retrieval)"
    )
    items_probed: float = setting(0.1, "ivf: share of the lists that are looked through", gt=0, le=1)
    items_refreshed: int = setting(
        2000,
        "items a second, at most, whose vectors are made anew because rows changed",
        ge=1,
        le=1_000_000,
    )
