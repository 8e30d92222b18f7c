"""Versions of the model that are swapped while a serving program answers."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import statistics
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.question import Work
from benchmarks.workloads import data
from benchmarks.workloads.serving.overload import DEADLINE_MS, Load, Served
from benchmarks.workloads.serving.program import requests_of, serving_program
from benchmarks.workloads.shared import Shared
from models.build import build_model, load_model_config
from runtime import manifest as manifests
from runtime import tensor_file
from runtime.checkpoint_store import FileStore
from runtime.kafka.topics import DEFAULT_BUCKETS, DEFAULT_PARTITIONS
from runtime.manifest import Manifest

EVERY_S = 1.05  # a little longer than serving takes to look again
_KEPT = 3


class Commits:
    """Commits of a model as a trainer makes them, with two sets of weights in turns."""

    def __init__(self, folder: Path) -> None:
        self.store, self.seq = FileStore(folder), 0
        self.schema, self.model = data.demo_schema(), load_model_config("")
        weights = build_model(self.schema, self.model, 0).state_dict()
        scaled = ({f"model.{name}": (t * scale).numpy() for name, t in weights.items()} for scale in (1.0, 1.01))
        self._files = [tensor_file.encode(tensors, {}) for tensors in scaled]

    def commit(self) -> None:
        self.seq += 1
        file = manifests.store_file(self.store, manifests.dense_name(self.seq, 1), self._files[self.seq % 2])
        manifest = Manifest(
            seq=self.seq,
            incarnation=1,
            previous={"seq": self.seq - 1, "checksum": ""},
            step=self.seq,
            watermark_ms=0,
            schema=f"{self.schema.fingerprint:016x}",
            seed=0,
            num_shards=1,
            num_buckets=DEFAULT_BUCKETS,
            num_partitions=DEFAULT_PARTITIONS,
            kafka={},
            rows_end={},
            shards={},
            dense=file,
            model=dataclasses.asdict(self.model),
            workers={},
        )
        self.store.create(manifest.name, manifest.encode())
        if self.seq > _KEPT:
            self.store.delete(manifests.manifest_name(self.seq - _KEPT))
            self.store.delete(manifests.dense_name(self.seq - _KEPT, 1))

    def run(self, stop: threading.Event) -> None:
        """One each EVERY_S until `stop`."""
        while not stop.wait(EVERY_S):
            self.commit()


class Loaded:
    """A serving program under load, and the store that it follows."""

    def __init__(self, served: Served, commits: Commits, address: tuple[str, int]) -> None:
        self.served, self.commits = served, commits
        self._url = "http://{}:{}/metrics".format(*address)

    def num_swaps(self) -> int:
        with urllib.request.urlopen(self._url, timeout=30) as answer:
            found = re.search(rb"^roostream_serving_version_swaps (\S+)", answer.read(), re.MULTILINE)
        return int(float(found[1])) if found else 0


class SwappedLoad(Load):
    """`swaps`: with a commit each EVERY_S; else with none."""

    def __init__(self, loaded: Loaded, swaps: bool, times: float, seconds: float) -> None:
        super().__init__(loaded.served, times, seconds)
        self._loaded, self._swaps, self._num_swaps = loaded, swaps, 0

    def step(self) -> None:
        before, stop = self._loaded.num_swaps(), threading.Event()
        thread = threading.Thread(target=self._loaded.commits.run, args=(stop,))
        if self._swaps:
            thread.start()
        try:
            super().step()
        finally:
            stop.set()
            if self._swaps:
                thread.join()
        self._num_swaps = self._loaded.num_swaps() - before

    def figures(self) -> dict[str, float]:
        took_ms = sorted(1e3 * a.took_s for a in self.answered if a.status == 200) or [0.0]
        return {
            "swaps": self._num_swaps,
            "asked": len(self.answered),
            "failed": sum(a.status != 200 for a in self.answered),
            "p50, ms": statistics.median(took_ms),
            "p99, ms": took_ms[int(0.99 * (len(took_ms) - 1))],
            "most that a request was sent late, ms": 1e3 * max((a.late_s for a in self.answered), default=0.0),
        }


@contextlib.contextmanager
def under_load(swaps: bool, times: float, seconds: float, candidates: int) -> Iterator[Work]:
    """Units: requests answered 200. Subjects of one process load the same program, in turns."""
    with _loaded.of(candidates) as loaded:
        load = SwappedLoad(loaded, swaps, times, seconds)
        yield Work(load.step, load.units, load.figures)


@contextlib.contextmanager
def _open(candidates: int) -> Iterator[Loaded]:
    with serving_program(deadline_ms=DEADLINE_MS) as program:
        commits = Commits(program.store)
        commits.commit()
        served = Served(program, requests_of(candidates))
        try:
            yield Loaded(served, commits, program.address)
        finally:
            served.clients.close()


_loaded = Shared(_open)
