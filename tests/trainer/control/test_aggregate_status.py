"""The controller merges the reports of all workers into one status."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.control.aggregate_status import aggregate_status


def status(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    reports = {f"worker {n}": report for n, report in enumerate(workers)}
    return {"workers": len(workers), "reports": {"shard 0": {}, **reports}, **more}


FAST = {"watch": {"state": "caught_up", "lag_ms": 10, "lag_records": 1, "eta_s": [0.0, 0.0, 0.0]}}
FAST["watch"]["partitions"] = [{"partition": 0}]
SLOW_WATCH = {"state": "catching_up", "reason": "x", "lag_ms": 900, "lag_records": 50}
SLOW = {"watch": {**SLOW_WATCH, "eta_s": [30.0, 20.0, None]}}


def test_state_and_lag_are_the_worst_and_trained_requests_are_summed() -> None:
    fast = {**FAST, "requests": 5, "step": 2, "watermark_ms": 70}
    total = aggregate_status(status(fast, {**SLOW, "requests": 7, "step": 2, "watermark_ms": 60}))
    expected = {"state": "catching_up", "reason": "x", "lag_ms": 900, "lag_records": 51, "requests": 12}
    expected |= {"step": 2, "watermark_ms": 60, "eta_s": [30.0, 20.0, None], "initial": None}
    assert {name: total[name] for name in expected} == expected
    assert total["partitions"] == [{"partition": 0, "worker": "worker 0"}]


def test_eta_is_unknown_if_one_worker_has_none() -> None:
    slow = {"watch": {**SLOW_WATCH, "eta_s": [None, None, None]}}
    assert aggregate_status(status(FAST, slow))["eta_s"] == [None, None, None]


@pytest.mark.parametrize("workers", [(), (FAST, {})])
def test_values_that_not_every_worker_reports_are_unknown(workers: tuple[dict[str, Any], ...]) -> None:
    total = aggregate_status(status(*workers))
    assert total["state"] == "unknown"
    assert total["lag_ms"] is total["eta_s"] is total["requests"] is None


def test_values_are_unknown_while_a_worker_is_not_connected() -> None:
    """The sum over the others would be shown as the lag of training."""
    fast, slow = ({**one, "watch": {**one["watch"], "lost_records": 3}} for one in (FAST, SLOW))
    both = status({**fast, "requests": 5, "step": 2}, {**slow, "requests": 7, "step": 2})
    assert [aggregate_status(both)[name] for name in ("lag_records", "lost_records")] == [51, 6]
    del both["reports"]["worker 1"]
    total = aggregate_status(both)
    assert total["lost_records"] is None
    assert total["state"] == "unknown" and total["lag_ms"] is total["lag_records"] is total["eta_s"] is None
    assert total["requests"] is total["step"] is total["watermark_ms"] is None


def test_metrics_are_unknown_while_a_worker_is_not_connected() -> None:
    both = status({"metrics": {"requests": 10, "auc": 0.7}}, {"metrics": {"requests": 0}})
    assert aggregate_status(both)["metrics"]["auc"] == 0.7, "a worker without requests has nothing to add"
    del both["reports"]["worker 1"]
    assert aggregate_status(both)["metrics"] == {}


def test_workers_on_standby_are_ignored() -> None:
    assert aggregate_status({**status(FAST, {}), "workers": 1})["state"] == "caught_up"


def numbers(candidates: int, log_loss: float) -> dict[str, Any]:
    sums = [float(candidates), float(candidates), candidates / 10, candidates / 8, log_loss, 2 * log_loss]
    return {"candidates": candidates, "sums": sums, "auc": 0.7}


def reported(candidates: int, psi: float, version: str = "1-4") -> dict[str, Any]:
    leaf = {"1h": {"click": numbers(candidates, candidates * 0.3)}}
    features = {"psi": psi, "coverage": 1 - psi, "coverage_before": 1.0, "lengths": 0}
    drift: dict[str, Any] = {name: {"age": value} for name, value in features.items()}
    drift |= {"base_rate": {"click": 0.1 + psi}, "base_rate_before": {"click": 0.1}}
    drift |= {"new_ids": {"user": psi / 2}}
    shadow = {"version": version, "rows": "live", "shadow": leaf, "live": leaf}
    slices = {"surface": {"front": leaf}}
    return {"watch": {"windows": leaf, "slices": slices, "shadow": shadow, "drift": drift}}


def test_windows_slices_and_shadow_are_pooled_over_workers() -> None:
    quality = aggregate_status(status(reported(100, 0.1), reported(300, 0.3)))["quality"]
    shadow = quality["shadow"]
    for part in (quality["windows"], quality["slices"]["surface"]["front"], shadow["shadow"], shadow["live"]):
        pooled = part["1h"]["click"]
        assert (pooled["candidates"], pooled["base_rate"], pooled["calibration"]) == (400, 0.1, 1.25)
        assert pooled["ne"] == pytest.approx(0.3 / 0.325083, rel=1e-5) and pooled["ne_online"] == 0.5
        assert pooled["auc"] is None
    assert shadow["version"] == "1-4"


def test_a_surface_or_label_may_have_the_name_of_a_part_of_the_report() -> None:
    """Callers name surfaces, and the controller calls this in its main thread."""
    leaf = {"1h": {"sums": numbers(100, 30.0)}}
    report = {"watch": {"windows": leaf, "slices": {"surface": {"sums": leaf, "front": leaf}}}}
    quality = aggregate_status(status(report, report))["quality"]
    for part in (quality["windows"], *quality["slices"]["surface"].values()):
        assert part["1h"]["sums"]["candidates"] == 200
    assert quality["slices"]["surface"].keys() == {"sums", "front"}


def test_the_reported_drift_is_that_of_the_worst_worker() -> None:
    drift = aggregate_status(status(reported(100, 0.1), {}, reported(300, 0.3)))["quality"]["drift"]
    assert drift["psi"] == {"age": 0.3} and drift["coverage"] == {"age": 0.7}
    assert drift["base_rate"] == {"click": 0.4} and drift["base_rate_before"] == {"click": 0.1}
    assert drift["new_ids"] == {"user": 0.15}


def test_shadows_of_different_versions_are_not_pooled() -> None:
    both = status(reported(100, 0.1), reported(300, 0.3, version="1-9"))
    assert aggregate_status(both)["quality"]["shadow"] is None


@pytest.mark.parametrize("workers", [(), (FAST, SLOW)])
def test_a_hold_overrides_the_reported_state(workers: tuple[dict[str, Any], ...]) -> None:
    hold = {"kind": "transient", "reason": "nothing to read for 60 s", "member": "", "since_ms": 5}
    total = aggregate_status(status(*workers, holds=[hold]))
    assert (total["state"], total["reason"], total["in_state_s"]) == ("held", hold["reason"], None)
