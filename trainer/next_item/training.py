"""Epochs over all users, and their evaluations.

Each evaluation has validation and test metrics, for curves. The result is the evaluation with the best
validation NDCG@10.

    HR@k = share of ranks ≤ k   NDCG@k = mean of 1 / log2(1 + rank) if rank ≤ k else 0  MRR = mean of 1 / rank

Letters: R users, S entries, C = 1 + negatives, I items of the corpus, X pairs (user, seen item).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roostream.errors import ConfigError, RoostreamError
from roostream.models.layers import init_parameters
from roostream.models.sequence.hstu import Hstu, HstuLayer
from roostream.models.sequence.hstu_attention import attention_in_place
from roostream.models.sequence.jagged_sequences import build_history_sequences
from roostream.models.sequence.next_item import NextItem, SasRec
from trainer.config import missing_device
from trainer.dense_part.adam import DenseAdam
from trainer.next_item.config import NextItemConfig
from trainer.next_item.sequences import (
    TEST,
    VALIDATION,
    NextWindows,
    UserSequences,
    evaluation_windows,
    training_windows,
)

BEST_BY = "NDCG@10"
_BETA2 = 0.98
CUTS = (10, 50)


def ranks(score_RI: Tensor, target_R: Tensor, seen_X: tuple[Tensor, Tensor]) -> Tensor:
    """int64 [R], 1 = best. Ties count against the answer, and NaN counts as better. A seen answer is ranked
    too."""
    ranked_RI = torch.ones_like(score_RI, dtype=torch.bool)
    ranked_RI[seen_X] = False
    ranked_RI.scatter_(1, target_R[:, None], True)
    return (ranked_RI & ~(score_RI < score_RI.gather(1, target_R[:, None]))).sum(dim=1)


def ranking_figures(rank_R: np.ndarray, cuts: Sequence[int] = CUTS) -> dict[str, float]:
    """HR and NDCG at each cut, and MRR."""
    gain_R = 1 / np.log2(1 + rank_R)
    metrics = {}
    for k in cuts:
        metrics[f"HR@{k}"] = float((rank_R <= k).mean())
        metrics[f"NDCG@{k}"] = float(np.where(rank_R <= k, gain_R, 0.0).mean())
    return metrics | {"MRR": float((1 / rank_R).mean())}


def build_next_item(config: NextItemConfig, num_items: int) -> NextItem:
    """An untrained model; the same for the same seed."""
    encoder: Hstu | SasRec
    if config.model == "hstu":
        encoder = Hstu(
            config.width, config.heads, config.layers, config.max_length, times=False, dropout=config.dropout
        )
        for layer in encoder.layers:
            assert isinstance(layer, HstuLayer)
            layer.attention = attention_in_place
    else:
        encoder = SasRec(config.width, config.heads, config.layers, config.dropout)
    model = NextItem(encoder, num_items, config.width, config.max_length, config.dropout)
    init_parameters(model, config.seed)
    return model.to(config.device)


class NextItemTrainer:
    """Model, optimizer and random generators. Call `epoch` and `evaluate` in turn."""

    def __init__(self, config: NextItemConfig, sequences: UserSequences, num_items: int) -> None:
        self.config, self.sequences, self.num_items = config, sequences, num_items
        self.model = build_next_item(config, num_items)
        self.optimizer = DenseAdam(
            self.model.named_parameters(), learning_rate=config.learning_rate, beta2=_BETA2
        )
        self.order = np.random.default_rng(config.seed)
        self.negatives = torch.Generator().manual_seed(config.seed)

    def epoch(self) -> float:
        """Train on every user once, in a new order; returns the mean loss of an entry.

        Raises:
            RoostreamError: the loss is not finite, or no user has an entry to train.
        """
        self.model.train()
        total, entries = 0.0, 0
        for user_R in self._batches(self.order.permutation(self.sequences.num_users)):
            windows = training_windows(self.sequences, user_R, self.config.max_length)
            if not len(windows.item_S):  # all users of the batch have only the items that are evaluated
                continue
            loss, number = self._step(windows), len(windows.item_S)
            total, entries = total + loss * number, entries + number
        if not np.isfinite(total):
            raise RoostreamError(f"expected a finite loss, got {total}; train with a smaller learning_rate")
        if not entries:
            raise RoostreamError("expected a user with at least 4 interactions, got none; add such users")
        return total / entries

    def _step(self, windows: NextWindows) -> float:
        config, number = self.config, len(windows.item_S)
        drawn_SN = torch.randint(self.num_items, (number, config.negatives), generator=self.negatives)
        item_SC = torch.cat([torch.from_numpy(windows.next_S)[:, None], drawn_SN], dim=1)
        u_SD = self._vectors(windows.item_S, windows.length_R)
        loss = self.model.loss(
            u_SD, item_SC.to(config.device), config.temperature, corrected=config.corrected
        )
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        mean_loss: float = loss.item()
        return mean_loss

    @torch.inference_mode()
    def evaluate(self, behind: int) -> dict[str, float]:
        """Metrics over all users, one unseen item each. `behind`: TEST or VALIDATION."""
        self.model.eval()
        vector_DI = self.model.item_vectors().T
        rank_arrays = []
        for user_R in self._batches(np.arange(self.sequences.num_users)):
            windows = evaluation_windows(self.sequences, user_R, self.config.max_length, behind)
            last_R = torch.from_numpy(np.cumsum(windows.length_R) - 1).to(self.config.device)
            score_RI = self._vectors(windows.item_S, windows.length_R)[last_R] @ vector_DI
            place_X, item_X = (torch.from_numpy(x).to(self.config.device) for x in windows.seen_X)
            rank_R = ranks(
                score_RI, torch.from_numpy(windows.target_R).to(self.config.device), (place_X, item_X)
            )
            rank_arrays.append(rank_R.cpu().numpy())
        return ranking_figures(np.concatenate(rank_arrays))

    def _vectors(self, item_S: np.ndarray, length_R: np.ndarray) -> Tensor:
        device = self.config.device
        u_SD: Tensor = self.model(
            torch.from_numpy(item_S).to(device), build_history_sequences(length_R, device)
        )
        return u_SD

    def _batches(self, user_U: np.ndarray) -> Iterator[np.ndarray]:
        for first in range(0, len(user_U), self.config.batch_users):
            yield user_U[first : first + self.config.batch_users]


def run_next_item(
    config: NextItemConfig,
    sequences: UserSequences,
    num_items: int,
    say: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """Train and evaluate; returns the report. `say` receives the report so far after each evaluation.

    Raises:
        ConfigError: the device does not exist.
        RoostreamError: the loss is not finite.
    """
    if problem := missing_device(config.device, torch.cuda.device_count()):
        raise ConfigError(problem)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    run = NextItemTrainer(config, sequences, num_items)
    report: dict[str, Any] = {"users": sequences.num_users, "items": num_items, "evaluations": []}
    began_s = time.process_time()
    for epoch in range(1, config.epochs + 1):
        loss = run.epoch()
        if epoch % config.evaluate_every and epoch < config.epochs:
            continue
        figures = {"epoch": epoch, "loss": loss, "cpu_s": round(time.process_time() - began_s, 1)}
        report["evaluations"].append(
            figures | {"validation": run.evaluate(VALIDATION), "test": run.evaluate(TEST)}
        )
        report["best"] = max(report["evaluations"], key=lambda each: float(each["validation"][BEST_BY]))
        say(report)
    return report
