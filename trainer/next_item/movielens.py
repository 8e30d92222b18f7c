"""Reader of MovieLens-1M: which movies each user rated, in order of time. The ratings themselves are ignored.

paddlerec_ensfm_train.csv.zip   train.csv, one interaction per line, `user-gender-age-occupation,movie-genre`;
                                one user after the other, in order of time; the last interaction of each user
                                is withheld
ratings.dat                     read if that file is absent: `user::movie::rating::timestamp`, in any order
movies.dat                      `movie::title::genres`; the corpus, including movies without ratings
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from roostream.errors import ConfigError

INTERACTIONS, RATINGS, MOVIES = "paddlerec_ensfm_train.csv.zip", "ratings.dat", "movies.dat"
_MEMBER = "train.csv"


class RatedMovies(NamedTuple):
    """Letters: N interactions, I movies."""

    user_N: np.ndarray  # int64; a user's interactions in their order
    movie_N: np.ndarray  # int64
    corpus_I: np.ndarray  # int64, rising


def read_movielens(folder: Path) -> RatedMovies:
    """Read the movies, and the interactions or else the ratings.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    corpus_I = np.unique(
        [_number(MOVIES, k, line, b"::") for k, line in enumerate(_read(folder / MOVIES).splitlines(), 1)]
    )
    has_ratings = (folder / RATINGS).exists() and not (folder / INTERACTIONS).exists()
    user_N, movie_N = _ratings(folder / RATINGS) if has_ratings else _interactions(folder / INTERACTIONS)
    unknown = np.setdiff1d(movie_N, corpus_I)
    if len(unknown):
        raise ConfigError(
            f"{folder / MOVIES}: expected every movie of {RATINGS if has_ratings else _MEMBER}, got none "
            f"with id {unknown[0]}; check the file"
        )
    return RatedMovies(user_N, movie_N, corpus_I)


def _interactions(path: Path) -> tuple[np.ndarray, np.ndarray]:
    lines = _csv(path).splitlines()
    user_N, movie_N = np.empty((2, len(lines)), dtype=np.int64)
    for k, line in enumerate(lines):
        user, _, movie = line.partition(b",")
        user_N[k], movie_N[k] = _number(_MEMBER, k + 1, user, b"-"), _number(_MEMBER, k + 1, movie, b"-")
    return user_N, movie_N


def _ratings(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Users and movies, by user and time; at equal times in the order of the file."""
    lines = _read(path).splitlines()
    user_N, movie_N, time_N = np.empty((3, len(lines)), dtype=np.int64)
    for k, line in enumerate(lines):
        user, movie, _, time = (line.split(b"::") + [b""] * 4)[:4]
        user_N[k], movie_N[k], time_N[k] = (_number(RATINGS, k + 1, c, b"::") for c in (user, movie, time))
    order_N = np.lexsort((time_N, user_N))
    return user_N[order_N], movie_N[order_N]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a file of MovieLens-1M, got {error.strerror}; check --data, a folder with "
            f"{MOVIES} and {RATINGS}"
        ) from None


def _csv(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(_read(path))) as archive:
            return archive.read(_MEMBER)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:  # encrypted
        raise ConfigError(f"{path}: expected a zip file with {_MEMBER}, got {error}; copy it again") from None


def _number(file: str, line: int, text: bytes, behind: bytes) -> int:
    """The number before `behind`."""
    head = text.split(behind, 1)[0]
    if not head.isdigit() or len(head) > 18:
        raise ConfigError(
            f"{file}:{line}: expected a line that begins with a number, got {head[:40]!r}; check the file"
        )
    return int(head)
