"""Slipstream over a finite log: what is done behind which step.

    steps 1 .. W                  accesses are counted; behind W the hot rows are known, and the first snapshot is taken
    behind W + k, W + 2k, ..      further snapshots: s grows by what moved between one and the next
    behind the last of N          T, from the hot inputs that came meanwhile (the first MAX_INPUTS)
    from AHEAD steps later on     inputs are skipped

Chunks are claimed ahead of training, fewer than AHEAD: so no decision depends on how far. Everything counts steps, and nothing is
changed but behind a step that is trained: `state` is exact at every cut. What it finds that makes a run hard to believe is said
in a sentence each.

Letters: N hot rows of a stack, H those of all stacks, D width, R requests, I inputs, S slots, L entries.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, StackLookup
from trainer.selection.config import SlipstreamConfig
from trainer.selection.row_index import RowIndex
from trainer.selection.slipstream import (
    AccessCounts,
    Classified,
    ReadSlots,
    hot_requests,
    is_hot,
    is_stale,
    judge,
    moved,
    read_slots,
    sampled_threshold,
    take_requests,
    threshold,
)

log = logging.getLogger("roostream.worker")

AHEAD = 16
MAX_INPUTS = 8192
_MAX_ENTRIES = 1 << 20  # of the inputs kept
_MIN_SIGHTS = 10  # of the coldest hot row, where counting was cut short
_OF_INPUTS = ("num_slots_I", "num_entries_S", "row_L")
_MAX_OFF = 0.05  # of the share of hot inputs that is skipped, against `drop`

Pull = Callable[[Lookup], Mapping[str, np.ndarray]]
"""Stack → float32 [U, D]: rows as they are now."""


class _HotStack:
    """The hot rows of one stack."""

    def __init__(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        self.rows = RowIndex(table_N, id_N)
        self.s_N = np.zeros(len(id_N), np.float32)
        self.visited_N = np.zeros(len(id_N), np.bool_)
        self.before_ND: np.ndarray | None = None

    def look(self, now_ND: np.ndarray) -> None:
        """A snapshot."""
        if self.before_ND is not None:
            self.s_N = np.maximum(self.s_N, moved(self.before_ND, now_ND))
        self.before_ND = now_ND.copy()


class _HotInputs:
    """Hot inputs that T is taken from: ragged, by the numbers of all stacks' hot rows together."""

    def __init__(self, kept: Mapping[str, np.ndarray] | None = None) -> None:
        """`kept`: as `arrays` gave them; None: there are none."""
        self._parts: list[Sequence[np.ndarray]] = [[kept[name] for name in _OF_INPUTS]] if kept else []
        self.num_inputs, self.num_entries = (
            (len(self._parts[0][0]), len(self._parts[0][2])) if kept else (0, 0)
        )

    @property
    def full(self) -> bool:
        return self.num_inputs >= MAX_INPUTS or self.num_entries >= _MAX_ENTRIES

    def add(self, slots: ReadSlots, kept_R: np.ndarray) -> None:
        """Those of `kept_R`; as `SlipstreamPolicy` numbers rows."""
        part = take_requests(*slots, kept_R)
        self._parts.append(part)
        self.num_inputs, self.num_entries = self.num_inputs + len(part[0]), self.num_entries + len(part[2])

    def arrays(self) -> dict[str, np.ndarray]:
        """int32: how many slots each has, how many entries each of those, and their rows."""
        none = [np.zeros(0, np.int32)] * len(_OF_INPUTS)
        joined = [np.concatenate(parts) for parts in zip(none, *self._parts, strict=True)]
        self._parts = [joined]
        return dict(zip(_OF_INPUTS, joined, strict=True))

    @property
    def slots(self) -> ReadSlots:
        num_slots_I, num_entries_S, row_L = self.arrays().values()
        request_S = np.repeat(np.arange(len(num_slots_I)), num_slots_I)
        return ReadSlots(
            request_S, np.repeat(np.arange(len(num_entries_S)), num_entries_S), row_L.astype(np.int64)
        )


