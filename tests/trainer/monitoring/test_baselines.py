"""Simple baselines (popularity, position, recent popularity, a linear model) that score the same samples as
the model."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.runtime.kafka.topics import SAMPLES
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.records import Record
from trainer.monitoring.baselines import Baselines
from trainer.monitoring.verdict import PairedRequests, RequestScores

DAY = 86_400_000
HOUR = 3_600_000


def schema(*labels: str) -> Schema:
    return schema_from_dict(
        {
            "ro": [{"name": "age"}],
            "nro": [{"name": "price"}],
            "label": [{"name": name, "action": name} for name in labels],
        }
    )


CLICK, BOTH = schema("click"), schema("click", "buy")


def add_sample(
    baselines: Baselines,
    sample_schema: Schema,
    number: int,
    items: list[int],
    labels: list[float],
    **options: object,
) -> None:
    """Add a sample with these candidates. Their `price` is 0 unless `prices` are given."""
    time_ms, prices = int(options.get("time_ms", 5)), options.get("prices", np.zeros(len(items)))  # type: ignore[call-overload]
    header = pb.Header(time_ms=time_ms, schema=sample_schema.fingerprint, user_id=1, request_id=str(number))
    sample = pb.Sample(
        header=header,
        sample_id=number,
        item_ids=items,
        labels=labels,
        positions=options.get("positions") or range(len(items)),  # type: ignore[arg-type]
        ro=encode_ro(sample_schema, {"age": 30.0}),
        parts=[
            pb.Part(
                nro=encode_nro(sample_schema, {"price": np.asarray(prices, dtype=np.float32)}, len(items)),
                num_rows=len(items),
            )
        ],
        close_ms=time_ms,
        weight=options.get("weight", 0.0),  # type: ignore[arg-type]
    )
    baselines.add(sample, Record(SAMPLES, 0, number, time_ms, b"", wire.encode(wire.SAMPLE, sample)))


def test_popularity_finds_an_item_that_is_always_clicked() -> None:
    rng, baselines = np.random.default_rng(0), Baselines(CLICK)
    for n in range(600):
        items = rng.permutation(6).tolist()
        add_sample(baselines, CLICK, n, items, [float(i == 3) for i in items])
    report = baselines.report()
    assert report["item"]["overall"]["request_auc"] > 0.95 and report["item"]["overall"]["ne"] < 0.4
    assert report["random"]["overall"]["request_auc"] == 0.5 and report["random"]["overall"][
        "ne"
    ] == pytest.approx(1, abs=0.02)
    assert 0.4 < report["place"]["overall"]["request_auc"] < 0.6
    assert baselines.positives() == {"click": 600}


def test_labels_of_another_schema_are_matched_by_name() -> None:
    swapped, rng = schema("buy", "like", "click"), np.random.default_rng(0)
    writers = {sample_schema.fingerprint: sample_schema for sample_schema in (BOTH, swapped, CLICK)}
    mixed, own = Baselines(BOTH, registry=writers.get), Baselines(BOTH)
    for n in range(300):
        items = rng.permutation(6).tolist()
        click, buy = [float(i == 3) for i in items], [float(i == 4) for i in items]
        labels = [value for pair in zip(click, buy, strict=True) for value in pair]
        add_sample(own, BOTH, n, items, labels)
        if n % 2:
            add_sample(mixed, BOTH, n, items, labels)
        else:
            labels = [value for triple in zip(buy, click, click, strict=True) for value in triple]
            add_sample(mixed, swapped, n, items, labels)
    assert mixed.positives() == own.positives() == {"click": 300, "buy": 300}
    assert mixed.report()["item"] == own.report()["item"]
    add_sample(mixed, CLICK, 300, [3], [1.0])
    assert mixed.positives() == {"click": 301, "buy": 300}
    for name, before in own.report().items():
        after = mixed.report()[name]["overall"]["tasks"]
        assert after["buy"]["candidates"] == before["overall"]["tasks"]["buy"]["candidates"] == 1800
        assert after["click"]["candidates"] == 1801 and after["buy"]["base_rate"] == pytest.approx(1 / 6)


def test_sampling_weights_count_in_rates_and_metrics() -> None:
    rng, baselines = np.random.default_rng(0), Baselines(CLICK)
    for n in range(600):
        clicked = n % 2
        add_sample(
            baselines, CLICK, n, rng.permutation(6)[:3].tolist(), [clicked, 0, 0], weight=10 - 9 * clicked
        )
    for name in ("random", "place", "item", "recent"):
        found = baselines.report()[name]["overall"]
        assert found["base_rate"] == pytest.approx(300 / (3 * (300 + 3000)))
        assert found["calibration"] == pytest.approx(1, abs=0.1)
    assert baselines.positives() == {"click": 300}


def test_the_position_baseline_uses_the_position_at_which_an_item_was_shown() -> None:
    baselines = Baselines(CLICK)
    for n in range(300):
        add_sample(baselines, CLICK, n, [n, n + 1000, n + 2000], [0, 1, 0], positions=[4, 0, 9])
    assert baselines.report()["place"]["overall"]["request_auc"] > 0.95


@pytest.mark.parametrize("wrong_day", [None, 365_000])
def test_recent_popularity_finds_items_that_are_popular_now(wrong_day: int | None) -> None:
    """Each day, users click another one of five items. A single request has a wrong time."""
    rng, baselines = np.random.default_rng(1), Baselines(CLICK)
    for n in range(1200):
        items = rng.permutation(5).tolist()
        day = n // 120
        add_sample(
            baselines,
            CLICK,
            n,
            items,
            [float(i == day % 5) for i in items],
            time_ms=(wrong_day if wrong_day and n == 300 else day) * DAY + n % 120 * HOUR // 10,
        )
    report = baselines.report()
    assert report["recent"]["overall"]["request_auc"] > 0.9 > report["item"]["overall"]["request_auc"]


def test_the_linear_baseline_learns_from_floats() -> None:
    rng, baselines = np.random.default_rng(2), Baselines(CLICK)
    for n in range(1500):
        prices = rng.lognormal(0, 2, 4)
        clicked = rng.random(4) < 1 / (1 + prices)
        add_sample(
            baselines,
            CLICK,
            n,
            rng.integers(0, 1 << 40, 4).tolist(),
            clicked.astype(float).tolist(),
            prices=prices,
        )
    report = baselines.report()["linear"]["overall"]
    assert report["auc"] > 0.8 and report["ne"] < 0.85 and 0.9 < report["calibration"] < 1.1


def test_baselines_score_a_sample_before_learning_from_it() -> None:
    baselines = Baselines(BOTH, measure_from_ms=DAY)
    add_sample(baselines, BOTH, 1, [1, 2], [1, 0, 0, 0])
    add_sample(baselines, BOTH, 2, [1, 2], [1, 1, 0, 0], time_ms=DAY)
    report = baselines.report()["item"]
    assert report["overall"]["requests"] == 2 and report["measured"]["requests"] == 1
    assert report["overall"]["request_auc"] == 0.75 and report["measured"]["request_auc"] == 1.0
    assert baselines.positives() == {"click": 2, "buy": 1}


def test_samples_without_the_labels_are_ignored_and_without_the_features_scored_as_random() -> None:
    for num_items in (1, 2, 3):
        baselines = Baselines(BOTH)
        add_sample(baselines, CLICK, 1, [*range(num_items)], [1.0] * num_items)
        assert baselines.report()["item"]["overall"]["requests"] == 0
    other = schema_from_dict({"nro": [{"name": "x"}], "label": [{"name": "click", "action": "click"}]})
    baselines = Baselines(other)
    for n in range(40):
        add_sample(baselines, CLICK, n, [1, 2], [1.0, 0.0], prices=[1, 2])
    report = baselines.report()
    assert (
        report["linear"]["overall"] == report["random"]["overall"]
        and report["item"]["overall"]["requests"] == 40
    )


def test_the_limit_on_items_evicts_items_with_few_views() -> None:
    """Item 3 is in each request and always clicked. Every other item is new."""
    baselines = Baselines(CLICK, max_items=50)
    for n in range(600):
        items = [3, 100 + 2 * n, 101 + 2 * n]
        add_sample(baselines, CLICK, n, items, [1.0, 0.0, 0.0], time_ms=n * 1000)
    report = baselines.report()
    assert report["item"]["overall"]["request_auc"] > 0.95
    assert report["recent"]["overall"]["request_auc"] > 0.95


def test_without_metrics_only_the_pairs_are_kept() -> None:
    paired = PairedRequests()
    baselines = Baselines(CLICK, paired=paired, keep_metrics=False)
    for n in range(20):
        add_sample(baselines, CLICK, n, [1, 2], [1.0, 0.0])
    assert baselines.report()["item"]["overall"]["requests"] == 0
    ids = np.arange(20)
    paired.add_model(
        ids.tolist(),
        RequestScores(np.ones(20), np.ones(20)),
        place_R=ids,
        time_ms_R=ids,
        candidates_R=np.full(20, 2),
        positives_R=np.ones(20),
    )
    assert paired.verdict().requests == 10
