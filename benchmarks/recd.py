"""What do clustering, deduplicated look-ups and deduplicated compute give training?

Trains the same impressions in each of RecD's steps: unordered, clustered by user, deduplicated.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from benchmarks.common.dataset_paths import EBNERD, absent
from benchmarks.common.flop_count import bytes_of_batch, flops
from benchmarks.common.public_logs import samples_of
from benchmarks.common.rebatch import cut, shuffled
from benchmarks.common.shard import local_client
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, TurnResult, WholeTurn
from benchmarks.harness.fixture_cache import cached_bytes
from benchmarks.roo_vs_expanded import A_BATCH, A_REQUEST, ARCHITECTURES, FLOP, Learner
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.dedup import group_impressions, order_by_user
from roostream.wire.lookup import build_lookup

HISTORY_IDS = "history ids looked up an impression"


def derived(results: Mapping[str, SubjectResult]) -> Mapping[str, float]:
    """History ids and FLOPs of mixed impressions over those of RecD's steps."""
    first, ratios = results["impressions, mixed"].figures, {}
    for name in ("requests, clustered", "requests, clustered, shared", "impressions, clustered, IKJT"):
        if name in results:
            figures = results[name].figures
            ratios[f"history ids: mixed impressions / {name}"] = first[HISTORY_IDS] / figures[HISTORY_IDS]
            ratios[f"FLOPs: mixed impressions / {name}"] = first[FLOP] / figures[FLOP]
    return ratios


@functools.cache
def users_batch(users: int, history: int) -> Batch:
    schema, samples = samples_of("EB-NeRD", users, history)
    return Decoder(schema, {schema.fingerprint: schema}.get).decode(samples)[0]


def clustered(batch: Batch) -> Batch:
    """Requests of a user next to each other, as the warehouse has them."""
    return batch.take_requests(order_by_user(batch))


STEPS: dict[str, Callable[[Batch, int], Sequence[Batch]]] = {
    "impressions, mixed": lambda batch, size: cut(shuffled(batch.expand()), size),
    "impressions, clustered": lambda batch, size: cut(clustered(batch).expand(), size),
    "impressions, clustered, IKJT": lambda batch, size: cut(clustered(batch).expand(), size),
    "requests": cut,
    "requests, shared": cut,
    "requests, clustered": lambda batch, size: cut(clustered(batch), size),
    "requests, clustered, shared": lambda batch, size: cut(clustered(batch), size),
}
"""How batches are made of requests in time order. IKJT: exact deduplication in the step. Shared: also
partial deduplication of histories."""


@contextlib.contextmanager
def climbed(architecture: str, step_name: str, users: int, history: int, size: int) -> Iterator[WholeTurn]:
    """A turn trains all batches once; units are impressions."""
    torch.set_num_threads(1)
    batch = users_batch(users, history)
    arriving = STEPS[step_name](batch, size)
    convert = group_impressions if step_name.endswith("IKJT") else lambda each: each
    with tempfile.TemporaryDirectory() as folder:
        client = local_client(batch.schema, folder)
        learner = Learner(
            ARCHITECTURES[architecture], client, batch.schema, deduplicated=step_name.endswith("shared")
        )
        trained = [convert(each) for each in arriving]
        number = sum(b.num_candidates for b in arriving)
        name = f"{architecture}-{step_name}-{users}-{history}-{size}.json".replace(" ", "-")

        @functools.cache
        def figures() -> Mapping[str, float]:
            counted = cached_bytes(name, lambda: json.dumps(counts(learner, arriving, trained)).encode())
            result: dict[str, float] = json.loads(counted)
            return result

        def train() -> None:
            for batch in arriving:
                learner.train(convert(batch))

        def warm_up() -> None:
            train()
            figures()

        def turn() -> TurnResult:
            train()
            return TurnResult(number, None, figures())

        yield WholeTurn(turn, warm_up)


def counts(learner: Learner, arriving: Sequence[Batch], trained: Sequence[Batch]) -> Mapping[str, float]:
    """Of all batches, but FLOPs, which are the first eight's."""
    number = sum(b.num_candidates for b in trained)
    lookups = [build_lookup(b, deduplicated=learner.deduplicated) for b in trained]
    ids = sum(
        len(its.shared["history"].entry_V) if "history" in its.shared else b.ro_lists.total_of("history")
        for b, its in zip(trained, lookups, strict=True)
    )
    few = list(zip(trained, lookups, strict=True))[:8]
    total = sum(flops(functools.partial(learner.learn, b, learner.inputs(b, its))) for b, its in few)
    return {
        A_BATCH: number / len(trained),
        A_REQUEST: number / sum(b.num_requests for b in trained),
        HISTORY_IDS: ids / number,
        FLOP: total / sum(b.num_candidates for b, _ in few) / 1e3,
        "bytes that arrive": sum(map(bytes_of_batch, arriving)) / number,
        "rows pulled": sum(len(its.id_U) for lookup in lookups for its in lookup.stacks.values()) / number,
    }


_CLIMBED = "benchmarks.recd:climbed"
_IMPRESSIONS = 4096
_STEPS: tuple[tuple[str, Literal["ours", "stage", "peer"]], ...] = (
    ("requests, clustered, shared", "ours"),
    ("requests, clustered", "stage"),
    ("requests, shared", "stage"),
    ("requests", "stage"),
    ("impressions, clustered, IKJT", "peer"),
    ("impressions, clustered", "peer"),
    ("impressions, mixed", "peer"),
)


def _row(architecture: str, history: int, users: int) -> Row:
    return Row(
        name=f"{architecture}, histories of {history}, {users} users",
        unit="impressions",
        clock="cpu",
        subjects=tuple(
            Subject(name, _CLIMBED, (architecture, name, users, history, _IMPRESSIONS), role)
            for name, role in _STEPS
        ),
        derives=derived,
        skipped=absent(EBNERD),
    )


BENCHMARK = Benchmark(
    name="recd",
    summary="What do clustering, deduplicated look-ups and deduplicated compute give training?",
    rows=(_row("late", 50, 60), _row("late", 500, 30), _row("late with HSTU", 50, 20)),
    rounds=2,
    interpretation="""\
The same impressions, all requests of some of EB-NeRD's users (about 15 each), trained in batches of about 4
096 impressions, the paper's. mixed: impressions in random order. clustered: those of a user next to each
other, which alone changes nothing but which rows a batch needs. IKJT: equal rows are found in the step and
trained once (all of RecD's exact form, floats included). requests: as our logs have them, where IKJT has
nothing left to find. shared: what requests share beside (partial IKJT: histories that moved on), looked up
once and multiplied once; in time order few requests of a user meet in a batch, clustered many do.

History ids are those that a batch's look-up hashes; rows pulled are the same in all forms of the same
batches, since ids are made unique anyway. FLOPs are those of matrix products, both ways. CPU time, one
thread, a shard in the same process. The paper's ladder, on GPUs and against impressions: clustering 1.0,
look-ups 1.34, compute 2.42, larger batches 2.48.""",
)
