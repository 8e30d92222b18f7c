"""The workers' reports as one."""

from __future__ import annotations

from typing import Any

from trainer.control.together import together


def status(*workers: dict[str, Any]) -> dict[str, Any]:
    reports = {f"worker {n}": report for n, report in enumerate(workers)}
    return {"workers": len(workers), "reports": {"shard 0": {}, **reports}}


FAST = {
    "watch": {"state": "caught_up", "lag_ms": 10, "lag_records": 1, "eta_s": [0.0, 0.0, 0.0], "partitions": [{"partition": 0}]}
}
SLOW = {"watch": {"state": "catching_up", "reason": "x", "lag_ms": 900, "lag_records": 50, "eta_s": [30.0, 20.0, None]}}


def test_the_worst_off_counts_and_what_is_trained_is_a_sum() -> None:
    whole = together(
        status({**FAST, "requests": 5, "step": 2, "watermark_ms": 70}, {**SLOW, "requests": 7, "step": 2, "watermark_ms": 60})
    )
    assert (whole["state"], whole["reason"], whole["lag_ms"], whole["lag_records"]) == ("catching_up", "x", 900, 51)
    assert whole["eta_s"] == [30.0, 20.0, None] and (whole["requests"], whole["step"], whole["watermark_ms"]) == (12, 2, 60)
    assert whole["partitions"] == [{"partition": 0, "worker": "worker 0"}]


def test_an_end_that_one_cannot_foresee_nobody_can() -> None:
    assert together(status(FAST, {"watch": {**SLOW["watch"], "eta_s": [None, None, None]}}))["eta_s"] == [None, None, None]


def test_what_one_does_not_tell_nobody_knows() -> None:
    whole = together(status(FAST, {}))
    assert whole["state"] == "unknown" and whole["lag_ms"] is None and whole["eta_s"] is None and whole["requests"] is None


def test_a_worker_that_stands_by_says_nothing_about_training() -> None:
    assert together({**status(FAST, {}), "workers": 1})["state"] == "caught_up"


def test_without_a_worker_everything_is_unknown() -> None:
    whole = together(status())
    assert whole["state"] == "unknown" and whole["lag_ms"] is None and whole["metrics"] == {} and whole["partitions"] == []
