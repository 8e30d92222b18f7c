"""Epochs: what can be learned is learned by both models, the same seed gives the same, and mistakes are
sentences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roostream.errors import ConfigError, RoostreamError
from trainer.next_item.config import NextItemConfig
from trainer.next_item.sequences import TEST, VALIDATION, UserSequences
from trainer.next_item.training import NextItemTrainer, run_next_item

ITEMS = 30
SMALL = {"data": "", "width": 16, "max_length": 8, "batch_users": 16, "negatives": 8, "learning_rate": 0.01}


def chains(num_users: int = 64, length: int = 7) -> UserSequences:
    """Who took i takes i + 7 next, whoever it is."""
    first_U = np.random.default_rng(0).integers(0, ITEMS, num_users)
    item_UN = (first_U[:, None] + 7 * np.arange(length)) % ITEMS
    return UserSequences(item_N=item_UN.ravel().astype(np.int64), start_U1=np.arange(num_users + 1) * length)


@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_both_encoders_learn_the_next_item(model: str) -> None:
    config = NextItemConfig(model=model, epochs=15, evaluate_every=15, **SMALL)
    told = run_next_item(config, chains(), ITEMS)
    before = NextItemTrainer(config, chains(), ITEMS).evaluate(TEST)
    assert told["best"]["test"]["NDCG@10"] > 0.8 > 0.5 > before["NDCG@10"]
    assert told["users"] == 64 and told["items"] == ITEMS


def test_the_seed_determines_training() -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(99)
        told = run_next_item(
            NextItemConfig(model="hstu", epochs=2, evaluate_every=1, seed=seed, **SMALL), chains(), ITEMS
        )
        return [each["loss"] for each in told["evaluations"]]

    assert losses(0) == losses(0) != losses(1)


def test_the_report_has_every_evaluation_and_the_best_of_validation() -> None:
    said: list[int] = []
    config = NextItemConfig(model="sasrec", epochs=5, evaluate_every=2, **SMALL)
    told = run_next_item(config, chains(), ITEMS, lambda report: said.append(len(report["evaluations"])))
    assert [each["epoch"] for each in told["evaluations"]] == [2, 4, 5]
    assert said == [1, 2, 3]
    assert told["best"]["validation"]["NDCG@10"] == max(
        each["validation"]["NDCG@10"] for each in told["evaluations"]
    )


def test_evaluation_does_not_change_training() -> None:
    found = []
    for evaluated in (True, False):
        torch.manual_seed(5)
        run = NextItemTrainer(NextItemConfig(model="hstu", **SMALL), chains(), ITEMS)
        if evaluated:
            assert run.evaluate(VALIDATION) == run.evaluate(VALIDATION)
        found.append(run.epoch())
    assert found[0] == found[1]


def test_a_non_finite_loss_ends_training() -> None:
    run = NextItemTrainer(NextItemConfig(model="hstu", **SMALL), chains(), ITEMS)
    with torch.no_grad():
        run.model.item.fill_(torch.nan)
    with pytest.raises(RoostreamError, match="expected a finite loss, got nan"):
        run.epoch()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a CUDA device, got none"):
        run_next_item(NextItemConfig(model="hstu", device="cuda", **SMALL), chains(), ITEMS)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"heads": 3}, "a divisor of width = 50"), ({"device": "tpu"}, "cpu, cuda or cuda:N")],
    ids=str,
)
def test_invalid_settings_are_rejected(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NextItemConfig(data="", **given)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device")
@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_a_device_learns_too(model: str) -> None:
    config = NextItemConfig(model=model, epochs=25, evaluate_every=25, device="cuda", **SMALL)
    assert run_next_item(config, chains(), ITEMS)["best"]["test"]["NDCG@10"] > 0.8
