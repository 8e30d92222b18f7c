"""Initial training of history by more workers in larger batches, then training on the stream: the phase of an
incarnation.

    initial ──► at the export point everything is committed and training ends ──► next incarnation: stream

The historical range is fixed when the initial phase begins. It is stored in the incarnation's file, as plans
and holds are. The phase follows from that range and the committed offsets alone. So a crash cannot leave a
second, contradicting record, and a rollback to an older commit also returns to its phase. See Kurian et al.,
*Scalable Machine Learning Training Infrastructure for Online Ads Recommendation*, §III: initial and caught-up
training, epochs that end with a commit.

History is a range of the topic or a session of the warehouse. For a session, each commit names the session,
and its offsets are positions in it. The commit that completes the session has the stream offsets at which the
table's version ends, or it begins a further session of what was archived meanwhile (docs/decisions/0038).

Work units:

    committed offsets ──► epoch ──► rest of each source's part ──► a worker's sources are its units
          ▲                                                                            │
          └── a commit, due as soon as every worker reports its units as trained ◄─────┘

The range of every source is divided into the same number of parts of at most `unit_records`. The parts with
one number are an *epoch*. All sources are in the same epoch, so that none is far ahead of the others. A unit
is done when the offsets of a manifest say so. There is no other list of finished units, so nothing is handed
out twice, whichever program dies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from roostream.runtime.kafka.topics import SAMPLES, Progress
from roostream.runtime.manifest import Manifest, Restorable
from roostream.runtime.work_unit import STREAM, Epoch, TableInput, WorkUnit, partition_of, source_of
from trainer.control.membership import Membership
from trainer.control.types import CoordinatorConfig, Hold, IncarnationPlan, InitialRange, Key

Committed = Mapping[str, int]
"""Source → everything below this offset is committed; a source that is missing has nothing."""


class UnitAllocator:
    """Splits one historical range into epochs. They are numbered from 1; a number above the last means that
    all is committed."""

    def __init__(self, units: Sequence[WorkUnit], unit_records: int) -> None:
        self.units = {unit.source: unit for unit in units}
        self.num_epochs = max((-(-len(unit) // unit_records) for unit in units), default=0)
        self.committed_ends: Committed = {}

    def committed(self, committed_ends: Committed) -> None:
        """Set what the newest commit contains; a RESTORE may go back."""
        self.committed_ends = dict(committed_ends)

    @property
    def number(self) -> int:
        """Number of the epoch of the source that is furthest behind."""
        return min((self._epoch_number(unit) for unit in self.units.values()), default=1)

    @property
    def is_over(self) -> bool:
        """Whether everything is committed."""
        return self.number > self.num_epochs

    def epoch(self, sources: Iterable[str]) -> Epoch:
        """Units that the owner of `sources` may read until the next commit. A finished unit is empty."""
        number = min(self.number, self.num_epochs)
        units = [self.units[source] for source in sources if source in self.units]
        return Epoch(number, tuple(self._remaining(unit, number) for unit in units))

    @property
    def num_records(self) -> int:
        return sum(map(len, self.units.values()))

    @property
    def num_left(self) -> int:
        """Records that are not committed."""
        return sum(len(unit.after(self.committed_ends.get(unit.source, 0))) for unit in self.units.values())

    def _epoch_number(self, unit: WorkUnit) -> int:
        """The first epoch that is not fully committed."""
        committed = self.committed_ends.get(unit.source, 0)
        first, behind = 1, self.num_epochs + 1
        while first < behind:
            middle = (first + behind) // 2
            part = unit.part(middle - 1, self.num_epochs)
            first, behind = (middle + 1, behind) if committed >= part.end else (first, middle)
        return first

    def _remaining(self, unit: WorkUnit, number: int) -> WorkUnit:
        if not self.num_epochs:
            return unit.after(unit.end)
        return unit.part(number - 1, self.num_epochs).after(self.committed_ends.get(unit.source, 0))


class Phases:
    """Phases of one controller. Without `initial_workers` in its settings there is only the stream, and no
    phase is reported."""

    def __init__(self, config: CoordinatorConfig, membership: Membership) -> None:
        self.config, self.membership = config, membership
        self._allocator: UnitAllocator | None = None
        self._began_initial = False
        self._next_session: TableInput | None = None  # begun by the last commit
        self.session: TableInput | None = None  # the warehouse session that history consists of
        self.following: TableInput | None = None  # a session to train after it; None: the stream

    # Which phase

    @property
    def is_initial(self) -> bool:
        """Whether part of the historical range is not committed."""
        return self._allocator is not None and not self._allocator.is_over

    @property
    def switches(self) -> bool:
        """Whether the incarnation was for history and all of it is committed, so that training does not
        resume."""
        return self._began_initial and not self.is_initial

    def completes(self, positions: Progress) -> bool:
        """Whether a commit at these positions is the last one of history, so that training does not
        resume."""
        if self._allocator is None or not self._began_initial:
            return False
        units = self._allocator.units.values()
        return all(positions.get(partition_of(unit.source), 0) >= unit.end for unit in units)

    def begin_incarnation(self, plan: IncarnationPlan | None, last: Restorable | None) -> int | None:
        """An incarnation was claimed for `plan` and starts from `last`. Returns its number of workers (None:
        the wanted number). A number that was planned in the other phase does not apply to this one."""
        initial = plan.initial if plan else None
        committed_input = last.manifest.input if last else None
        self.session = committed_input or (initial.session if initial else None)
        units = committed_input.units if committed_input else initial.units if initial else None
        self._allocator = None if units is None else UnitAllocator(units, self.config.unit_records)
        self.committed(last)
        self._began_initial = self.is_initial
        if plan is None or initial is None or initial.is_over != self.is_initial:
            return plan.workers if plan else None
        return self._configured

    def committed(self, last: Restorable | None) -> None:
        """Set the newest commit."""
        if self._allocator is None:
            return
        manifest = last.manifest if last else None
        self._next_session = manifest.input if manifest and manifest.input != self.session else None
        if self.session is not None and manifest is not None and manifest.input != self.session:
            ends = {source: unit.end for source, unit in self._allocator.units.items()}
            return self._allocator.committed(ends)
        positions = manifest.positions if manifest else {}
        self._allocator.committed({source_of(partition): at for partition, at in positions.items()})

    def with_input(self, manifest: Manifest) -> Manifest:
        """Add the input to a commit of a session: the session and the positions that its workers reported. If
        all of the session is trained, the input is what follows: the stream, from the offsets at which the
        table's version ends, or the next session from its beginning."""
        if self.session is None or not self._began_initial:
            return manifest
        positions = manifest.positions
        if not self.session.is_trained(positions):
            return dataclasses.replace(manifest, input=self.session)
        follows = self.following if self.following and self.following.begins == self.session.ends else None
        offsets = dict.fromkeys(positions, 0) if follows else self.session.stream_behind(positions)
        parts = {
            index: dataclasses.replace(part, offsets={p: offsets[p] for p in part.offsets})
            for index, part in manifest.workers.items()
        }
        return dataclasses.replace(manifest, input=follows, workers=parts)

    # Plans

    def stored_plan(self, saved: Mapping[str, Any], begin: Callable[[], InitialRange]) -> IncarnationPlan:
        """The plan of the incarnation before this controller. Its number of workers counts only if the
        settings are unchanged. `begin` fixes the historical range if none is stored."""
        initial = None
        if self.config.initial_workers > 0 or self.config.from_table:
            initial = InitialRange.from_saved(saved.get("historical")) or begin()
        configured = self.config.num_workers if initial is None or initial.is_over else self._initial_workers
        is_newest = saved.get("configured") == configured and isinstance(saved.get("workers"), int)
        workers = int(saved["workers"]) if is_newest else configured
        return IncarnationPlan(workers, configured, Hold.from_saved(saved.get("hold")), initial)

    def next_plan(self, hold: Hold | None) -> IncarnationPlan:
        """The plan of the next incarnation. At the switch to the stream, the configured number of workers
        applies: a number that an operator requested in the initial phase was meant for that phase."""
        if self._allocator is None:
            return IncarnationPlan(self.membership.next_count, self.config.num_workers, hold)
        to_stream = self.switches and self._next_session is None
        if to_stream:
            self.membership.want(self._configured)
        count = self._configured if to_stream else self.membership.next_count
        is_over = not self.is_initial and self._next_session is None
        initial = InitialRange(tuple(self._allocator.units.values()), is_over, self.session)
        return IncarnationPlan(count, self._configured, hold, initial)

    # Units

    def epoch_fields(self, key: Key) -> dict[str, Any]:
        """Fields of a worker's START and COMMIT: how far it may read."""
        if self._allocator is None:
            return {}
        partitions = self.membership.restore_fields(key)["partitions"]
        sources = (source_of((SAMPLES, number)) for number in partitions)
        return {"epoch": (self._allocator.epoch(sources) if self._began_initial else STREAM).plain()}

    def restore_fields(self, key: Key) -> dict[str, Any]:
        """Fields of a worker's RESTORE besides the manifest; `input` if its offsets are positions of a
        session."""
        fields = self.membership.restore_fields(key)
        return {**fields, "input": self.session.plain()} if self.session and self._began_initial else fields

    def is_trained(self, incarnation: int) -> bool:
        """Whether all workers have trained their units. A commit is due then, and no worker has work until it
        is done."""
        return self.is_initial and all(self._has_trained(key, incarnation) for key in self.membership.workers)

    def _has_trained(self, key: Key, incarnation: int) -> bool:
        member = self.membership.members.get(key)
        assert self._allocator is not None
        if member is None or member.incarnation != incarnation:
            return False
        return member.report.get("epoch_trained") == self._allocator.number

    def progress(self) -> dict[str, Any] | None:
        """Plain values for `status`. None if the initial phase is over or does not exist."""
        allocator = self._allocator
        if allocator is None or not self.is_initial:
            return None
        progress: dict[str, Any] = {"epoch": allocator.number, "epochs": allocator.num_epochs}
        progress |= {"records": allocator.num_records, "left": allocator.num_left}
        if session := self.session:
            progress |= {"table": session.table, "version": session.version}
            progress |= {"last_close_ms": session.last_close_ms}
        return progress

    def closing_reason(self) -> str:
        """Why training does not resume after a commit; "" if the phase is not the reason."""
        if self._next_session is not None:
            version = self._next_session.version
            return f"a session of the warehouse is trained; the session of version {version} follows"
        if self.switches:
            count = self._configured
            return f"history is trained up to its export point; {count} workers continue with the stream"
        return ""

    @property
    def _initial_workers(self) -> int:
        return self.config.initial_workers or self.config.num_workers

    @property
    def _configured(self) -> int:
        return self._initial_workers if self.is_initial else self.config.num_workers


def historical_range(
    bounds: Mapping[int, tuple[int, int]], committed: Mapping[int, int], export: Mapping[int, int]
) -> Iterable[WorkUnit]:
    """One unit per partition of `samples`, from the committed offset or the oldest record to the export
    point. `bounds`: (oldest, end) by partition. `export`: chosen export points; the default is the current
    end."""
    for number, (oldest, end) in sorted(bounds.items()):
        begin = max(committed.get(number, oldest), oldest)
        yield WorkUnit(source_of((SAMPLES, number)), begin, max(export.get(number, end), begin))
