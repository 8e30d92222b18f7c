"""Next-item training with leave-last-out evaluation: windows, ranks, metrics, training and the MovieLens-1M
files."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roostream.errors import ConfigError, RoostreamError
from trainer.next_item.config import NextItemConfig
from trainer.next_item.movielens import INTERACTIONS, MOVIES, RATINGS, read_movielens
from trainer.next_item.sequences import (
    TEST,
    VALIDATION,
    EvaluationWindows,
    NextWindows,
    UserSequences,
    evaluation_windows,
    group_by_user,
    training_windows,
)
from trainer.next_item.training import NextItemTrainer, ranking_figures, ranks, run_next_item

CORPUS = np.array([10, 20, 30, 40, 50, 60])
ALL = np.array([0, 1, 2])


def sequences() -> UserSequences:
    user_N = np.array([7, 7, 7, 7, 7, 3, 3, 3, 9, 9, 9, 9])
    return group_by_user(user_N, np.array([10, 20, 30, 40, 50, 60, 10, 20, 50, 40, 30, 20]), CORPUS)


def per_user(windows: NextWindows | EvaluationWindows, values: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(CORPUS[values], np.cumsum(windows.length_R)[:-1])]


def test_training_windows_end_before_the_evaluated_items() -> None:
    windows = training_windows(sequences(), ALL, 10)
    assert per_user(windows, windows.item_S) == [[10, 20], [], [50]]
    assert per_user(windows, windows.next_S) == [[20, 30], [], [40]]


@pytest.mark.parametrize(
    ("num_last", "given", "answers"),
    [
        (VALIDATION, [[10, 20, 30], [60], [50, 40]], [40, 10, 30]),
        (TEST, [[10, 20, 30, 40], [60, 10], [50, 40, 30]], [50, 20, 20]),
    ],
)
def test_validation_predicts_the_last_but_one_item_and_test_the_last(
    num_last: int, given: list[list[int]], answers: list[int]
) -> None:
    windows = evaluation_windows(sequences(), ALL, 10, num_last)
    assert per_user(windows, windows.item_S) == given
    assert CORPUS[windows.target_R].tolist() == answers
    places, items = windows.seen_X
    assert [CORPUS[items[places == r]].tolist() for r in range(3)] == given


def test_windows_have_the_newest_entries_and_seen_items_are_complete() -> None:
    test_windows = evaluation_windows(sequences(), ALL, 2, TEST)
    train_windows = training_windows(sequences(), ALL, 1)
    assert per_user(test_windows, test_windows.item_S) == [[30, 40], [60, 10], [40, 30]]
    assert np.bincount(test_windows.seen_X[0]).tolist() == [4, 2, 3]
    assert per_user(train_windows, train_windows.item_S) == [[20], [], [50]]
    assert per_user(train_windows, train_windows.next_S) == [[30], [], [40]]


@pytest.mark.parametrize(
    ("user_N", "message"),
    [
        ([], "got none or a user twice"),
        ([1, 1, 1, 2, 2, 2, 1, 1, 1], "got none or a user twice"),
        ([1, 1, 1, 2, 2], "got fewer of user 2"),
    ],
    ids=str,
)
def test_invalid_interactions_are_rejected(user_N: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group_by_user(np.array(user_N), np.full(len(user_N), 10), CORPUS)


# Ranks among all items that a user has not seen, and the metrics of ranks


NOTHING = (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def rank_of(scores: list[float], answer: int, seen: list[int]) -> int:
    seen_X = (torch.zeros(len(seen), dtype=torch.int64), torch.tensor(seen, dtype=torch.int64))
    return int(ranks(torch.tensor([scores]), torch.tensor([answer]), seen_X)[0])


@pytest.mark.parametrize(
    ("scores", "answer", "seen", "rank", "reason"),
    [
        ([0.1, 0.9, 0.5, 0.7], 2, [], 3, "two items have better scores"),
        ([0.1, 0.9, 0.5, 0.7], 2, [1], 2, "one of the two better items was seen"),
        ([0.1, 0.9, 0.5, 0.7], 2, [1, 3], 1, "both better items were seen"),
        ([0.1, 0.9, 0.5, 0.7], 0, [], 4, "the answer has the worst score"),
        ([0.5, 0.5, 0.5, 0.5], 2, [], 4, "equal scores count as better, so a constant model gains nothing"),
        ([0.5, 0.5, 0.5, 0.5], 2, [0], 3, "equal scores of seen items do not count"),
        ([math.nan] * 4, 2, [], 4, "NaN counts as better, so a broken model gains nothing"),
        ([0.1, math.nan, 0.5, 0.2], 2, [], 2, "a single NaN counts as better"),
        ([0.1, 0.9, 0.5, 0.7], 1, [1], 1, "the answer is ranked even if it was seen"),
    ],
)
def test_a_rank_counts_better_unseen_items(
    scores: list[float], answer: int, seen: list[int], rank: int, reason: str
) -> None:
    assert rank_of(scores, answer, seen) == rank, reason


def test_seen_items_are_those_of_each_user() -> None:
    score_RI: Tensor = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    seen_X = (torch.tensor([0]), torch.tensor([0]))
    assert ranks(score_RI, torch.tensor([1, 1]), seen_X).tolist() == [1, 2]
    assert ranks(score_RI, torch.tensor([1, 1]), NOTHING).tolist() == [2, 2]


def test_metrics_of_ranks() -> None:
    report = ranking_figures(np.array([1, 3, 10, 11, 50]), (10, 50))
    assert report["HR@10"] == pytest.approx(3 / 5) and report["HR@50"] == 1.0
    gains = [1.0, 0.5, 1 / math.log2(11), 1 / math.log2(12), 1 / math.log2(51)]
    assert report["NDCG@10"] == pytest.approx(sum(gains[:3]) / 5)
    assert report["NDCG@50"] == pytest.approx(sum(gains) / 5)
    assert report["MRR"] == pytest.approx((1 + 1 / 3 + 1 / 10 + 1 / 11 + 1 / 50) / 5)


# Training: both encoders learn, the seed determines the result, and invalid settings are rejected


ITEMS = 30
SMALL = {"data": "", "width": 16, "max_length": 8, "batch_users": 16, "negatives": 8, "learning_rate": 0.01}


def chain_sequences(num_users: int = 64, length: int = 7) -> UserSequences:
    """Build sequences in which item i + 7 always follows item i."""
    first_U = np.random.default_rng(0).integers(0, ITEMS, num_users)
    item_UN = (first_U[:, None] + 7 * np.arange(length)) % ITEMS
    return UserSequences(item_N=item_UN.ravel().astype(np.int64), start_U1=np.arange(num_users + 1) * length)


@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_both_encoders_learn_the_next_item(model: str) -> None:
    config = NextItemConfig(model=model, epochs=15, evaluate_every=15, **SMALL)
    report = run_next_item(config, chain_sequences(), ITEMS)
    before = NextItemTrainer(config, chain_sequences(), ITEMS).evaluate(TEST)
    assert report["best"]["test"]["NDCG@10"] > 0.8 > 0.5 > before["NDCG@10"]
    assert report["users"] == 64 and report["items"] == ITEMS


def test_the_seed_determines_training() -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(99)
        report = run_next_item(
            NextItemConfig(model="hstu", epochs=2, evaluate_every=1, seed=seed, **SMALL),
            chain_sequences(),
            ITEMS,
        )
        return [each["loss"] for each in report["evaluations"]]

    assert losses(0) == losses(0) != losses(1)


def test_the_report_has_every_evaluation_and_the_best_of_validation() -> None:
    num_evaluations: list[int] = []
    config = NextItemConfig(model="sasrec", epochs=5, evaluate_every=2, **SMALL)
    report = run_next_item(
        config, chain_sequences(), ITEMS, lambda report: num_evaluations.append(len(report["evaluations"]))
    )
    assert [each["epoch"] for each in report["evaluations"]] == [2, 4, 5]
    assert num_evaluations == [1, 2, 3]
    assert report["best"]["validation"]["NDCG@10"] == max(
        each["validation"]["NDCG@10"] for each in report["evaluations"]
    )


def test_evaluation_does_not_change_training() -> None:
    found = []
    for evaluated in (True, False):
        torch.manual_seed(5)
        run = NextItemTrainer(NextItemConfig(model="hstu", **SMALL), chain_sequences(), ITEMS)
        if evaluated:
            assert run.evaluate(VALIDATION) == run.evaluate(VALIDATION)
        found.append(run.epoch())
    assert found[0] == found[1]


def test_a_non_finite_loss_ends_training() -> None:
    run = NextItemTrainer(NextItemConfig(model="hstu", **SMALL), chain_sequences(), ITEMS)
    with torch.no_grad():
        run.model.item.fill_(torch.nan)
    with pytest.raises(RoostreamError, match="expected a finite loss, got nan"):
        run.epoch()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def sequences_of(*lengths: int) -> UserSequences:
    user_N = np.repeat(np.arange(len(lengths)), lengths)
    return group_by_user(user_N, CORPUS[np.arange(len(user_N)) % len(CORPUS)], CORPUS)


def test_a_batch_of_users_with_three_items_each_trains_nothing() -> None:
    """Two of the three are for evaluation, so there is nothing to predict, and the mean loss of no entry is
    NaN."""
    config = NextItemConfig(data="-", batch_users=1, width=4, max_length=4, dropout=0.0)
    run = NextItemTrainer(config, sequences_of(3, 6, 3), len(CORPUS))
    assert math.isfinite(run.epoch()) and all(p.isfinite().all() for p in run.model.parameters())
    with pytest.raises(RoostreamError, match="at least 4 interactions"):
        NextItemTrainer(config, sequences_of(3, 3), len(CORPUS)).epoch()


def test_a_missing_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a CUDA device for 'cuda' on this machine, got none"):
        run_next_item(NextItemConfig(model="hstu", device="cuda", **SMALL), chain_sequences(), ITEMS)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"heads": 3}, "a divisor of width = 50"), ({"device": "tpu"}, "cpu, cuda or cuda:N")],
    ids=str,
)
def test_invalid_settings_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NextItemConfig(data="", **given)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_a_device_learns_too(model: str) -> None:
    config = NextItemConfig(model=model, epochs=25, evaluate_every=25, device="cuda", **SMALL)
    assert run_next_item(config, chain_sequences(), ITEMS)["best"]["test"]["NDCG@10"] > 0.8


# The files of MovieLens-1M


FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "movielens_1m"
ROWS = ["1-6041-6042-6043,30-3711", "1-6041-6042-6043,10-3709", "2-6044-6045-6046,30-3710"]
TITLES = "10::Toy Story (1995)::Comedy\n20::Misérables, Les (1995)::Drama\n30::Heat::Action\n"


def write_dataset(
    folder: Path, rows: list[str] = ROWS, movies: str = TITLES, member: str = "train.csv"
) -> Path:
    with zipfile.ZipFile(folder / INTERACTIONS, "w") as archive:
        archive.writestr(member, "\n".join(rows) + "\n")
    (folder / MOVIES).write_text(movies, encoding="latin-1")
    return folder


def test_interactions_keep_their_order_and_the_corpus_has_all_movies(tmp_path: Path) -> None:
    rated = read_movielens(write_dataset(tmp_path))
    assert rated.user_N.tolist() == [1, 1, 2]
    assert rated.movie_N.tolist() == [30, 10, 30]
    assert rated.corpus_I.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": [*ROWS, "x,30-1"]}, "train.csv:4: expected a line"),
        ({"rows": [*ROWS, "3-6041"]}, "train.csv:4: expected a line"),
        ({"rows": [*ROWS, "3-6041,40-1"]}, "got none with id 40"),
        ({"movies": "ten::Toy Story::Comedy\n"}, "movies.dat:1: expected a line"),
        ({"member": "other.csv"}, "expected a zip file with train.csv"),
    ],
    ids=str,
)
def test_an_invalid_file_is_rejected_in_one_sentence(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    write_dataset(tmp_path, **changed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        read_movielens(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [INTERACTIONS, MOVIES])
def test_a_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    (write_dataset(tmp_path) / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: expected a file of MovieLens-1M, got No such file"):
        read_movielens(tmp_path)


def test_published_ratings_are_read_in_order_of_time_if_there_are_no_interactions(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path)
    (folder / RATINGS).write_text("2::30::5::300\n1::10::3::200\n1::30::4::100\n1::20::1::200\n")
    assert read_movielens(folder).movie_N.tolist() == [30, 10, 30]
    (folder / INTERACTIONS).unlink()
    rated = read_movielens(folder)
    assert rated.user_N.tolist() == [1, 1, 1, 2] and rated.movie_N.tolist() == [30, 10, 20, 30]
    (folder / RATINGS).write_text("1::10::3::200\n1::10\n")
    with pytest.raises(ConfigError, match=r"ratings\.dat:2: expected a line"):
        read_movielens(folder)


def test_a_truncated_zip_file_is_rejected(tmp_path: Path) -> None:
    path = write_dataset(tmp_path) / INTERACTIONS
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"expected a zip file with train\.csv"):
        read_movielens(tmp_path)


def test_an_encrypted_zip_file_is_rejected(tmp_path: Path) -> None:
    path = write_dataset(tmp_path) / INTERACTIONS
    data = bytearray(path.read_bytes())
    data[6] |= 1  # flags of the member, and of its entry in the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"expected a zip file with train\.csv.*encrypted"):
        read_movielens(tmp_path)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="this machine has no evaluation data in ../shared/data")
def test_the_real_files_lack_one_item_of_each_user() -> None:
    rated = read_movielens(FOLDER)
    assert len(rated.movie_N) == 1_000_209 - 6040 and len(rated.corpus_I) == 3883
    assert len(np.unique(rated.user_N)) == 6040 and np.bincount(rated.user_N)[1:].min() == 19
    assert len(np.unique(rated.user_N * 10_000 + rated.movie_N)) == len(rated.movie_N), (
        "no user rates a movie twice"
    )
