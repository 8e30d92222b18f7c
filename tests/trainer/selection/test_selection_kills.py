"""Guarantee G11 (docs/architecture.md) with selection, deferral and rehearsal: after a kill of any program at
any moment, the final rows and weights equal those of an undisturbed run bit for bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from tests.trainer import samples
from tests.trainer.network import CONTROLLER
from tests.trainer.schedules import every_nth, fault_options, random_kills, seed_ranges
from tests.trainer.simulator import WORKER, Kill, Simulation
from trainer.selection.config import DeferralConfig, RehearsalConfig, SelectionConfig, SlipstreamConfig
from trainer.selection.decision import STALE

SLIPSTREAM_CONFIG = SlipstreamConfig(
    hot_ratio=1e-4, warm_up_steps=3, snapshots=3, snapshot_steps=2, drop=0.5, hot_share=0.5, unvisited="stale"
)
DEFERRAL = DeferralConfig(share=0.8, min_visits=2, visits=4)
NEGATIVES = SelectionConfig(policy="negatives", keep=0.4, score="probe")
SLIPSTREAM = SelectionConfig(policy="slipstream", slipstream=SLIPSTREAM_CONFIG)
NUMBERS, HISTORY = list(range(1, 49)), list(range(1, 145))
SWITCH = [
    (CONTROLLER, "claim", "before"),
    (CONTROLLER, "claim", "after"),
    (WORKER, "restore", "after"),
    (WORKER, "start", "after"),
]

Run = tuple[dict[str, bytes], dict[int, int]]


def run_simulation(numbers: list[int], kills: list[Kill], **more: Any) -> Run:
    """Run a simulation; return the final rows and weights, and the disposition of each request. With a seed,
    some kills may be set for moments that never happen."""
    simulation = Simulation(samples.records(numbers), exact=True, kills=kills, **more)
    if "seed" in more:
        simulation.run_with_optional_kills()
    else:
        simulation.run()
        assert [kill.victim for kill in kills] == simulation.killed
    return simulation.bits(), {p.sample_id: p.disposition for p in simulation.outputs.predicted}


def stream(kills: list[Kill], **more: Any) -> Run:
    return run_simulation(NUMBERS, kills, loop={"selection": NEGATIVES, "deferral": DEFERRAL}, **more)


def history(kills: list[Kill], **more: Any) -> Run:
    loop = {"selection": SLIPSTREAM, "deferral": DEFERRAL}
    return run_simulation(
        HISTORY, kills, loop=loop, initial_workers=1, unit_records=200, export={0: 64, 1: 64}, **more
    )


@functools.cache
def undisturbed(run: Any) -> Run:
    found: Run = run([])
    return found


IN_A_COMMIT = [(WORKER, "cut", "after"), (WORKER, "write", "after"), ("shard 0", "freeze", "after")]
VICTIMS = [WORKER, "shard 0", CONTROLLER]


@pytest.mark.parametrize(("moment", "victim"), every_nth(4, itertools.product(IN_A_COMMIT, VICTIMS)), ids=str)
def test_g11_skipped_requests_and_deferred_gradients_survive_a_kill_in_a_commit(
    moment: tuple[str, str, str], victim: str
) -> None:
    assert stream([Kill(moment, victim, 2)]) == undisturbed(stream)


@pytest.mark.parametrize(
    ("victim", "push"), every_nth(3, itertools.product([WORKER, "shard 0"], [3, 9, 13, 21, 60]))
)
def test_g11_slipstream_survives_a_kill_in_any_phase(push: int, victim: str) -> None:
    """The kills come while accesses are counted, between snapshots, after the last snapshot, and while inputs
    are skipped."""
    bits, dispositions = history([Kill((WORKER, "push", "before"), victim, push)])
    assert bits == undisturbed(history)[0] and dispositions == undisturbed(history)[1]


@pytest.mark.parametrize(
    ("victim", "moment"), every_nth(3, itertools.product([WORKER, CONTROLLER], SWITCH)), ids=str
)
def test_g11_slipstream_survives_a_kill_in_the_hand_over_to_the_stream(
    moment: tuple[str, str, str], victim: str
) -> None:
    """The second claim and the second restore belong to the hand-over."""
    bits, dispositions = history([Kill(moment, victim, 2)])
    assert bits == undisturbed(history)[0] and dispositions == undisturbed(history)[1]


@pytest.mark.parametrize(
    ("victim", "push"), every_nth(5, itertools.product([WORKER, "shard 1"], [2, 11, 20]))
)
def test_g11_deferred_gradients_survive_a_kill_within_a_step(push: int, victim: str) -> None:
    assert stream([Kill((WORKER, "push", "before"), victim, push)]) == undisturbed(stream)


def initial_fleet(kills: list[Kill], **more: Any) -> Run:
    """Run two workers on the history, then one worker on the stream."""
    history = {"initial_workers": 2, "unit_records": 7, "export": {0: 12, 1: 12}}
    return run_simulation(NUMBERS, kills, loop={"selection": NEGATIVES}, **history, **more)


@pytest.mark.parametrize(
    ("moment", "victim", "occurrence"),
    every_nth(
        3,
        [
            *(((WORKER, "write", "after"), victim, 2) for victim in ("worker 1", "shard 0", CONTROLLER)),
            *(((WORKER, "push", "before"), victim, 4) for victim in (WORKER, "worker 1")),
            *(
                ((CONTROLLER, "claim", when), victim, 2)
                for when in ("before", "after")
                for victim in (WORKER, "worker 1")
            ),
            ((WORKER, "restore", "after"), CONTROLLER, 2),
        ],
    ),
)
def test_g11_two_workers_skip_the_same_requests_through_kills_in_history_and_hand_over(
    moment: tuple[str, str, str], victim: str, occurrence: int
) -> None:
    bits, dispositions = initial_fleet([Kill(moment, victim, occurrence)])
    assert (bits, dispositions) == undisturbed(initial_fleet)
    assert dispositions == undisturbed(stream)[1], (
        "selection must depend on the request id only, in both phases"
    )


KINDS = ("stream", "history", "fleet", "initial_fleet", "rehearsed")


def schedule(seed: int) -> None:
    """Run random kills, lost messages and lasting faults for this seed. The seed also chooses the kind of
    run."""
    run = globals()[KINDS[seed % len(KINDS)]]
    workers = 2 if run in (fleet, initial_fleet) else 1
    assert run(random_kills(seed, workers), seed=seed, **fault_options(seed, workers)) == undisturbed(run), (
        f"--seed {seed}"
    )


@pytest.mark.parametrize("seeds", seed_ranges(5, chaos=500), ids=str)
def test_g11_random_schedules_end_in_the_same_bits(seeds: range) -> None:
    for seed in seeds:
        schedule(seed)


def test_slipstream_skips_in_history_and_not_in_the_stream() -> None:
    _, dispositions = undisturbed(history)
    skipped = {number for number, disposition in dispositions.items() if disposition == STALE}
    assert skipped and sorted(dispositions) == HISTORY
    assert max(skipped) <= 128, "the history ends at the export point"


def fleet(kills: list[Kill], **more: Any) -> Run:
    return run_simulation(NUMBERS, kills, loop={"selection": NEGATIVES}, num_workers=2, **more)


@pytest.mark.parametrize("victim", [WORKER, "worker 1"])
def test_g11_several_workers_skip_the_same_requests_as_one(victim: str) -> None:
    bits, dispositions = undisturbed(fleet)
    assert (bits, dispositions) == fleet([Kill((WORKER, "write", "after"), victim, 2)])
    assert dispositions == undisturbed(stream)[1], "several workers must skip the same requests as one"


def rehearsed(kills: list[Kill], **more: Any) -> Run:
    return run_simulation(NUMBERS, kills, loop={"rehearsal": RehearsalConfig(batches=4)}, **more)


@pytest.mark.parametrize(
    ("moment", "victim"),
    every_nth(5, itertools.product([*IN_A_COMMIT, (WORKER, "push", "before")], VICTIMS)),
    ids=str,
)
def test_g11_rehearsal_survives_a_kill(moment: tuple[str, str, str], victim: str) -> None:
    assert rehearsed([Kill(moment, victim, 2 if moment[1] != "push" else 17)]) == undisturbed(rehearsed)


def rehearsed_from_history(kills: list[Kill]) -> Run:
    loop = {"rehearsal": RehearsalConfig(batches=4)}
    return run_simulation(
        NUMBERS, kills, loop=loop, initial_workers=1, unit_records=200, export={0: 12, 1: 12}
    )


@pytest.mark.parametrize("push", every_nth(2, [5, 20, 30]))
def test_g11_batches_of_history_are_rehearsed_in_the_stream(push: int) -> None:
    assert rehearsed_from_history([Kill((WORKER, "push", "before"), WORKER, push)]) == undisturbed(
        rehearsed_from_history
    )
