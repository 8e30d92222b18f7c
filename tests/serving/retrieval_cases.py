"""A process of serving_cases.py with a catalogue and a cascade, and its keeper turned by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from roostream.models.config import CascadeConfig, ModelConfig, TwoTowerConfig
from roostream.runtime.clock import FakeClock
from serving.build import open_retrieval
from serving.http.app import HttpInterface
from serving.rank import Hydration
from serving.retrieval.catalogue import Catalogue, read_catalogue
from serving.retrieval.item_vectors import ItemVectorUpdater
from serving.scorer import RowReader, Version, build_version
from serving.versions.idle_gate import IdleGate
from tests.serving.serving_cases import MODEL, NOW_MS, SCHEMA, Built, build

TOWERS = TwoTowerConfig(width=4, user_layers=(6,), item_layers=(6,), item_floats=("age_h",))
CASCADE = CascadeConfig(
    **{f.name: getattr(MODEL, f.name) for f in dataclasses.fields(MODEL) if f.name != "kind"},
    retrieval=TOWERS,
)
NUM_ITEMS = 60


def item_of(item: int) -> dict[str, Any]:
    """A line of the catalogue; every third id is a text, some features are missing."""
    row: dict[str, Any] = {"item_id": f"i{item}" if item % 3 == 0 else item}
    row |= {"topics": [item % 5, 7]} if item % 2 else {}
    row |= {"age_h": item / 2} if item % 4 else {}
    return row | {
        "attributes": {"lang": ("da", "en")[item % 2], "tags": [item % 5, "all"], "paid": item % 7 == 0}
    }


def whole() -> Catalogue:
    """Three times as many items as a request may have."""
    return read_catalogue(SCHEMA, [json.dumps(item_of(i)).encode() for i in range(NUM_ITEMS)])


def write_items(path: Path, items: list[dict[str, Any]]) -> Path:
    """In place of what was there, as a program that makes catalogues should."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return fresh.replace(path)


def packed_version(name: str = "1-2", config: ModelConfig = CASCADE, seed: int = 0) -> Version:
    return build_version(name, SCHEMA, config, seed, {})


@dataclasses.dataclass(kw_only=True)
class Retrieving:
    """`turn` is a turn of the keeper, some seconds after the last."""

    built: Built
    keeper: ItemVectorUpdater
    clock: FakeClock
    items: Path

    @functools.cached_property
    def app(self) -> HttpInterface:
        """Made once: it registers its figures."""
        return HttpInterface(self.built.context)

    def turn(self, after_s: float = 1.0) -> None:
        self.clock.advance(after_s)
        self.keeper.turn()

    def serve(self, version: Version) -> None:
        self.built.service.versions.install(version)


def retrieving(
    home: Path,
    rows: RowReader,
    hydrator: Hydration | None = None,
    *,
    version: Version | None = None,
    **settings: Any,
) -> Retrieving:
    """The catalogue is read and its vectors are made with the first turn; none has been."""
    home.mkdir(exist_ok=True)
    items = write_items(home / "items.jsonl", [item_of(i) for i in range(NUM_ITEMS)])
    clock = FakeClock(NOW_MS)
    built = build(home, rows, hydrator, clock=clock, items=str(items), **settings)
    built.service.versions.install(version or packed_version())
    parts, service = built.context, built.service
    keeper = open_retrieval(parts.config, SCHEMA, service, IdleGate(clock), clock, parts.metrics.registry)
    assert keeper is not None
    built.context = dataclasses.replace(parts, items=keeper)
    return Retrieving(built=built, keeper=keeper, clock=clock, items=items)
