"""One of two processes that each hold half of a TorchRec collection, sharded by our plan.
test_torchrec_plan.py starts them.

    python -m tests.trainer.sharded_collections RANK FOLDER

Every rank reads FOLDER/task.json and writes FOLDER/out-RANK.npz.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from trainer.torchrec_plan import TableTensors, load_tables, read_tables, sharding_plan

RANKS = 2
TABLES = {"a": (50, 8), "b": (31, 4), "c": (7, 16), "d": (20, 8)}  # rows, width
FEATURES = {"a": ["a0", "a1"], "b": ["b0"], "c": ["c0"], "d": ["d0"]}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
}


def initial_rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    return {name: random.normal(size=size).astype(np.float32) for name, size in TABLES.items()}


def bags(step: int, rank: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Features, lengths [K · B] and row numbers of a rank's batch. Bags may be empty and may repeat rows."""
    random = np.random.default_rng((step, rank))
    names = [feature for features in FEATURES.values() for feature in features]
    lengths = random.integers(0, 4, (len(names), 6))
    sizes = [TABLES[table][0] for table, features in FEATURES.items() for _ in features]
    values = [random.integers(0, size, int(n.sum())) for size, n in zip(sizes, lengths, strict=True)]
    return names, lengths.ravel(), np.concatenate(values)


def kjt(step: int, rank: int) -> KeyedJaggedTensor:
    names, lengths, values = bags(step, rank)
    return KeyedJaggedTensor(keys=names, values=torch.from_numpy(values), lengths=torch.from_numpy(lengths))


def gradient(shape: torch.Size) -> torch.Tensor:
    return torch.sin(torch.arange(shape.numel(), dtype=torch.float32)).view(shape)


def sharded(plan: str, rows: dict[str, np.ndarray]) -> nn.Module:
    """A collection of these rows, sharded by a plan. It uses sum pooling: with MEAN, TorchRec 1.9 divides
    twice for unsharded tables beside tables that are sharded by rows.
    """
    configs = [
        EmbeddingBagConfig(
            name=n, embedding_dim=d, num_embeddings=r, feature_names=FEATURES[n], pooling=PoolingType.SUM
        )
        for n, (r, d) in TABLES.items()
    ]
    collection = EmbeddingBagCollection(tables=configs)
    kind, settings = OPTIMIZERS["adagrad"]
    apply_optimizer_in_backward(kind, collection.parameters(), dict(settings))  # modifies its argument
    env = ShardingEnv.from_process_group(distributed.group.WORLD)
    of_module = sharding_plan(plan).get_plan_for_module("")
    out: nn.Module = EmbeddingBagCollectionSharder().shard(collection, of_module, env, torch.device("cpu"))
    load_tables(out, TableTensors(rows, {}))
    return out


def pooled(collection: nn.Module, step: int, rank: int) -> dict[str, torch.Tensor]:
    """The output by feature, because the order of columns depends on the plan."""
    return dict(collection(kjt(step, rank)).wait().to_dict())


def learn(collection: nn.Module, steps: range, rank: int) -> None:
    for step in steps:
        found = pooled(collection, step, rank)
        torch.stack([(x * gradient(x.shape)).sum() for _, x in sorted(found.items())]).sum().backward()


def main(rank: int, folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    distributed.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), RANKS, rank)
    first, second = (json.dumps(plan) for plan in task["plans"])
    stayed = sharded(first, initial_rows())
    out = {f"pooled.{rank}.{name}": x.detach().numpy() for name, x in pooled(stayed, 0, rank).items()}
    learn(stayed, range(5), rank)
    half = read_tables(stayed)
    moved, lost = sharded(second, half.rows), sharded(second, half.rows)
    load_tables(moved, half)
    reloaded = read_tables(moved)
    for each in (stayed, moved, lost):
        learn(each, range(5, 10), rank)
    ends = {
        "stayed": read_tables(stayed),
        "moved": read_tables(moved),
        "lost": read_tables(lost),
        "half": half,
        "back": reloaded,
    }
    for name, end in ends.items():
        out |= {f"{name}.rows.{table}": x for table, x in end.rows.items()}
        out |= {
            f"{name}.state.{table}.{key}": x for table, state in end.state.items() for key, x in state.items()
        }
    np.savez(folder / f"out-{rank}.npz", **out)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
