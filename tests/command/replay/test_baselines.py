from __future__ import annotations

import numpy as np
import pytest

from command.replay.baselines import Baselines
from roo import roo_pb2 as pb

DAY = 86_400_000


def sample(number: int, items: list[int], labels: list[float], positions: list[int] | None = None, time_ms: int = 5) -> pb.Sample:
    header = pb.Header(time_ms=time_ms)
    return pb.Sample(header=header, sample_id=number, item_ids=items, labels=labels, positions=positions or range(len(items)))


def test_an_item_that_is_always_clicked_is_found_by_its_rate_and_not_by_its_place() -> None:
    rng, baselines = np.random.default_rng(0), Baselines(("click",))
    for n in range(600):
        items = rng.permutation(6).tolist()
        baselines.add(sample(n, items, [float(i == 3) for i in items]))
    found = baselines.report()
    assert found["item"]["overall"]["request_auc"] > 0.95 and found["item"]["overall"]["ne"] < 0.4
    assert found["random"]["overall"]["request_auc"] == 0.5 and found["random"]["overall"]["ne"] == pytest.approx(1, abs=0.02)
    assert 0.4 < found["place"]["overall"]["request_auc"] < 0.6
    assert baselines.positives() == {"click": 600}


def test_a_place_that_is_always_clicked_is_found_by_the_places_as_shown() -> None:
    baselines = Baselines(("click",))
    for n in range(300):
        baselines.add(sample(n, [n, n + 1000, n + 2000], [0, 1, 0], positions=[4, 0, 9]))
    assert baselines.report()["place"]["overall"]["request_auc"] > 0.95


def test_a_sample_is_scored_before_it_counts_and_measured_from_the_time_given() -> None:
    baselines = Baselines(("click", "buy"), measure_from_ms=DAY)
    baselines.add(sample(1, [1, 2], [1, 0, 0, 0]))
    baselines.add(sample(2, [1, 2], [1, 1, 0, 0], time_ms=DAY))
    found = baselines.report()["item"]
    assert found["overall"]["requests"] == 2 and found["measured"]["requests"] == 1
    assert found["overall"]["request_auc"] == 0.75 and found["measured"]["request_auc"] == 1.0
    assert baselines.positives() == {"click": 2, "buy": 1}


def test_labels_of_another_schema_count_for_nothing() -> None:
    baselines = Baselines(("click", "buy"))
    baselines.add(sample(1, [1, 2], [1.0, 0.0]))
    assert baselines.report()["item"]["overall"]["requests"] == 0
