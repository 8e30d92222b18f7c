"""Counts records that retention deleted before another consumer group read them, from the offsets that the
group commits.

The joiner uses it for Flink's Kafka source, which skips deleted records without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaException

from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions
from roostream.runtime.kafka.topics import Partition

log = logging.getLogger("roostream.kafka")

_REQUEST_TIMEOUT_S = 5.0


class CommittedOffset(NamedTuple):
    """One partition of a consumer group."""

    oldest: int  # first offset that still exists
    next: int  # the group's committed offset; -1 = none yet


class RetentionLossCounter:
    """Counts records that were deleted before the group committed past them.

    They were not read, or can't be read again after the group's next restart. `num_lost` is an upper bound:
    records that were read but not yet committed count as well.
    """

    def __init__(self, fetch: Callable[[], Mapping[Partition, CommittedOffset]], group: str) -> None:
        """`fetch` may raise UnavailableError; `group` names the reading program in the log."""
        self.num_lost = 0
        self._fetch, self._group = fetch, group
        self._counted: dict[Partition, int] = {}  # partition → offset below which everything was counted

    def update(self) -> None:
        """Count and log records lost since the last call. While Kafka is away nothing happens; the next call
        catches up."""
        try:
            offsets = self._fetch()
        except UnavailableError as error:
            log.debug("%s", error)
            return
        for partition, (oldest, committed) in offsets.items():
            since = max(committed, self._counted.get(partition, 0))
            if committed < 0 or oldest <= since:
                continue
            self._counted[partition] = oldest
            self.num_lost += oldest - since
            log.error(
                "%s-%d: retention deleted %d records before %s had committed them; raise the topic's "
                "retention",
                *partition,
                oldest - since,
                self._group,
            )


def committed_offsets(client: Consumer, options: ConsumerOptions) -> dict[Partition, CommittedOffset]:
    """Offsets that the consumer group of `client` has committed for the partitions of `options`. Does not
    join the group.

    Uses a consumer, because the admin client crashes the process while the group has no coordinator
    (librdkafka issue 5040).

    Raises:
        UnavailableError: Kafka is away, or one of the topics does not exist.
    """
    partitions = [options.topic_partition(p) for p in options.partitions]
    try:
        client.poll(0)  # serves error callbacks, which would pile up
        oldest = [first for first, _ in clients.bounds(client, partitions, _REQUEST_TIMEOUT_S)]
        answer = client.committed(partitions, timeout=_REQUEST_TIMEOUT_S)
        by_partition = {(tp.topic, tp.partition): tp for tp in answer}
        committed = [by_partition[tp.topic, tp.partition] for tp in partitions]
        if error := next((tp.error for tp in committed if tp.error is not None), None):
            raise KafkaException(error)
    except KafkaException as error:
        raise UnavailableError(
            f"committed offsets of {options.topic_names()} are unknown: {error.args[0].str()}"
        ) from None
    return {
        p: CommittedOffset(first, max(tp.offset, -1))
        for p, first, tp in zip(options.partitions, oldest, committed, strict=True)
    }