class SlipstreamPolicy:
    """Of one worker that has the whole log."""

    def __init__(self, config: SlipstreamConfig, schema: Schema, seed: int = 0) -> None:
        """`seed`: of the paper's sample, where one is asked for."""
        self.config, self.schema, self._seed = config, schema, seed
        self._begin()

    def _begin(self) -> None:
        schema = self.schema
        self.counts = {stack: AccessCounts() for stack in schema.stacks}
        self.num_counted = 0  # requests
        self.hot: dict[str, _HotStack] = {}
        self.inputs = _HotInputs()
        self.num_looked = self.num_hot_looked = (
            0  # requests behind the first snapshot, and which of them were hot
        )
        self.T: float | None = None  # once it is known
        self.realised: float | None = None  # share of the hot inputs that T was taken from and skips
        self.half_width: float | None = None  # of that share's interval, where T was searched in a sample
        self._rows_H1: tuple[np.ndarray, np.ndarray] | None = (
            None  # what inputs are judged by, once nothing changes it any more
        )
        self.over = False  # the log has ended: nothing is skipped any more

    def stale(self, batch: Batch, step: int) -> np.ndarray | None:
        """bool [R]: which requests of a chunk, which will be the loop's step `step`, are skipped. None: none yet, or no more."""
        if self.over or step <= self.config.last_snapshot + AHEAD or not batch.num_requests:
            return None
        assert self.T is not None, "a chunk was claimed further ahead than AHEAD"
        slots = read_slots(batch, self._hot_rows)
        if self._rows_H1 is None:
            self._rows_H1 = self._all_rows()
        alpha, hot_share = self.config.alpha, self.config.hot_share
        return is_stale(slots, *self._rows_H1, batch.num_requests, self.T, alpha=alpha, hot_share=hot_share)

    def on_trained(self, step: int, batches: list[tuple[Batch, Lookup]], pull: Pull) -> None:
        """Step `step` is trained, on these. `pull` sees what it changed.

        Raises:
            UnavailableError: as `pull`.
        """
        config = self.config
        if self.over or step > config.last_snapshot:
            return
        for batch, lookup in batches:
            if step <= config.warm_up_steps:
                self._count(batch, lookup)
            else:
                self._visit(batch)
        if step < config.warm_up_steps or (step - config.warm_up_steps) % config.snapshot_steps:
            return
        if step == config.warm_up_steps:
            self._find_hot()
        self._look(pull)
        if step == config.last_snapshot:
            self._choose_threshold()

    def _choose_threshold(self) -> None:
        slots, num, drop = self.inputs.slots, self.inputs.num_inputs, self.config.drop
        q_I = self._judge(slots, num).q_R
        if num and self.config.sample:
            self.T, self.half_width = sampled_threshold(
                q_I, drop, self.config.sample, np.random.default_rng(self._seed)
            )
        else:
            self.T = threshold(q_I, drop)
        if not num:
            log.warning(
                "slipstream: no input was hot between the snapshots, so none is skipped; lower hot_ratio or hot_share"
            )
            return
        self.realised = float((q_I <= self.T).mean())
        if abs(self.realised - drop) > _MAX_OFF:
            log.warning(
                "slipstream: expected to skip %.0f %% of the hot inputs, the threshold that was found skips %.1f %%: many rows "
                "have moved equally far, or the sample is small; choose alpha nearer to the middle, unvisited, or sample = 0",
                100 * drop,
                100 * self.realised,
            )

    def end(self) -> None:
        """The log is over, or the stream begins: everything is trained from now on, and nothing is remembered."""
        if not self.over:
            early = (
                ""
                if self.T is not None
                else f", and nothing was skipped: it came before step {self.config.last_snapshot}"
            )
            log.warning(
                "slipstream is over at the end of history: from here on everything is trained%s", early
            )
        self._begin()
        self.over = True

    def report(self) -> dict[str, float | None]:
        """What is exported and shown of it."""
        rows = [its for its in self.hot.values() if len(its.rows)]
        num_hot = sum(len(its.rows) for its in rows)
        return {
            "phase": self.phase,
            "hot_rows": num_hot,
            "hot_requests_share": self.num_hot_looked / self.num_looked if self.num_looked else None,
            "unvisited_share": 1 - sum(int(its.visited_N.sum()) for its in rows) / num_hot
            if num_hot
            else None,
            "threshold": self.T if self.T is not None and math.isfinite(self.T) else None,
            "realised_drop": self.realised,
            "half_width": self.half_width,
        }

    @property
    def phase(self) -> int:
        """0 counting, 1 between snapshots, 2 skipping, 3 over."""
        return 3 if self.over else 2 if self.T is not None else 1 if self.hot else 0

    def state(self) -> dict[str, np.ndarray]:
        """All that `load` needs, under `slipstream.`; nothing once it is over."""
        if self.over:
            return {"slipstream.over": np.ones((), np.int64)}
        numbers = np.array([self.num_counted, self.num_looked, self.num_hot_looked, bool(self.hot)], np.int64)
        out: dict[str, np.ndarray] = {"numbers": numbers}
        if self.T is not None:
            out["T"] = np.array(self.T, np.float64)
        for name in ("realised", "half_width"):
            if getattr(self, name) is not None:
                out[name] = np.array(getattr(self, name), np.float64)
        for stack in self.schema.stacks:
            if not self.hot:
                rows, count_N = self.counts[stack].rows, self.counts[stack].count_N.copy()
                out |= {f"{stack}.table": rows.table_N, f"{stack}.id": rows.id_N, f"{stack}.count": count_N}
                continue
            its = self.hot[stack]
            out |= {f"{stack}.table": its.rows.table_N, f"{stack}.id": its.rows.id_N}
            out |= {f"{stack}.s": its.s_N.copy(), f"{stack}.visited": its.visited_N.astype(np.uint8)}
            if self.T is None and its.before_ND is not None:
                out[f"{stack}.before"] = its.before_ND
        if self.T is None:
            out |= {f"inputs.{name}": value for name, value in self.inputs.arrays().items()}
        return {f"slipstream.{name}": value for name, value in out.items()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Become what `state` gave: nothing where it gave nothing. Rows of tables that are gone, or that have another width now,
        are forgotten, and with them the inputs that T is to be taken from."""
        self._begin()
        mine = {k.removeprefix("slipstream."): v for k, v in tensors.items() if k.startswith("slipstream.")}
        self.over = "over" in mine
        if "numbers" not in mine:
            return
        self.num_counted, self.num_looked, self.num_hot_looked, has_hot = mine["numbers"].tolist()
        self.T = float(mine["T"]) if "T" in mine else None
        self.realised, self.half_width = (
            float(mine[n]) if n in mine else None for n in ("realised", "half_width")
        )
        num_kept = sum(self._load_stack(stack, mine, has_hot=bool(has_hot)) for stack in self.schema.stacks)
        num_saved = sum(len(id_N) for name, id_N in mine.items() if name.endswith(".id"))
        same_stacks = {
            name.removesuffix(".id") for name in mine if name.endswith(".id")
        } == self.schema.stacks.keys()
        if num_kept < num_saved:
            log.warning(
                "slipstream: %d rows are of tables that are gone or of another width: forgotten",
                num_saved - num_kept,
            )
        if num_kept < num_saved or not same_stacks:
            return
        if "inputs.row_L" in mine:
            self.inputs = _HotInputs({name: mine[f"inputs.{name}"] for name in _OF_INPUTS})

    def _load_stack(self, stack: str, mine: Mapping[str, np.ndarray], *, has_hot: bool) -> int:
        """How many rows are still of tables of the schema."""
        if f"{stack}.id" not in mine:
            self.hot |= {stack: _HotStack(np.zeros(0, np.uint32), np.zeros(0, np.int64))} if has_hot else {}
            return 0
        kept_N = np.isin(mine[f"{stack}.table"], [table.id for table in self.schema.stacks[stack]])
        table_N, id_N = mine[f"{stack}.table"][kept_N], mine[f"{stack}.id"][kept_N]
        if not has_hot:
            self.counts[stack].add(table_N, id_N, mine[f"{stack}.count"][kept_N])
            return len(id_N)
        its = self.hot[stack] = _HotStack(table_N, id_N)
        its.s_N, its.visited_N = mine[f"{stack}.s"][kept_N], mine[f"{stack}.visited"][kept_N].astype(np.bool_)
        its.before_ND = mine[f"{stack}.before"][kept_N] if f"{stack}.before" in mine else None
        return len(id_N)

    def _count(self, batch: Batch, lookup: Lookup) -> None:
        if self.config.count_requests and self.num_counted >= self.config.count_requests:
            return
        self.num_counted += batch.num_requests
        for stack, its in lookup.stacks.items():
            index_L = np.concatenate([np.zeros(0, np.int64), *its.index.values()])
            count_U = np.bincount(index_L, minlength=len(its.id_U))
            self.counts[stack].add(its.table_U, its.id_U, count_U)

    def _find_hot(self) -> None:
        """From the counts, which are over."""
        total = sum(counts.total for counts in self.counts.values())
        if self.config.count_requests and self.config.hot_ratio * total < _MIN_SIGHTS:
            log.warning(
                "slipstream.hot_ratio: expected %d sights or more of a hot row among those counted, %g of %d accesses is less: a "
                "sight or two make a row hot; count more requests, or raise it",
                _MIN_SIGHTS,
                self.config.hot_ratio,
                total,
            )
        hot = {
            stack: is_hot(counts.count_N, total, self.config.hot_ratio)
            for stack, counts in self.counts.items()
        }
        all_H = np.concatenate(
            [np.zeros(0, np.int64), *(self.counts[stack].count_N[of_N] for stack, of_N in hot.items())]
        )
        least = 0
        if len(all_H) > self.config.max_hot_rows:  # whole counts only: no order among equals is needed
            least = int(np.sort(all_H)[-self.config.max_hot_rows - 1]) + 1
        for stack, counts in self.counts.items():
            kept_N = hot[stack] & (counts.count_N >= least)
            self.hot[stack] = _HotStack(counts.rows.table_N[kept_N], counts.rows.id_N[kept_N])
        self.counts = {stack: AccessCounts() for stack in self.schema.stacks}

    def _look(self, pull: Pull) -> None:
        lookup = Lookup(
            {stack: StackLookup(its.rows.table_N, its.rows.id_N, {}) for stack, its in self.hot.items()}
        )
        rows = pull(lookup)
        for stack, its in self.hot.items():
            its.look(rows[stack])

    def _visit(self, batch: Batch) -> None:
        """A batch between two snapshots."""
        slots, ends = (
            read_slots(batch, self._hot_rows),
            np.cumsum([len(its.rows) for its in self.hot.values()]),
        )
        hot_H1, seen_H1 = np.ones(int(ends[-1]) + 1, np.bool_), np.zeros(int(ends[-1]) + 1, np.bool_)
        hot_H1[-1], seen_H1[slots.row_L] = False, True
        for its, seen_N in zip(
            self.hot.values(), np.split(seen_H1, ends), strict=False
        ):  # behind them, what isn't hot
            its.visited_N |= seen_N
        hot_R = hot_requests(slots, hot_H1, batch.num_requests, self.config.hot_share)
        self.num_looked += batch.num_requests
        self.num_hot_looked += int(hot_R.sum())
        if not self.inputs.full:
            self.inputs.add(slots, hot_R)

    @property
    def _hot_rows(self) -> dict[str, RowIndex]:
        return {stack: its.rows for stack, its in self.hot.items()}

    def _judge(self, slots: ReadSlots, num_requests: int) -> Classified:
        alpha, hot_share = self.config.alpha, self.config.hot_share
        return judge(slots, *self._all_rows(), num_requests, alpha=alpha, hot_share=hot_share)

    def _all_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the hot rows of all stacks, and of the number behind them: s (float32), and whether it is hot."""
        s = [np.zeros(0, np.float32), *(self._s(self.hot[stack]) for stack in self.schema.stacks)]
        s_H1 = np.concatenate([*s, [np.float32(np.inf)]]).astype(np.float32)
        return s_H1, np.arange(len(s_H1)) < len(s_H1) - 1

    def _s(self, its: _HotStack) -> np.ndarray:
        return (
            its.s_N
            if self.config.unvisited == "stale"
            else np.where(its.visited_N, its.s_N, np.float32(np.inf))
        )
