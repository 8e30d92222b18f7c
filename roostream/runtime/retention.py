"""Which commits are kept: the newest, then one a minute, an hour and a day.

An older commit than the newest ones is kept only if all its segments are in the checkpoint store, so that the
shards' disks need not keep rows for days (docs/decisions/0112).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from roostream.errors import CheckpointError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore

RETENTION_FILE = "control/retention"
"""The retention of the running controller, as JSON, for `roostream checkpoint list`."""

_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000


class Retention(NamedTuple):
    """How many commits are kept. A period without a commit does not count."""

    newest: int = manifests.KEEP_MANIFESTS
    minutes: int = 60
    hours: int = 24
    days: int = 7

    def tiers(self, newest: Iterable[int], older: Iterable[tuple[int, int]]) -> dict[int, str]:
        """Number → why it is kept: "newest", "minute", "hour" or "day". Others are not kept.

        `newest`: numbers that are kept in any case. `older`: (number, time in ms) of all commits that may be
        kept for longer, ascending; of each period, the last one is kept.
        """
        kept = dict.fromkeys(newest, "newest")
        descending = sorted(older, reverse=True)
        for tier, period_ms, count in (
            ("minute", _MINUTE_MS, self.minutes),
            ("hour", _HOUR_MS, self.hours),
            ("day", _DAY_MS, self.days),
        ):
            periods = set[int]()
            for number, time_ms in descending:
                if time_ms // period_ms not in periods and len(periods) < count:
                    periods.add(time_ms // period_ms)
                    kept.setdefault(number, tier)
        return kept


DEFAULT_RETENTION = Retention()


class _Content(NamedTuple):
    """What deletion needs to know of a manifest."""

    time_ms: int
    needed: frozenset[str]  # names in the store
    is_copied: bool  # all its segments are in the store


class StoreCleaner:
    """Deletes what no restart and no rollback needs. Remembers the content of manifests, which never
    changes."""

    def __init__(self, store: CheckpointStore, retention: Retention = DEFAULT_RETENTION) -> None:
        self.store, self.retention = store, retention
        self._contents: dict[str, _Content] = {}

    def tiers(self) -> dict[int, str]:
        """Number → tier of each commit that is to be kept. Raises UnavailableError."""
        return self._tiers(manifests.numbers(self.store))

    def clean(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Delete all manifests that are not kept, older trainer files and copies of segments that no kept one
        names, old incarnations, and files that killed writers left unfinished. After an interruption the next
        call continues. `on_progress` is called after each manifest that is read and each object that is
        deleted, because there are many after a time in which nothing could be deleted. What it raises is an
        interruption.

        The files of a damaged manifest stay as long as its name is kept, because a backup may repair it.
        """
        store, numbers = self.store, manifests.numbers(self.store)
        kept = self._tiers(numbers, on_progress)
        retired = [manifests.manifest_name(number) for number in numbers if number not in kept]
        for name in (*retired, *sorted(store.list(manifests.DISCARDED))[: -self.retention.newest]):
            store.delete(name)
            self._contents.pop(name, None)
            on_progress()
        needed = frozenset[str]().union(*(content.needed for content in self._contents.values()))
        damaged = {number for number in kept if manifests.manifest_name(number) not in self._contents}
        last = max(map(manifests.seq_of, self._contents), default=0)
        for name in (*store.list(manifests.DENSE), *store.list(manifests.WORKERS)):
            number = name.rsplit("/", 1)[-1].split("-", 1)[0]
            if name in needed or not number.isdecimal() or int(number) in damaged or int(number) >= last:
                continue
            store.delete(name)
            on_progress()
        for name in store.list(manifests.SEGMENTS):
            # A damaged manifest may name any older segment; a commit that is being made has a higher number.
            if name not in needed and max(damaged, default=0) < manifests.segment_copy_seq(name) < last:
                store.delete(name)
                on_progress()
        manifests.retire_incarnations(store)
        store.sweep()

    def _tiers(
        self, numbers: Sequence[int], on_progress: Callable[[], None] = lambda: None
    ) -> dict[int, str]:
        names = list(map(manifests.manifest_name, numbers))
        self._contents = {name: self._contents[name] for name in names if name in self._contents}
        for name in names:
            if name not in self._contents:
                if found := self._content(name):
                    self._contents[name] = found
                on_progress()
        older = [
            (manifests.seq_of(name), content.time_ms)
            for name, content in self._contents.items()
            if content.is_copied
        ]
        return self.retention.tiers(numbers[-self.retention.newest :], older)

    def _content(self, name: str) -> _Content | None:
        """None: damaged."""
        try:
            manifest = manifests.load(self.store, name).manifest
        except CheckpointError:
            return None
        segments = [s for shard in manifest.shards.values() for s in shard.get("segments", ())]
        return _Content(
            manifest.time_ms,
            frozenset(manifest.files.keys() | manifest.segment_copies),
            all(segment.get("copy") for segment in segments),
        )


def write_retention(store: CheckpointStore, retention: Retention) -> None:
    """Let other programs know it. Raises UnavailableError."""
    store.put(RETENTION_FILE, json.dumps(retention._asdict()).encode())


def read_retention(store: CheckpointStore) -> Retention:
    """The retention of the controller that ran last; the default if there was none."""
    try:
        return Retention(**json.loads(store.get(RETENTION_FILE)))
    except (CheckpointError, ValueError, TypeError):
        return DEFAULT_RETENTION
