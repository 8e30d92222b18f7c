"""MovieLens-1M's files: what is read, and a sentence for what can't be."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from roostream.errors import ConfigError
from trainer.next_item.movielens import INTERACTIONS, MOVIES, read_movielens

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "movielens_1m"
ROWS = ["1-6041-6042-6043,30-3711", "1-6041-6042-6043,10-3709", "2-6044-6045-6046,30-3710"]
TITLES = "10::Toy Story (1995)::Comedy\n20::Misérables, Les (1995)::Drama\n30::Heat::Action\n"


def written(folder: Path, rows: list[str] = ROWS, movies: str = TITLES, member: str = "train.csv") -> Path:
    with zipfile.ZipFile(folder / INTERACTIONS, "w") as archive:
        archive.writestr(member, "\n".join(rows) + "\n")
    (folder / MOVIES).write_text(movies, encoding="latin-1")
    return folder


def test_interactions_keep_their_order_and_the_corpus_has_all_movies(tmp_path: Path) -> None:
    rated = read_movielens(written(tmp_path))
    assert rated.user_N.tolist() == [1, 1, 2]
    assert rated.movie_N.tolist() == [30, 10, 30]
    assert rated.corpus_I.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("changed", "said"),
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
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    written(tmp_path, **changed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        read_movielens(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [INTERACTIONS, MOVIES])
def test_a_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    (written(tmp_path) / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: expected a file of MovieLens-1M, got No such file"):
        read_movielens(tmp_path)


def test_a_truncated_zip_file_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path) / INTERACTIONS
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"expected a zip file with train\.csv"):
        read_movielens(tmp_path)


@pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the evaluation data (../shared/data) are not on this machine"
)
def test_the_real_files_lack_one_item_of_each_user() -> None:
    rated = read_movielens(FOLDER)
    assert len(rated.movie_N) == 1_000_209 - 6040 and len(rated.corpus_I) == 3883
    assert len(np.unique(rated.user_N)) == 6040 and np.bincount(rated.user_N)[1:].min() == 19
    assert len(np.unique(rated.user_N * 10_000 + rated.movie_N)) == len(rated.movie_N), (
        "nobody rates a movie twice"
    )
