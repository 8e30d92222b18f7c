"""The same impressions of the same users, trained in each of RecD's steps: as they come, clustered, deduplicated."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from benchmarks.made import made_once
from benchmarks.question import Work
from benchmarks.workloads.sharing.architectures import ARCHITECTURES
from benchmarks.workloads.sharing.bound import A_BATCH, A_REQUEST, FLOP
from benchmarks.workloads.sharing.counting import bytes_of_batch, flops
from benchmarks.workloads.sharing.logs import samples_of
from benchmarks.workloads.sharing.rebatch import cut, shuffled
from benchmarks.workloads.sharing.steps import HISTORY_IDS
from benchmarks.workloads.sharing.training import Learner
from benchmarks.workloads.training_step import shard_client
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.dedup import group_impressions, order_by_user
from roostream.wire.lookup import build_lookup


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
"""How batches of about so many impressions come of requests in time order. IKJT: made requests again in the step (exact). Shared:
`deduplicate`, also within the requests."""


@contextlib.contextmanager
def climbed(architecture: str, step_name: str, users: int, history: int, size: int) -> Iterator[Work]:
    """A step is all batches once; units are impressions."""
    torch.set_num_threads(1)
    batch = users_batch(users, history)
    arriving = STEPS[step_name](batch, size)
    convert = group_impressions if step_name.endswith("IKJT") else lambda each: each
    with tempfile.TemporaryDirectory() as folder:
        client = shard_client(batch.schema, folder)
        learner = Learner(
            ARCHITECTURES[architecture], client, batch.schema, deduplicated=step_name.endswith("shared")
        )
        turns = itertools.cycle(arriving)

        def step() -> None:
            for _ in arriving:
                learner.train(convert(next(turns)))

        trained = [convert(each) for each in arriving]
        name = f"{architecture}-{step_name}-{users}-{history}-{size}.json".replace(" ", "-")

        def counted() -> bytes:
            return json.dumps(counts(learner, arriving, trained)).encode()

        number = sum(b.num_candidates for b in arriving)
        yield Work(step, lambda: number, functools.cache(lambda: json.loads(made_once(name, counted))))


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
