"""What retention takes from a reader that isn't ours and says nothing of it: seen from the offsets that its group commits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaException

from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.reading import Reading
from roostream.runtime.kafka.topics import Partition

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


def committed_by(client: Consumer, reading: Reading) -> dict[Partition, Committed]:
    """Of the reading's partitions, by the group of `client`, which joins no group by being asked.

    A consumer's question, since the admin client's ends the process where the group's coordinator is not there yet: librdkafka
    follows a null pointer (its issue 5040).

    Raises:
        UnavailableError: Kafka is away, or lacks one of the topics.
    """
    places = [reading.place(p) for p in reading.partitions]
    try:
        client.poll(0)  # what it has to say of broken connections would heap up
        oldest = [first for first, _ in clients.bounds(client, places, _ASK_S)]
        committed = {(at.topic, at.partition): at for at in client.committed(places, timeout=_ASK_S)}
        at = [committed[place.topic, place.partition] for place in places]
        if refused := next((place.error for place in at if place.error is not None), None):
            raise KafkaException(refused)
    except KafkaException as error:
        raise UnavailableError(
            f"offsets of {reading.named()} are not known now: {error.args[0].str()}"
        ) from None
    return {
        p: Committed(first, max(of.offset, -1))
        for p, first, of in zip(reading.partitions, oldest, at, strict=True)
    }
