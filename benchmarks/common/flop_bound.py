"""Upper bound of the gain from computing the request side once, from the measured costs of both sides.

With R requests of K candidates each and B = R K impressions a batch, a step takes c + R a + B b: a of a
request's side, b of a candidate's, c of neither. Three kinds of batches of the same requests tell all three:
whole ones, a quarter as many impressions with a request each, and a single impression. No step on a batch of
impressions is among them: what one takes is compared with a forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.harness.benchmark import SubjectResult

A_BATCH, A_REQUEST, FLOP = "impressions a batch", "impressions a request", "kFLOP an impression"


class Sides(NamedTuple):
    """Microseconds."""

    request: float  # a
    candidate: float  # b
    step: float  # c

    def bound(self, num_candidates: float) -> float:
        """K (a + b) / (a + K b)."""
        return (
            num_candidates
            * (self.request + self.candidate)
            / (self.request + num_candidates * self.candidate)
        )

    def forecast(self, num_impressions: float, num_candidates: float) -> float:
        """The same of whole steps: (c + B (a + b)) / (c + R a + B b)."""
        impressions = self.step + num_impressions * (self.request + self.candidate)
        return impressions / (self.step + num_impressions * (self.request / num_candidates + self.candidate))


def sides(whole: SubjectResult, first: SubjectResult, one: SubjectResult) -> Sides:
    """Of what each costs an impression. A candidate that seems to cost less than nothing costs nothing."""
    num_impressions, num_first = whole.figures[A_BATCH], first.figures[A_BATCH]
    num_requests = num_impressions / whole.figures[A_REQUEST]
    both = (first.cost_us * num_first - one.cost_us) / (num_first - 1)
    step = one.cost_us - both
    candidate = (whole.cost_us * num_impressions - step - num_requests * both) / (
        num_impressions - num_requests
    )
    candidate = min(max(candidate, 0.0), both)
    return Sides(both - candidate, candidate, step)


def derived(told: Mapping[str, SubjectResult]) -> Mapping[str, float]:
    """Of a row's subjects in one run: FLOPs saved, and where the sides were timed, their costs, the bound,
    and how near to it."""
    whole, apart = told["requests"], told["impressions"]
    out = {"FLOPs: impressions / requests": apart.figures[FLOP] / whole.figures[FLOP]}
    if "first of each" in told:
        its = sides(whole, told["first of each"], told["one impression"])
        bound = its.bound(whole.figures[A_REQUEST])
        out |= {
            "a, µs a request": its.request,
            "b, µs a candidate": its.candidate,
            "c, µs a step": its.step,
            "bound K(a+b)/(a+Kb)": bound,
            "the same with c": its.forecast(whole.figures[A_BATCH], whole.figures[A_REQUEST]),
            "of the bound: adapter": told["adapter"].cost_us / whole.cost_us / bound,
            "of the bound: impressions": apart.cost_us / whole.cost_us / bound,
        }
    return out


def paper_count(history: int, targets: int, width: int) -> float:
    """m (n² d + n d²) / ((n + m)² d + (n + m) d²): what a request saves of HSTU's FLOPs (ROO paper §3.3)."""
    n, m, d = history, targets, width
    return m * (n**2 * d + n * d**2) / ((n + m) ** 2 * d + (n + m) * d**2)


def of_history(
    history: int, targets: int, width: int, told: Mapping[str, SubjectResult]
) -> Mapping[str, float]:
    """What is counted beside the paper's formula."""
    counted = told["a target at a time"].figures[FLOP] / told["requests"].figures[FLOP]
    return {
        "FLOP ratio, counted": counted,
        "FLOP ratio, by the paper's formula": paper_count(history, targets, width),
    }
