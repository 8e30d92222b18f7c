"""What does it cost to find items, and to keep their vectors fresh?

Item retrieval: searches over generated vectors, and updates and queries of the demo's catalog.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.common import samples as data
from benchmarks.common.http_interface import NOW_MS
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.serving_request import Online, fill
from param_server.replica.replica import Replica
from roostream.models.config import CascadeConfig, TwoTowerConfig
from roostream.models.inputs import Inputs, build_inputs
from roostream.runtime.clock import FakeClock
from roostream.wire.batch import Batch
from roostream.wire.lookup import build_lookup
from serving.answer import ENCODER
from serving.build import open_retrieval
from serving.config import RetrievalSettings
from serving.http.retrieval_routes import RetrieveParser
from serving.rank import RankService
from serving.retrieval.catalogue import load_catalogue
from serving.retrieval.item_vectors import AT_ONCE, ItemVectorUpdater, RowChangeDetector, encode_items
from serving.retrieval.nearest_items import InvertedLists, NearestItems, load_faiss, recall
from serving.retrieval.retriever import Shortlist
from serving.scorer import first_version
from serving.versions.idle_gate import IdleGate
from serving.versions.loaded_versions import LoadedVersions

K, WIDTH, DIRECTIONS, QUERIES = 100, 32, 500, 64


def vectors(n: int, seed: int) -> np.ndarray:
    """Random vectors of length 1, float32 [n, WIDTH]. Those of all seeds lie around the same directions."""
    around = np.random.default_rng(0).normal(size=(DIRECTIONS, WIDTH))
    rng = np.random.default_rng(seed)
    x_ID = around[rng.integers(0, DIRECTIONS, n)] + 0.7 * rng.normal(size=(n, WIDTH))
    return np.ascontiguousarray(x_ID / np.linalg.norm(x_ID, axis=1, keepdims=True), np.float32)


@contextlib.contextmanager
def search(how: str, num_items: int) -> Iterator[Work]:
    """`how`: exact, ivf, sorted, products, or faiss's flat index."""
    vector_ID, query_ND = vectors(num_items, 1), vectors(QUERIES, 2)
    items = NearestItems(vector_ID.copy(), (lambda v: InvertedLists(v, 0.1)) if how == "ivf" else None)
    ways: dict[str, Callable[[np.ndarray], object]] = {
        "exact": lambda q: items.best(q, K),
        "ivf": lambda q: items.best(q, K),
        "sorted": lambda q: np.argsort(-(vector_ID @ q), kind="stable")[:K],
        "products": lambda q: vector_ID @ q,
    }
    if how == "flat":
        faiss = load_faiss()
        faiss.omp_set_num_threads(1)
        flat = faiss.IndexFlatIP(WIDTH)
        flat.add(vector_ID)
        ways["flat"] = lambda q: flat.search(q[None], K)
    way, turns = ways[how], itertools.cycle(query_ND)
    figures = (
        {"recall": float(np.mean([recall(items.best(q, K), items.exact(q, K)) for q in query_ND]))}
        if how == "ivf"
        else {}
    )
    yield Work(lambda: way(next(turns)), figures=lambda: figures)


class Case:
    """A service with a catalogue of encoded items."""

    def __init__(self, folder: Path, num_items: int) -> None:
        torch.set_num_threads(1)
        self.schema, self.file = data.demo_schema(), folder / "items.jsonl"
        lines = (json.dumps({"item_id": 1 + i, "category": [1 + i % 50]}) for i in range(num_items))
        self.file.write_text("".join(f"{line}\n" for line in lines))
        self.replica, config = Replica(self.schema, 0), CascadeConfig(retrieval=TwoTowerConfig(width=WIDTH))
        self.catalogue = load_catalogue(self.schema, self.file)
        fill(self.replica, self.schema, build_lookup(self.catalogue.items))
        self.service = RankService(
            self.schema, LoadedVersions(first_version(self.schema, config, 0)), self.replica
        )
        self.updater = self._open_updater()
        self.bodies = RetrieveParser(self.schema, 0)
        self.shortlist = Shortlist(self.service, self.updater.retriever)
        online = Online(self.schema, 1)
        history = next(value for name, value in online.ro.items() if name == "history")
        self.body = msgspec.json.encode({"user_id": 17, "ro": {"history": _plain(history)}})

    def _open_updater(self) -> ItemVectorUpdater:
        clock = FakeClock(NOW_MS)
        settings = RetrievalSettings(items=str(self.file))
        updater = open_retrieval(
            settings, self.schema, self.service, IdleGate(clock), clock, CollectorRegistry()
        )
        assert updater is not None
        updater.turn()
        assert updater.retriever.index is not None
        return updater

    def inputs(self, items: Batch) -> Inputs:
        lookup = build_lookup(items)
        return build_inputs(items, lookup, self.replica.gather(lookup))

    def retrieve(self) -> None:
        result = self.updater.retriever.retrieve(self.bodies.retrieve(self.body), NOW_MS)
        assert len(result.given) == K

    def recommend(self) -> None:
        request, num_shown = self.bodies.recommend(self.body)
        listed, _ = self.shortlist.choose(request, num_shown, NOW_MS)
        assert listed is not None
        ENCODER.encode(self.service.rank(listed, NOW_MS).answer)


