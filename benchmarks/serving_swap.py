"""Does a swap of the model version affect latency?

Swaps model versions while a serving program answers requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.common import samples as data
from benchmarks.common.open_load import Answer, rank_request
from benchmarks.common.serving_program import bodies_of, serving_program
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, WholeTurn
from benchmarks.serving_overload import DEADLINE_MS, Load, Served
from param_server.replica.replica import Replica
from roostream.models.build import build_model, load_model_config
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS, DEFAULT_PARTITIONS
from roostream.runtime.manifest import Manifest
from serving.rank import RankService
from serving.rank_json import JsonParser
from serving.scorer import build_version
from serving.versions.loaded_versions import LoadedVersions

EVERY_S = 1.05  # a little longer than serving's poll interval
_KEPT = 3
_TOLERANCE = 1e-5


class Commits:
    """Commits of a model as a trainer makes them, with two sets of weights in turns."""

    def __init__(self, folder: Path) -> None:
        self.store, self.seq = FileStore(folder), 0
        self.schema, self.model = data.demo_schema(), load_model_config("")
        initial, rng = build_model(self.schema, self.model, 0).state_dict(), torch.Generator().manual_seed(0)
        self.weights = [
            {name: t + 0.1 * torch.randn(t.shape, generator=rng) for name, t in initial.items()}
            for _ in range(2)
        ]
        files = ({f"model.{name}": t.numpy() for name, t in weights.items()} for weights in self.weights)
        self._files = [tensor_file.encode(tensors, {}) for tensors in files]

    def weights_of(self, version: str) -> int:
        return int(version.rpartition("-")[2]) % len(self.weights)

    def commit(self) -> None:
        self.seq += 1
        file = manifests.store_file(
            self.store, manifests.dense_name(self.seq, 1), self._files[self.seq % len(self._files)]
        )
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
    """A serving program under load, the store that it follows, and what it should answer."""

    def __init__(self, served: Served, commits: Commits, expected_2RnT: list[np.ndarray]) -> None:
        self.served, self.commits = served, commits
        self._expected_2RnT = expected_2RnT
        self._url = "http://{}:{}/metrics".format(*served.program.address)

    def num_swaps(self) -> int:
        with urllib.request.urlopen(self._url, timeout=30) as answer:
            match = re.search(rb"^roostream_serving_version_swaps_total (\S+)", answer.read(), re.MULTILINE)
        return int(float(match[1])) if match else 0

    def is_right(self, answer: Answer) -> bool:
        """Whether an answer has the scores of the version that it names."""
        ranking = msgspec.json.decode(answer.body)
        expected_nT = self._expected_2RnT[self.commits.weights_of(ranking["model_version"])][answer.number]
        return bool(
            np.allclose(
                [list(row.values()) for row in ranking["scores"]], expected_nT, rtol=0, atol=_TOLERANCE
            )
        )


def expected(commits: Commits, bodies: Sequence[bytes]) -> list[np.ndarray]:
    """Scores [requests, n, T] by either set of weights. AssertionError: a request has the same scores by
    both."""
    schema, replica, parser = commits.schema, Replica(commits.schema, 0), JsonParser(commits.schema)
    both = []
    for weights in commits.weights:
        service = RankService(
            schema, LoadedVersions(build_version("1-1", schema, commits.model, 0, weights)), replica
        )
        scored = (service.rank(parser.parse(body), data.T0_MS) for body in bodies)
        both.append(np.stack([ranked.scores_nT for ranked in scored]))
    assert (np.abs(both[0] - both[1]).max((1, 2)) > 10 * _TOLERANCE).all()
    return both


def with_fixed_hour(body: bytes) -> bytes:
    """The request with a fixed hour, so that scores do not depend on the time."""
    request = msgspec.json.decode(body)
    request["ro"]["hour_of_day"] = 12.0
    return msgspec.json.encode(request)


class SwappedLoad(Load):
    """`swaps`: with a commit each EVERY_S; else without commits."""

    def __init__(self, loaded: Loaded, swaps: bool, times: float, seconds: float) -> None:
        super().__init__(loaded.served, times, seconds)
        self._loaded, self._swaps, self._num_swaps = loaded, swaps, 0

    def run(self, seconds: float) -> None:
        before, stop = self._loaded.num_swaps(), threading.Event()
        thread = threading.Thread(target=self._loaded.commits.run, args=(stop,))
        if self._swaps:
            thread.start()
        try:
            super().run(seconds)
        finally:
            stop.set()
            if self._swaps:
                thread.join()
        self._num_swaps = self._loaded.num_swaps() - before

    def figures(self) -> dict[str, float]:
        ok = [a for a in self.answers if a.status == 200]
        latencies = self.latencies()
        return {
            "swaps": self._num_swaps,
            "asked": len(self.answers),
            "failed": len(self.answers) - len(ok),
            "of them 429": sum(a.status == 429 for a in self.answers),
            "other scores than its version's": sum(not self._loaded.is_right(a) for a in ok),
            "p50, ms": latencies["p50"],
            "p99, ms": latencies["p99"],
            "most that a request was sent late, ms": self.latest_ms(),
        }


@contextlib.contextmanager
def under_load(swaps: bool, times: float, seconds: float, candidates: int) -> Iterator[WholeTurn]:
    """Units: requests answered 200. Subjects of one process load the same program, in turns."""
    with _loaded.open(candidates) as loaded:
        load = SwappedLoad(loaded, swaps, times, seconds)
        yield WholeTurn(load.turn, load.warm_up)


@contextlib.contextmanager
def _open(candidates: int) -> Iterator[Loaded]:
    with serving_program(deadline_ms=DEADLINE_MS) as program:
        commits = Commits(program.store)
        commits.commit()
        bodies = [with_fixed_hour(body) for body in bodies_of(candidates)]
        served = Served(program, [rank_request(body) for body in bodies], keeps_bodies=True)
        try:
            yield Loaded(served, commits, expected(commits, bodies))
        finally:
            served.clients.close()


_loaded = SharedSetup(_open)

_UNDER_LOAD = "benchmarks.serving_swap:under_load"
_TIMES, _SWAPPING_S, _STEADY_S, _CANDIDATES = 0.5, 36.0, 12.0, 20
_SWAPPING, _STEADY = "a swap a second", "no swap"


def _slower(results: Mapping[str, SubjectResult]) -> Mapping[str, float]:
    return {
        "p99 with swaps / without": results[_SWAPPING].figures["p99, ms"]
        / max(results[_STEADY].figures["p99, ms"], 1e-9)
    }


BENCHMARK = Benchmark(
    name="serving-swap",
    summary="Do clients notice when the model is swapped?",
    rows=(
        Row(
            name="rank requests at half of the capacity, answered 200 within 1 s",
            unit="requests",
            subjects=(
                Subject(_SWAPPING, _UNDER_LOAD, (True, _TIMES, _SWAPPING_S, _CANDIDATES)),
                Subject(_STEADY, _UNDER_LOAD, (False, _TIMES, _STEADY_S, _CANDIDATES), "limit"),
            ),
            derives=_slower,
        ),
    ),
    interpretation="""\
Each second a commit is written into the store that a serving program follows. Serving verifies the files,
builds the model, tries it with 32 recent requests and swaps it, all in a thread beside the requests. Three
turns of 36 s make about 100 swaps a run. Versions alternate between two sets of weights, and the scores of
each answer are compared with the version that it names (1e-5). The targets are no failed request (anything
but 200) and a p99 of at most 1.5 times that without swaps, in the same run; 429 with and without swaps
means that other work has the core. Program and load are those of serving-overload at half the capacity.""",
    slice_s=_SWAPPING_S,
    rounds=3,
)
