"""Retrieve → rank → log → join → train in a whole stack with a model that does both. A recommendation is
trained as one request."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from infra.stack import Stack
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import SAMPLES, all_partitions
from roostream.wire import records as wire
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ITEMS, SHOWN = 200, 5
CASCADE = 'kind = "cascade"\n[retrieval]\nwidth = 8\n'


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("retrieval")
    model, items = folder / "model.toml", folder / "items.jsonl"
    model.write_text(CASCADE)
    items.write_text("".join(json.dumps(item_of(i)) + "\n" for i in range(1, NUM_ITEMS + 1)))
    options = quick_options()
    options.overrides["worker"] = {"model": str(model)}  # type: ignore[index]
    options.overrides["serving"] = {"model": str(model), "items": str(items), "exploration": 0.0}  # type: ignore[index]
    with Stack(folder / "home", options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=180)
        yield running


def item_of(item: int) -> dict[str, Any]:
    return {"item_id": item, "category": [item % 7], "attributes": {"section": f"s{item % 3}"}}


def post(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{stack.endpoints.serving}{path}"
    call = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=10) as answer:
        return json.loads(answer.read())


def sample_of(stack: Stack, request_id: str) -> Any:
    """The one sample of a request, or None. More than one fails the test."""
    options = ConsumerOptions(
        partitions=all_partitions((SAMPLES,), stack.options.partitions),
        prefix=stack.prefix,
        skip_lost_records=True,
    )
    consumer = KafkaConsumer.open(Broker(stack.endpoints.kafka), "test", options)
    consumer.seek(dict.fromkeys(options.partitions, 0))
    try:
        found = []
        for _ in range(20):  # the samples of other requests never end
            for record in consumer.poll(5000, 0.25):
                kind, message = wire.decode(record.value)
                if kind == wire.SAMPLE and message.header.request_id == request_id:
                    found.append(message)
    finally:
        consumer.close()
    assert len(found) <= 1
    return found[0] if found else None


def test_retrieval_answers_with_a_trained_version(stack: Stack) -> None:
    wait_until("a commit with trained samples", lambda: applied(stack) > 50, 240)

    def trained() -> Any:
        found = post(stack, "/v1/retrieve", {"user_id": 7, "k": 20, "filter": {"section": "s1"}})
        return found if found["retrieval_version"] != "0-0" else None

    found = wait_until("items' vectors of a committed version", trained, 120)
    assert len(found["items"]) == 20 and all(item["item_id"] % 3 == 1 for item in found["items"])
    among = post(stack, "/v1/retrieve", {"user_id": 7, "k": 20, "among": [3, 9, 27]})
    assert {item["item_id"] for item in among["items"]} == {3, 9, 27}


def test_a_clicked_recommendation_is_joined_and_trained_as_one_request(stack: Stack) -> None:
    user = 900_017
    shown = post(
        stack,
        "/v1/recommend",
        {"request_id": "found-1", "user_id": user, "session_id": 3, "k": SHOWN, "retrieved": 50},
    )
    ids = [item["item_id"] for item in shown["items"]]
    assert len(ids) == SHOWN and shown["retrieval_version"] != "0-0"
    click = {"request_id": "found-1", "user_id": user, "session_id": 3, "item_id": ids[1], "action": "click"}
    assert post(stack, "/v1/engagements", click)["accepted"] == 1
    sample = wait_until("the sample of the request", lambda: sample_of(stack, "found-1"), 120)
    assert sorted(sample.item_ids) == sorted(ids) and sorted(sample.positions) == list(range(SHOWN))
    clicks = sample.labels[:: len(sample.labels) // SHOWN]  # the first label of each candidate
    assert [item for item, label in zip(sample.item_ids, clicks, strict=True) if label] == [ids[1]]
    before = applied(stack)
    wait_until("50 more committed samples", lambda: applied(stack) >= before + 50, 120)


def test_g1_g2_nothing_is_lost_and_nothing_is_trained_twice(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack, within_s=240)