def _without_graph(tower: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> None:
    with torch.inference_mode():
        tower(inputs)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(column) for name, column in value.items()}
    return np.asarray(value).tolist()


@contextlib.contextmanager
def asked(what: str, num_items: int) -> Iterator[Work]:
    """`what`: retrieve, recommend, rank the shown items, or the request tower alone."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), num_items)
        if what == "rank":
            listed, _ = case.shortlist.choose(case.bodies.recommend(case.body)[0], 10, NOW_MS)
            assert listed is not None
            yield Work(lambda: ENCODER.encode(case.service.rank(listed, NOW_MS).answer))
        elif what == "tower":
            index = case.updater.retriever.index
            assert index is not None
            inputs = case.inputs(index.catalogue.take(np.arange(1)))
            yield Work(lambda: _without_graph(index.model.request_vectors, inputs))
        else:
            yield Work(case.retrieve if what == "retrieve" else case.recommend)


@contextlib.contextmanager
def kept(what: str, num_items: int) -> Iterator[Work]:
    """`what`: vectors of some items, the item tower alone, or a check of all rows for changes."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), num_items)
        index = case.updater.retriever.index
        assert index is not None
        if what == "vectors":
            some = index.catalogue.take(np.arange(min(AT_ONCE, num_items)))
            yield Work(lambda: encode_items(index.model, case.replica, some), some.num_candidates)
        elif what == "tower":
            inputs = case.inputs(index.catalogue.take(np.arange(min(AT_ONCE, num_items))))
            yield Work(lambda: _without_graph(index.model.item_vectors, inputs), len(inputs.item_B))
        else:
            changed = RowChangeDetector(index.catalogue.items)
            yield Work(
                lambda: [changed.changed_items(case.replica, chunk) for chunk in changed.chunks()], num_items
            )


_HERE = "benchmarks.retrieve"
_NO_FAISS = "" if importlib.util.find_spec("faiss") else "package extra retrieval isn't installed"


def _exact(num_items: int) -> Row:
    return Row(
        name=f"100 of {num_items:,} items, every one compared",
        unit="searches",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("exact", f"{_HERE}:search", ("exact", num_items)),
            Subject("sorted whole", f"{_HERE}:search", ("sorted", num_items), "before"),
            Subject("the products alone", f"{_HERE}:search", ("products", num_items), "limit"),
        ),
    )


def _lists(num_items: int) -> Row:
    return Row(
        name=f"100 of {num_items:,} items, by a tenth of the lists",
        unit="searches",
        shows="cost",
        clock="cpu",
        skipped=_NO_FAISS,
        subjects=(
            Subject("lists, then vectors of now", f"{_HERE}:search", ("ivf", num_items)),
            Subject("exact", f"{_HERE}:search", ("exact", num_items), "before"),
            Subject("faiss, every one compared", f"{_HERE}:search", ("flat", num_items), "peer"),
        ),
    )


def _kept(num_items: int) -> Row:
    return Row(
        name=f"a catalogue of {num_items:,} items of the demo",
        unit="items",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("their vectors", f"{_HERE}:kept", ("vectors", num_items)),
            Subject("a look at their rows", f"{_HERE}:kept", ("look", num_items), "stage"),
            Subject("the tower alone", f"{_HERE}:kept", ("tower", num_items), "limit"),
        ),
    )


def _asked(num_items: int) -> Row:
    return Row(
        name=f"a request, {num_items:,} items of the demo, cascade",
        unit="requests",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("retrieve 100", f"{_HERE}:asked", ("retrieve", num_items)),
            Subject("recommend 10 of 100", f"{_HERE}:asked", ("recommend", num_items)),
            Subject("rank 10", f"{_HERE}:asked", ("rank", num_items), "stage"),
            Subject("the request's tower alone", f"{_HERE}:asked", ("tower", num_items), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="retrieve",
    summary="What does it cost to find items, and to keep their vectors fresh?",
    rows=(*map(_exact, (10_000, 100_000)), *map(_lists, (20_000, 100_000)), _kept(10_000), _asked(10_000)),
    interpretation="""\
Comparing every item costs its dot products and grows with the catalogue. The inverted lists compare a tenth
of the items, at the recall beside the figure (against the exact search). A look at all rows is the cost per
second of freshness when nothing has changed; a vector is the cost of an item whose rows have changed. A
recommendation is a retrieval, a pass over the found items and a rank of the shown ones. Vectors are 32 wide
around 500 directions; requests run in process, without HTTP, Redis and Kafka.""",
)
