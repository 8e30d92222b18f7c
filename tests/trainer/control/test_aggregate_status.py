"""The workers' reports as one."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.control.aggregate_status import aggregate_status


def status(*workers: dict[str, Any]) -> dict[str, Any]:
    reports = {f"worker {n}": report for n, report in enumerate(workers)}
    return {"workers": len(workers), "reports": {"shard 0": {}, **reports}}


FAST = {
    "watch": {
        "state": "caught_up",
        "lag_ms": 10,
        "lag_records": 1,
        "eta_s": [0.0, 0.0, 0.0],
        "partitions": [{"partition": 0}],
    }
}
SLOW = {
    "watch": {
        "state": "catching_up",
        "reason": "x",
        "lag_ms": 900,
        "lag_records": 50,
        "eta_s": [30.0, 20.0, None],
    }
}


def test_state_and_lag_are_the_worst_and_trained_requests_are_summed() -> None:
    whole = aggregate_status(
        status(
            {**FAST, "requests": 5, "step": 2, "watermark_ms": 70},
            {**SLOW, "requests": 7, "step": 2, "watermark_ms": 60},
        )
    )
    assert (whole["state"], whole["reason"], whole["lag_ms"], whole["lag_records"]) == (
        "catching_up",
        "x",
        900,
        51,
    )
    assert whole["eta_s"] == [30.0, 20.0, None] and (
        whole["requests"],
        whole["step"],
        whole["watermark_ms"],
    ) == (12, 2, 60)
    assert whole["partitions"] == [{"partition": 0, "worker": "worker 0"}]


def test_initial_progress_comes_from_the_controller() -> None:
    initial = {"epoch": 2, "epochs": 3, "records": 90, "left": 40}
    assert (
        aggregate_status({**status(FAST), "initial": initial})["initial"] == initial
        and aggregate_status(status(FAST))["initial"] is None
    )


def test_eta_is_unknown_if_one_worker_has_none() -> None:
    assert aggregate_status(status(FAST, {"watch": {**SLOW["watch"], "eta_s": [None, None, None]}}))[
        "eta_s"
    ] == [
        None,
        None,
        None,
    ]


def test_a_value_that_one_worker_does_not_report_is_unknown() -> None:
    whole = aggregate_status(status(FAST, {}))
    assert (
        whole["state"] == "unknown"
        and whole["lag_ms"] is None
        and whole["eta_s"] is None
        and whole["requests"] is None
    )


def test_workers_on_standby_are_ignored() -> None:
    assert aggregate_status({**status(FAST, {}), "workers": 1})["state"] == "caught_up"


def test_without_a_worker_everything_is_unknown() -> None:
    whole = aggregate_status(status())
    assert (
        whole["state"] == "unknown"
        and whole["lag_ms"] is None
        and whole["metrics"] == {}
        and whole["partitions"] == []
    )


def numbers(candidates: int, log_loss: float) -> dict[str, Any]:
    sums = [float(candidates), float(candidates), candidates / 10, candidates / 8, log_loss, 2 * log_loss]
    return {"candidates": candidates, "sums": sums, "auc": 0.7}


def told(candidates: int, psi: float, version: str = "1-4") -> dict[str, Any]:
    leaf = {"1h": {"click": numbers(candidates, candidates * 0.3)}}
    drift = {
        **{
            name: {"age": value}
            for name, value in (("psi", psi), ("coverage", 1 - psi), ("coverage_before", 1.0), ("lengths", 0))
        },
        **{
            "base_rate": {"click": 0.1 + psi},
            "base_rate_before": {"click": 0.1},
            "new_ids": {"user": psi / 2},
        },
    }
    shadow = {"version": version, "rows": "live", "shadow": leaf, "live": leaf}
    return {
        "watch": {"windows": leaf, "slices": {"surface": {"front": leaf}}, "shadow": shadow, "drift": drift}
    }


def test_windows_slices_and_shadow_are_pooled_over_workers() -> None:
    quality = aggregate_status(status(told(100, 0.1), told(300, 0.3)))["quality"]
    for at in (
        quality["windows"],
        quality["slices"]["surface"]["front"],
        quality["shadow"]["shadow"],
        quality["shadow"]["live"],
    ):
        pooled = at["1h"]["click"]
        assert (pooled["candidates"], pooled["base_rate"], pooled["calibration"]) == (
            400,
            0.1,
            1.25,
        ) and pooled["auc"] is None
        assert pooled["ne"] == pytest.approx(0.3 / 0.325083, rel=1e-5) and pooled["ne_online"] == 0.5
    assert quality["shadow"]["version"] == "1-4"


def test_drift_is_that_of_the_worst_worker() -> None:
    drift = aggregate_status(status(told(100, 0.1), {}, told(300, 0.3)))["quality"]["drift"]
    assert (
        drift["psi"] == {"age": 0.3}
        and drift["coverage"] == {"age": 0.7}
        and drift["base_rate"] == {"click": 0.4}
    )
    assert drift["base_rate_before"] == {"click": 0.1} and drift["new_ids"] == {"user": 0.15}


def test_shadows_of_different_versions_are_not_pooled() -> None:
    assert (
        aggregate_status(status(told(100, 0.1), told(300, 0.3, version="1-9")))["quality"]["shadow"] is None
    )
    assert aggregate_status(status({}))["quality"] == {
        "windows": {},
        "slices": {},
        "shadow": None,
        "drift": {},
    }


@pytest.mark.parametrize("workers", [(), (FAST,), (FAST, SLOW)])
def test_a_hold_overrides_the_reported_state(
    workers: tuple[dict[str, Any], ...],
) -> None:
    hold = {"kind": "transient", "reason": "nothing to read for 60 s", "member": "", "since_ms": 5}
    whole = aggregate_status({**status(*workers), "holds": [hold]})
    assert (whole["state"], whole["reason"], whole["in_state_s"]) == (
        "held",
        "nothing to read for 60 s",
        None,
    )
    assert aggregate_status({**status(FAST), "holds": []})["state"] == "caught_up"
