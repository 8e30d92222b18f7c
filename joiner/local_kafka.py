"""Where the local engine's outputs go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError

from joiner.build import Output
from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import name_of


class KafkaSink:
    """Queues outputs in an idempotent producer."""

    def __init__(self, broker: Broker, prefix: str) -> None:
        self.prefix = prefix
        self._producer = clients.producer(broker)
        self._failed = ""

    def write(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            clients.send(
                self._producer,
                name_of(self.prefix, output.topic),
                key=output.key,
                value=output.value,
                timestamp_ms=output.timestamp_ms or 0,  # librdkafka: 0 = now
                on_delivery=self._delivered,
            )

    def flush(self, stop: threading.Event) -> bool:
        while self._producer.flush(0.2):
            if stop.is_set():
                return False
        if self._failed:
            raise UnavailableError(
                f"Kafka refused a record of the joiner: {self._failed}; fix it and start again"
            )
        return True

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._failed = f"{message.topic()}: {error.str()}"
