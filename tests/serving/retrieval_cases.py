"""A serving process of serving_cases.py with a catalogue and a cascade model (retrieval, then ranking). Tests
run the updater of the item vectors step by step."""

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
from tests.serving.serving_cases import MODEL, NOW_MS, SCHEMA, InProcessServing, build_serving

TOWERS = TwoTowerConfig(width=4, user_layers=(6,), item_layers=(6,), item_floats=("age_h",))
CASCADE = CascadeConfig(
    **{f.name: getattr(MODEL, f.name) for f in dataclasses.fields(MODEL) if f.name != "kind"},
    retrieval=TOWERS,
)
NUM_ITEMS = 60


def make_item(item: int) -> dict[str, Any]:
    """Return a line of the catalogue. Every third id is a text, and some features are missing."""
    row: dict[str, Any] = {"item_id": f"i{item}" if item % 3 == 0 else item}
    row |= {"topics": [item % 5, 7]} if item % 2 else {}
    row |= {"age_h": item / 2} if item % 4 else {}
    return row | {
        "attributes": {"lang": ("da", "en")[item % 2], "tags": [item % 5, "all"], "paid": item % 7 == 0}
    }


def make_catalogue() -> Catalogue:
    """Return a catalogue with three times as many items as a request may have."""
    return read_catalogue(SCHEMA, [json.dumps(make_item(i)).encode() for i in range(NUM_ITEMS)])


def write_items(path: Path, items: list[dict[str, Any]]) -> Path:
    """Replace the file atomically, as a program that writes catalogues should."""
    new_file = path.with_suffix(".new")
    new_file.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return new_file.replace(path)


def make_version(name: str = "1-2", config: ModelConfig = CASCADE, seed: int = 0) -> Version:
    return build_version(name, SCHEMA, config, seed, {})


@dataclasses.dataclass(kw_only=True)
class RetrievalServing:
    """A serving process with retrieval. `turn` runs one turn of the updater, some seconds after the last."""

    serving: InProcessServing
    updater: ItemVectorUpdater
    clock: FakeClock
    items: Path

    @functools.cached_property
    def app(self) -> HttpInterface:
        """Create the application once, because it registers metrics."""
        return HttpInterface(self.serving.context)

    def turn(self, after_s: float = 1.0) -> None:
        self.clock.advance(after_s)
        self.updater.turn()

    def serve(self, version: Version) -> None:
        self.serving.service.versions.install(version)


def make_retrieval(
    home: Path,
    rows: RowReader,
    hydrator: Hydration | None = None,
    *,
    version: Version | None = None,
    **settings: Any,
) -> RetrievalServing:
    """Build a serving process with retrieval. Only the first turn reads the catalogue and computes its
    vectors."""
    home.mkdir(exist_ok=True)
    items = write_items(home / "items.jsonl", [make_item(i) for i in range(NUM_ITEMS)])
    clock = FakeClock(NOW_MS)
    serving = build_serving(home, rows, hydrator, clock=clock, items=str(items), **settings)
    serving.service.versions.install(version or make_version())
    parts, service = serving.context, serving.service
    updater = open_retrieval(parts.config, SCHEMA, service, IdleGate(clock), clock, parts.metrics.registry)
    assert updater is not None
    serving.context = dataclasses.replace(parts, items=updater)
    return RetrievalServing(serving=serving, updater=updater, clock=clock, items=items)
