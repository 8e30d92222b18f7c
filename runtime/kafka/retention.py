"""What retention takes from a reader that isn't ours and says nothing of it: seen from the offsets that its group commits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient, OffsetSpec

from roo.errors import UnavailableError
from runtime.kafka.reading import Reading
from runtime.kafka.topics import Partition

log = logging.getLogger("roostream.reader")

_ASK_S = 5.0


class Committed(NamedTuple):
    """Of one partition."""

    oldest: int  # offset that is still there
    next: int  # that the group has committed; -1 = none yet


class GroupLosses:
    """Counts records that were deleted before the group committed to be past them: they were not read, or have to be read again
    after the reader's next restart and can't be. What was read and not yet committed counts too, so `num_lost` is a most."""

    def __init__(self, ask: Callable[[], Mapping[Partition, Committed]], who: str) -> None:
        """`ask` may raise UnavailableError; `who` names the reader in the log."""
        self.num_lost = 0
        self._ask, self._who = ask, who
        self._counted: dict[Partition, int] = {}  # partition → offset below which everything was counted

    def look(self) -> None:
        """Say and count what has gone since the last look. Nothing while Kafka is away: the next look finds it."""
        try:
            found = self._ask()
        except UnavailableError as error:
            log.debug("%s", error)
            return
        for partition, (oldest, committed) in found.items():
            since = max(committed, self._counted.get(partition, 0))
            if committed < 0 or oldest <= since:
                continue
            self._counted[partition] = oldest
            self.num_lost += oldest - since
            log.error(
                "%s-%d: retention deleted %d records that %s had not read, or not kept in a checkpoint; raise it",
                *partition,
                oldest - since,
                self._who,
            )


def committed_by(admin: AdminClient, group: str, reading: Reading) -> dict[Partition, Committed]:
    """Of the reading's partitions, asked now; without those of topics that aren't there. UnavailableError: Kafka is away."""
    places = [reading.place(p) for p in reading.partitions]
    try:
        wanted = [ConsumerGroupTopicPartitions(group, places)]
        asked = admin.list_consumer_group_offsets(wanted, request_timeout=_ASK_S)[group]
        oldest = admin.list_offsets({at: OffsetSpec.earliest() for at in places}, request_timeout=_ASK_S)
        first = {(at.topic, at.partition): future.result().offset for at, future in oldest.items()}
        committed = asked.result().topic_partitions
    except KafkaException as error:
        raise UnavailableError(f"offsets of group {group} are not known now: {error.args[0].str()}") from None
    return {
        reading.partition_of(at.topic, at.partition): Committed(first[at.topic, at.partition], max(at.offset, -1))
        for at in committed
    }
