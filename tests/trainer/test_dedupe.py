"""Deduplication: a sample id is trained once within the horizon of close time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.runtime.event_time import NUM_RECENT
from roostream.runtime.manifest import StoredFile
from trainer.dedupe import Dedupe, DedupeSnapshot, IdRun, plan_files


def claim_and_settle(dedupe: Dedupe, *pairs: tuple[int, int]) -> list[bool]:
    ids, times = zip(*pairs, strict=True)
    id_R, close_ms_R = np.array(ids, dtype=np.int64), np.array(times, dtype=np.int64)
    new_R = dedupe.claim(id_R, close_ms_R)
    dedupe.settle()
    return new_R.tolist()


def test_an_id_is_new_once_within_and_across_batches() -> None:
    dedupe = Dedupe(1000)
    assert claim_and_settle(dedupe, (5, 10), (6, 10), (5, 10)) == [True, True, False]
    assert claim_and_settle(dedupe, (6, 20), (-7, 20)) == [False, True]


def trained(runs: Sequence[IdRun]) -> list[tuple[int, int]]:
    """(id, time) of the ids that are still remembered, sorted."""
    return sorted(
        pair
        for run in runs
        for pair in zip(run.id_N[run.live_N].tolist(), run.time_ms_N[run.live_N].tolist(), strict=True)
    )


def state(dedupe: Dedupe) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    cut = dedupe.cut()
    return trained(cut.runs), cut.recent_ms


def commit_cut(dedupe: Dedupe, name: str) -> list[IdRun]:
    """Commit a cut, with its new ids in a file of this name. Returns the runs of the commit."""
    kept, new = plan_files(dedupe.cut().runs)
    runs = [*kept, *([new._replace(file=StoredFile(name=name, bytes=0, checksum=""))] if new else [])]
    dedupe.committed(runs)
    return runs


def samples_at(time_ms: int, first_id: int = 1000) -> list[tuple[int, int]]:
    """Enough samples of one time to move the clock to it: more than half of the recent times."""
    return [(first_id + n, time_ms) for n in range(NUM_RECENT // 2 + 1)]


def test_ids_older_than_the_horizon_are_forgotten() -> None:
    dedupe = Dedupe(100)
    claim_and_settle(dedupe, (1, 19), (2, 20), (3, 21))
    claim_and_settle(dedupe, *samples_at(121))
    assert claim_and_settle(dedupe, (3, 21), (2, 20), (1, 19)) == [False, True, True]


def test_an_id_is_remembered_for_a_horizon_after_its_claim_even_if_it_came_late() -> None:
    dedupe = Dedupe(100)
    claim_and_settle(dedupe, *samples_at(500))
    claim_and_settle(dedupe, (1, 350), (2, 600))
    claim_and_settle(dedupe, *samples_at(590, 2000))
    assert claim_and_settle(dedupe, (1, 350)) == [False]
    claim_and_settle(dedupe, *samples_at(620, 3000))
    assert claim_and_settle(dedupe, (1, 350), (2, 600)) == [True, False]


@pytest.mark.parametrize("wrong_ms", [1 << 50, (1 << 63) - 1, 0, -(1 << 63)])
def test_a_wrong_time_does_not_delay_the_expiry_of_other_ids(wrong_ms: int) -> None:
    dedupe = Dedupe(1000)
    for now_ms in range(10_000, 20_000, 500):
        wrong = [(-now_ms, wrong_ms)] if now_ms == 10_500 else []
        claim_and_settle(dedupe, *samples_at(now_ms, now_ms), *wrong, *samples_at(now_ms, now_ms + 50))
    assert dedupe.cut().num_ids <= 16 * 3 + 1, (
        "only ids of the last horizon, and the one with the wrong time, may remain"
    )
    assert len(dedupe.cut().runs) == 1


def test_a_commit_writes_new_ids_and_rewrites_few_others() -> None:
    dedupe, num_written, num_taken = Dedupe(100_000), 0, 0
    for commit in range(200):
        claim_and_settle(dedupe, *[(100 * commit + n, 1000 * commit) for n in range(100)])
        num_taken += 100
        runs = commit_cut(dedupe, f"{commit}")
        num_written += sum(len(run.id_N) for run in runs if run.file and run.file.name == f"{commit}")
        assert len(runs) <= 10 and trained(runs) == trained(dedupe.cut().runs)
    assert num_taken <= num_written <= 8 * num_taken, (
        "a commit must not rewrite the ids of the whole horizon, 100 commits"
    )
    assert sum(len(run.id_N) for run in runs) <= 2.5 * dedupe.cut().num_ids


def test_ids_of_an_aborted_commit_are_in_the_next_one() -> None:
    dedupe = Dedupe(1000)
    claim_and_settle(dedupe, (1, 10))
    first = commit_cut(dedupe, "a")
    claim_and_settle(dedupe, (2, 20))
    aborted = plan_files(dedupe.cut().runs)
    claim_and_settle(dedupe, (3, 30))
    kept, new = plan_files(dedupe.cut().runs)
    assert trained(first) == [(1, 10)] and aborted[1] is not None and new is not None
    assert trained([*kept, new]) == [(1, 10), (2, 20), (3, 30)]


def test_a_cut_does_not_change_the_arrays_of_earlier_cuts() -> None:
    dedupe = Dedupe(1000)
    claim_and_settle(dedupe, (1, 10))
    before = dedupe.cut()
    claim_and_settle(dedupe, (2, 20), *samples_at(5000))
    assert trained(before.runs) == [(1, 10)]
    assert 1 not in [id_ for id_, _ in trained(dedupe.cut().runs)]


@pytest.mark.parametrize("wrong", [1, NUM_RECENT // 2])
@pytest.mark.parametrize("time_ms", [1 << 50, 0])
def test_a_few_wrong_times_do_not_move_the_clock(wrong: int, time_ms: int) -> None:
    dedupe = Dedupe(100)
    claim_and_settle(dedupe, *samples_at(500), *samples_at(510, 2000))
    claim_and_settle(dedupe, *[(n, time_ms) for n in range(wrong)])
    assert claim_and_settle(dedupe, *samples_at(500)) == [False] * (NUM_RECENT // 2 + 1)
    claim_and_settle(dedupe, *samples_at(700, 3000))
    assert claim_and_settle(dedupe, *samples_at(500)) == [True] * (NUM_RECENT // 2 + 1), (
        "the horizon must still advance"
    )


def test_a_claimed_id_is_a_duplicate_but_not_in_the_state_until_settled() -> None:
    dedupe, id_R, close_ms_R = Dedupe(1000), np.array([5, 6]), np.array([10, 20])
    new_R = dedupe.claim(id_R, close_ms_R)
    assert new_R.all() and not dedupe.claim(id_R, close_ms_R).any()
    assert state(dedupe) == ([], ())
    dedupe.settle()
    assert state(dedupe) == ([(5, 10), (6, 20)], (10, 20))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 300)), min_size=1, max_size=8), max_size=12
    ),
    st.integers(0, 11),
    st.sets(st.integers(0, 11)),
)
def test_a_restored_state_gives_the_same_decisions_whenever_commits_are_made(
    batches: list[list[tuple[int, int]]], kill: int, commits: set[int]
) -> None:
    undisturbed, killed = Dedupe(100), Dedupe(100)
    for number, batch in enumerate(batches):
        if number in commits:
            commit_cut(killed, f"{number}")
        if number == kill:
            before, killed = killed.cut(), Dedupe(100)
            killed.load(DedupeSnapshot(before.runs, before.recent_ms))
        assert claim_and_settle(killed, *batch) == claim_and_settle(undisturbed, *batch)
    assert state(killed) == state(undisturbed)


@given(
    st.lists(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 300)), max_size=8), max_size=12),
    st.integers(0, 3),
)
def test_claiming_ahead_gives_the_same_results_as_claiming_one_by_one(
    batches: list[list[tuple[int, int]]], max_ahead: int
) -> None:
    """Up to `max_ahead` chunks are claimed before the current one is settled."""
    serial, ahead, claimed = Dedupe(100), Dedupe(100), deque[np.ndarray]()
    chunks = [np.array(batch, dtype=np.int64).reshape(-1, 2) for batch in batches]
    for n, chunk in enumerate(chunks):
        while len(claimed) <= max_ahead and n + len(claimed) < len(chunks):
            claimed.append(ahead.claim(*chunks[n + len(claimed)].T))
        new_R = serial.claim(*chunk.T)
        serial.settle()
        assert claimed.popleft().tolist() == new_R.tolist()
        ahead.settle()
        assert state(ahead) == state(serial)
