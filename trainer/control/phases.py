"""History first, by more workers in larger batches, then the stream: which of the two an incarnation is for.

    initial ──► at the export point everything is committed, nobody goes on ──► the next incarnation: stream

The historical range is fixed when the phase begins, and kept in the file that claims an incarnation, as wishes and holds are.
Which phase it is follows from that range and the committed offsets, so no second record can say otherwise, whoever dies when, and
who goes back to an older commit is in the phase that it was made in. Kurian et al., *Scalable Machine Learning Training
Infrastructure for Online Ads Recommendation*, §III: initial and caught-up training, epochs that end with a commit.

History is a range of the topic, or a session of the warehouse. Then a commit says which session, and its offsets are positions of
it; the commit that contains all of it has the offsets of the stream at which the table's version ends, or begins the session of
what was archived meanwhile (docs/decisions/0061).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roostream.runtime.kafka.topics import SAMPLES
from roostream.runtime.manifest import Manifest, Restorable
from roostream.runtime.work_unit import STREAM, TableInput, WorkUnit, source_of
from trainer.control.membership import Membership
from trainer.control.types import CoordinatorConfig, Hold, IncarnationPlan, InitialRange, Key
from trainer.control.unit_allocator import UnitAllocator


class Phases:
    """Of one controller; without `initial_workers` in its facts there is the stream alone, and nothing is told of phases."""

    def __init__(self, facts: CoordinatorConfig, roster: Membership) -> None:
        self.facts, self.roster = facts, roster
        self._hand_out: UnitAllocator | None = None
        self._began_initial = False
        self._goes_on: TableInput | None = None  # the next session, that the last commit begins
        self.session: TableInput | None = None  # of the warehouse, which history is
        self.following: TableInput | None = None  # a session to come behind it; None: the stream does

    # Which phase

    @property
    def is_initial(self) -> bool:
        """Some of the historical range isn't committed."""
        return self._hand_out is not None and not self._hand_out.is_over

    @property
    def switches(self) -> bool:
        """The incarnation was for history, and all of that is committed: nobody goes on."""
        return self._began_initial and not self.is_initial

    def begun(self, wish: IncarnationPlan | None, last: Restorable | None) -> int | None:
        """An incarnation is claimed for `wish`, from `last`; the number of its workers (None: as wanted). A wish that was made in
        the other phase says nothing of this one."""
        historical = wish.historical if wish else None
        stated = last.manifest.input if last else None
        self.session = stated or (historical.session if historical else None)
        whole = stated.units if stated else historical.whole if historical else None
        self._hand_out = None if whole is None else UnitAllocator(whole, self.facts.unit_records)
        self.committed(last)
        self._began_initial = self.is_initial
        if wish is None or historical is None or historical.over != self.is_initial:
            return wish.workers if wish else None
        return self._configured

    def committed(self, last: Restorable | None) -> None:
        """This is what is committed now."""
        if self._hand_out is None:
            return
        manifest = last.manifest if last else None
        self._goes_on = manifest.input if manifest and manifest.input != self.session else None
        if self.session is not None and manifest is not None and manifest.input != self.session:
            return self._hand_out.committed(
                {source: unit.end for source, unit in self._hand_out.whole.items()}
            )
        positions = manifest.positions if manifest else {}
        self._hand_out.committed({source_of(partition): at for partition, at in positions.items()})

    def stated(self, manifest: Manifest) -> Manifest:
        """What a commit is of: of a session, with the positions that its workers told; of what follows where all of that is
        trained, the stream from the offsets at which the table's version ends, or the next session from its beginning."""
        if self.session is None or not self._began_initial:
            return manifest
        positions = manifest.positions
        if not self.session.is_trained(positions):
            return dataclasses.replace(manifest, input=self.session)
        follows = self.following if self.following and self.following.begins == self.session.ends else None
        at = dict.fromkeys(positions, 0) if follows else self.session.stream_behind(positions)
        parts = {
            index: dataclasses.replace(part, offsets={partition: at[partition] for partition in part.offsets})
            for index, part in manifest.workers.items()
        }
        return dataclasses.replace(manifest, input=follows, workers=parts)

    # Wishes

    def kept(self, kept: Mapping[str, Any], begin: Callable[[], InitialRange]) -> IncarnationPlan:
        """What the incarnation before this controller was claimed for; the number of workers only if the settings are as they
        were. `begin` fixes the historical range where none is kept."""
        historical = (InitialRange.of(kept.get("historical")) or begin()) if self._is_on else None
        configured = (
            self.facts.num_workers if historical is None or historical.over else self._initial_workers
        )
        is_newest = kept.get("configured") == configured and isinstance(kept.get("workers"), int)
        return IncarnationPlan(
            int(kept["workers"]) if is_newest else configured,
            configured,
            Hold.of(kept.get("hold")),
            historical,
        )

    def wish(self, hold: Hold | None) -> IncarnationPlan:
        """What the next incarnation is claimed for. At the switch the number of workers is the settings': whoever asked for
        another one in the initial phase asked for that phase."""
        if self._hand_out is None:
            return IncarnationPlan(self.roster.next_count, self.facts.num_workers, hold)
        streams = self.switches and self._goes_on is None
        if streams:
            self.roster.want(self._configured)
        count = self._configured if streams else self.roster.next_count
        whole = tuple(self._hand_out.whole.values())
        over = not self.is_initial and self._goes_on is None
        return IncarnationPlan(count, self._configured, hold, InitialRange(whole, over, self.session))

    # Units

    def told(self, key: Key) -> dict[str, Any]:
        """What START and COMMIT tell a worker beside the rest: how far it may read."""
        if self._hand_out is None:
            return {}
        its = (source_of((SAMPLES, number)) for number in self.roster.restore_of(key)["partitions"])
        return {"epoch": (self._hand_out.epoch(its) if self._began_initial else STREAM).plain()}

    def restore_of(self, key: Key) -> dict[str, Any]:
        """What RESTORE tells a worker beside the manifest; `input` where its offsets are positions of a session."""
        told = self.roster.restore_of(key)
        return {**told, "input": self.session.plain()} if self.session and self._began_initial else told

    def is_trained(self, incarnation: int) -> bool:
        """Every worker's units are: a commit is due, and until it comes nobody has anything to do."""
        return self.is_initial and all(self._has_trained(key, incarnation) for key in self.roster.workers)

    def _has_trained(self, key: Key, incarnation: int) -> bool:
        member = self.roster.members.get(key)
        assert self._hand_out is not None
        return (
            member is not None
            and member.incarnation == incarnation
            and member.report.get("epoch_trained") == self._hand_out.number
        )

    def progress(self) -> dict[str, Any] | None:
        """Plain values for `status`; None where there is no initial phase."""
        it = self._hand_out
        if it is None or not self.is_initial:
            return None
        found: dict[str, Any] = {
            "epoch": it.number,
            "epochs": it.num_epochs,
            "records": it.num_records,
            "left": it.num_left,
        }
        if self.session:
            found |= {
                "table": self.session.table,
                "version": self.session.version,
                "last_close_ms": self.session.last_close_ms,
            }
        return found

    def why(self) -> str:
        """Why nobody goes on after a commit, "" = another reason."""
        if self._goes_on is not None:
            return f"a session of the warehouse is trained; the next one, of version {self._goes_on.version}, follows"
        return (
            f"history is trained up to its export point; {self._configured} go on with the stream"
            if self.switches
            else ""
        )

    @property
    def _is_on(self) -> bool:
        return self.facts.initial_workers > 0 or self.facts.from_table

    @property
    def _initial_workers(self) -> int:
        return self.facts.initial_workers or self.facts.num_workers

    @property
    def _configured(self) -> int:
        return self._initial_workers if self.is_initial else self.facts.num_workers


def historical_range(
    bounds: Mapping[int, tuple[int, int]], committed: Mapping[int, int], export: Mapping[int, int]
) -> Iterable[WorkUnit]:
    """By partition of `samples`: from what is committed, or the oldest record that is there, to the export point: what is chosen
    in `export`, else the end of now. `bounds`: (oldest, end)."""
    for number, (oldest, end) in sorted(bounds.items()):
        begin = max(committed.get(number, oldest), oldest)
        yield WorkUnit(source_of((SAMPLES, number)), begin, max(export.get(number, end), begin))
