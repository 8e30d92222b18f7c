"""The comparison of the model with baselines in a running stack."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from infra.auditor.auditor_program import AuditorLoop
from infra.auditor.config import AuditorConfig
from infra.auditor.model_quality import WARM_UP, ModelQuality
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import PREDICTIONS, SAMPLES
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.scrape import ScrapedMetrics, parse
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro
from roostream.wire.records import Record
from tests.infra.auditor.test_auditor import ALL, TOPICS
from tests.infra.auditor.test_auditor_program import InMemoryAuditor
from trainer.control.scrape_targets import read_figures
from trainer.monitoring.verdict import METRIC_SPECS, report_of

SCHEMA = schema_from_dict({"nro": [{"name": "price"}], "label": [{"name": "click", "action": "click"}]})
T0 = 1_700_000_000_000
NUM_REQUESTS = 2000


@functools.cache
def traffic(knowledge: float) -> list[Record]:
    """Requests with one click among four candidates, each followed by its sample and its prediction.

    With `knowledge` 1 the model is right, with 0 it scores at random, with -1 it is always wrong.
    """
    rng, out = np.random.default_rng(0), []
    for n in range(NUM_REQUESTS):
        items_n, clicked = rng.choice(50, 4, replace=False), int(rng.integers(4))
        label_n = (np.arange(4) == clicked).astype(np.float32)
        score_n = 0.25 + 0.1 * knowledge * (2 * label_n - 1) + 0.1 * rng.random(4)
        header = pb.Header(time_ms=T0 + 1000 * n, schema=SCHEMA.fingerprint, user_id=1, request_id=str(n))
        nro = encode_nro(SCHEMA, {"price": rng.random(4).astype(np.float32)}, 4)
        part = pb.Part(nro=nro, num_rows=4)
        sample = pb.Sample(
            header=header,
            sample_id=n + 1,
            item_ids=items_n,
            labels=label_n,
            positions=range(4),
            parts=[part],
            close_ms=T0 + 1000 * n,
        )
        prediction = pb.Prediction(
            sample_id=n + 1, time_ms=T0 + 1000 * n, item_ids=items_n, scores=score_n, labels=label_n
        )
        values = ((SAMPLES, wire.SAMPLE, sample), (PREDICTIONS, wire.PREDICTION, prediction))
        out += [Record(topic, 0, n, T0 + 1000 * n, b"", wire.encode(kind, m)) for topic, kind, m in values]
    return out


def scraped(quality: ModelQuality) -> ScrapedMetrics:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(quality.metrics, METRIC_SPECS))
    return parse(generate_latest(registry).decode())


def quality_of(records: list[Record]) -> ModelQuality:
    quality = ModelQuality(SCHEMA)
    for record in records:
        quality.add(record)
    return quality


@pytest.mark.parametrize(("knowledge", "state"), [(1.0, "ahead"), (0.0, "undecided"), (-1.0, "behind")])
def test_the_page_says_how_the_model_compares_with_the_baselines(knowledge: float, state: str) -> None:
    figures = read_figures({}, {"auditor": scraped(quality_of(traffic(knowledge)[: 2 * 1600]))})
    found = figures["model_quality"]
    auc, baselines = found["request_auc"], found["request_auc"]["baselines"]
    assert auc["state"] == state and set(baselines) == {"place", "item", "recent", "linear"}
    assert auc["requests"] == 256, "only the second half of the two batches after the warm-up is compared"
    assert all(baseline["low"] < baseline["difference"] < baseline["high"] for baseline in baselines.values())
    assert state in found["sentence"]


def test_the_first_requests_only_train_the_baselines() -> None:
    records = traffic(1.0)[: 2 * (WARM_UP + 10)]
    found = report_of(scraped(quality_of(records)))
    assert found is not None and found["state"] == "unknown" and found["request_auc"]["requests"] == 0


def test_repeated_and_unreadable_records_change_nothing() -> None:
    records = traffic(1.0)
    undecodable = [records[0]._replace(value=b"\x01\x02broken"), records[1]._replace(value=b"")]
    repeated = [copy for record in records for copy in (record, *undecodable, record)]
    assert quality_of(repeated).metrics() == quality_of(records).metrics()


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": [0, 1, 2]},
        {"positions": [0]},
        {"weight": math.nan},
        {"weight": math.inf},
        {"weight": -1},
    ],
    ids=str,
)
def test_a_sample_that_the_trainer_refuses_changes_nothing(fields: dict[str, Any]) -> None:
    records = traffic(1.0)
    message = pb.Sample.FromString(records[0].value[2:])
    for name in fields:
        message.ClearField(name)
    message.MergeFrom(pb.Sample(**fields))
    message.sample_id = NUM_REQUESTS + 1
    refused = records[0]._replace(value=wire.encode(wire.SAMPLE, message), offset=NUM_REQUESTS)
    after_warm_up = 2 * (WARM_UP + 1)
    found = quality_of([*records[:after_warm_up], refused, *records[after_warm_up:]])
    assert found.metrics() == quality_of(records).metrics()


def test_a_share_of_the_requests_is_compared_by_sample_id() -> None:
    records, first = traffic(1.0), 1700  # sample ids 1 to 2000
    partial = ModelQuality(SCHEMA, share=first / 2**64)
    for record in records:
        partial.add(record)
    assert partial.metrics() == quality_of(records[: 2 * (first - 1)]).metrics()
    assert partial.metrics() != quality_of(records).metrics()


def test_a_stack_whose_auditor_does_not_compare_has_no_verdict() -> None:
    assert read_figures({}, {})["model_quality"] is None


def test_the_auditor_exports_the_comparison_with_its_sums(tmp_path: Path) -> None:
    quality = ModelQuality(SCHEMA)
    config = AuditorConfig(bootstrap="127.0.0.1:1", home=str(tmp_path))
    loop = AuditorLoop(config, InMemoryAuditor(MemoryConsumer(ALL, [])), TOPICS, quality)
    loop.open()
    loop.turn(0.0)
    assert METRIC_SPECS.keys() <= loop.metrics.keys()
    assert loop.metrics["roostream_auditor_requests"] == 0
