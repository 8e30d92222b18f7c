"""Slipstream over a finite log: what happens after which step.

    steps 1 .. W                count accesses; then the hot rows are known, and the first snapshot is taken
    after W + k, W + 2k, ..     further snapshots: s becomes the largest movement between consecutive ones
    after the last of N         T, from the hot inputs seen since (at most MAX_INPUTS)
    from AHEAD steps later on   inputs are skipped

Fewer than AHEAD chunks are claimed ahead of training, so no decision depends on how far ahead they are.
Everything counts steps, and state changes only after a trained step, so `state` is exact at every commit.
Doubtful results are logged as warnings.

Letters: N hot rows of a stack, H hot rows of all stacks, D width, R requests, I inputs, S slots, L entries.
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
_MAX_ENTRIES = 1 << 20  # entries of the saved inputs
_MIN_ACCESSES = 10  # accesses of the coldest hot row if counting was limited
_INPUT_ARRAYS = ("num_slots_I", "num_entries_S", "row_L")
_MAX_DEVIATION = 0.05  # largest accepted difference between the skipped share of hot inputs and `drop`

Pull = Callable[[Lookup], Mapping[str, np.ndarray]]
"""Stack → float32 [U, D]: current rows."""


class HotRows:
    """Hot rows of one stack."""

    def __init__(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        self.rows = RowIndex(table_N, id_N)
        self.s_N = np.zeros(len(id_N), np.float32)
        self.visited_N = np.zeros(len(id_N), np.bool_)
        self.before_ND: np.ndarray | None = None

    def take_snapshot(self, now_ND: np.ndarray) -> None:
        """Take a snapshot."""
        if self.before_ND is not None:
            self.s_N = np.maximum(self.s_N, moved(self.before_ND, now_ND))
        self.before_ND = now_ND.copy()


class HotInputs:
    """Hot inputs from which T is chosen: ragged, by row number over all stacks."""

    def __init__(self, kept: Mapping[str, np.ndarray] | None = None) -> None:
        """`kept`: from `arrays`; None: empty."""
        self._parts: list[Sequence[np.ndarray]] = [[kept[name] for name in _INPUT_ARRAYS]] if kept else []
        self.num_inputs, self.num_entries = (
            (len(self._parts[0][0]), len(self._parts[0][2])) if kept else (0, 0)
        )

    @property
    def full(self) -> bool:
        return self.num_inputs >= MAX_INPUTS or self.num_entries >= _MAX_ENTRIES

    def add(self, slots: ReadSlots, kept_R: np.ndarray) -> None:
        """Add the inputs of `kept_R`, with rows numbered as in `SlipstreamPolicy`."""
        part = take_requests(*slots, kept_R)
        self._parts.append(part)
        self.num_inputs, self.num_entries = self.num_inputs + len(part[0]), self.num_entries + len(part[2])

    def arrays(self) -> dict[str, np.ndarray]:
        """int32: slots of each input, entries of each slot, rows of the entries."""
        none = [np.zeros(0, np.int32)] * len(_INPUT_ARRAYS)
        joined = [np.concatenate(parts) for parts in zip(none, *self._parts, strict=True)]
        self._parts = [joined]
        return dict(zip(_INPUT_ARRAYS, joined, strict=True))

    @property
    def slots(self) -> ReadSlots:
        num_slots_I, num_entries_S, row_L = self.arrays().values()
        request_S = np.repeat(np.arange(len(num_slots_I)), num_slots_I)
        return ReadSlots(
            request_S, np.repeat(np.arange(len(num_entries_S)), num_entries_S), row_L.astype(np.int64)
        )


class SlipstreamPolicy:
    """The policy at a single worker that trains the whole log."""

    def __init__(self, config: SlipstreamConfig, schema: Schema, seed: int = 0) -> None:
        """`seed`: for the paper's sample, if `sample` is set."""
        self.config, self.schema, self._seed = config, schema, seed
        self._reset()

    def _reset(self) -> None:
        schema = self.schema
        self.counts = {stack: AccessCounts() for stack in schema.stacks}
        self.num_counted = 0  # requests
        self.hot: dict[str, HotRows] = {}
        self.inputs = HotInputs()
        self.num_looked = self.num_hot_looked = 0  # requests since the first snapshot, and how many were hot
        self.T: float | None = None  # once it is known
        self.realised: float | None = None  # share of the inputs used for T that T skips
        # Half width of the interval of that share, if T was searched in a sample
        self.half_width: float | None = None
        # Rows by which inputs are judged, cached once they are final
        self._rows_H1: tuple[np.ndarray, np.ndarray] | None = None
        self.over = False  # the log has ended: nothing is skipped any more

    def stale(self, batch: Batch, step: int) -> np.ndarray | None:
        """bool [R]: the requests to skip in a chunk that will be step `step`. None: none yet, or no
        longer."""
        if self.over or step <= self.config.last_snapshot + AHEAD or not batch.num_requests:
            return None
        if self.T is None:  # `on_trained` ends it
            return None
        slots = read_slots(batch, self._hot_rows)
        if self._rows_H1 is None:
            self._rows_H1 = self._all_rows()
        alpha, hot_share = self.config.alpha, self.config.hot_share
        return is_stale(slots, *self._rows_H1, batch.num_requests, self.T, alpha=alpha, hot_share=hot_share)

    def on_trained(self, step: int, batches: list[tuple[Batch, Lookup]], pull: Pull) -> None:
        """Step `step` was trained on these batches; `pull` sees its result.

        Raises:
            UnavailableError: as `pull`.
        """
        config = self.config
        if self.over:
            return
        if self._has_missed(step):
            log.warning(
                "slipstream ends: it has not seen all steps before step %d, because it was turned on later, "
                "or its settings or the schema changed; everything is trained from now on",
                step,
            )
            self._reset()
            self.over = True
            return
        if step > config.last_snapshot:
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
        self._take_snapshots(pull)
        if step == config.last_snapshot:
            self._choose_threshold()

    def _has_missed(self, step: int) -> bool:
        """Whether something is unknown that follows from steps before this one, or hot rows are known too
        early: `warm_up_steps` was raised, and accesses of the steps in between were not counted."""
        no_T, is_warm_up = self.T is None, step <= self.config.warm_up_steps
        return is_warm_up == bool(self.hot) or (step > self.config.last_snapshot and no_T)

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
                "slipstream: no input was hot between the snapshots, so none will be skipped; lower "
                "hot_ratio or hot_share"
            )
            return
        self.realised = float((q_I <= self.T).mean())
        if abs(self.realised - drop) > _MAX_DEVIATION:
            log.warning(
                "slipstream: expected to skip %.0f %% of the hot inputs, but the threshold skips %.1f %%: "
                "many rows have moved equally far, or the sample is small; choose alpha nearer to 0.5, "
                "change unvisited, or set sample = 0",
                100 * drop,
                100 * self.realised,
            )

    def end(self) -> None:
        """The log has ended, or the stream begins: everything is trained from now on, and all state is
        dropped."""
        if not self.over:
            step = self.config.last_snapshot
            early = (
                f"; nothing was skipped, because history ended before step {step}" if self.T is None else ""
            )
            log.warning("slipstream ends with history: everything is trained from now on%s", early)
        self._reset()
        self.over = True

    def report(self) -> dict[str, float | None]:
        """Metrics of the policy."""
        rows = [hot for hot in self.hot.values() if len(hot.rows)]
        num_hot = sum(len(hot.rows) for hot in rows)
        return {
            "phase": self.phase,
            "hot_rows": num_hot,
            "hot_requests_share": self.num_hot_looked / self.num_looked if self.num_looked else None,
            "unvisited_share": 1 - sum(int(hot.visited_N.sum()) for hot in rows) / num_hot
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
        """Tensors for `load`, named `slipstream.…`; almost nothing once it is over."""
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
            hot = self.hot[stack]
            out |= {f"{stack}.table": hot.rows.table_N, f"{stack}.id": hot.rows.id_N}
            out |= {f"{stack}.s": hot.s_N.copy(), f"{stack}.visited": hot.visited_N.astype(np.uint8)}
            if self.T is None and hot.before_ND is not None:
                out[f"{stack}.before"] = hot.before_ND
        if self.T is None:
            out |= {f"inputs.{name}": value for name, value in self.inputs.arrays().items()}
        return {f"slipstream.{name}": value for name, value in out.items()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load a `state`, or start empty without one. If rows are of tables that are gone or have another
        width, they and the saved inputs are forgotten."""
        self._reset()
        saved = {k.removeprefix("slipstream."): v for k, v in tensors.items() if k.startswith("slipstream.")}
        self.over = "over" in saved
        if "numbers" not in saved:
            return
        self.num_counted, self.num_looked, self.num_hot_looked, has_hot = saved["numbers"].tolist()
        self.T = float(saved["T"]) if "T" in saved else None
        self.realised, self.half_width = (
            float(saved[n]) if n in saved else None for n in ("realised", "half_width")
        )
        num_kept = sum(self._load_stack(stack, saved, has_hot=bool(has_hot)) for stack in self.schema.stacks)
        num_saved = sum(len(id_N) for name, id_N in saved.items() if name.endswith(".id"))
        same_stacks = {
            name.removesuffix(".id") for name in saved if name.endswith(".id")
        } == self.schema.stacks.keys()
        if num_kept < num_saved:
            log.warning(
                "slipstream: forgot %d saved rows whose tables are gone or have another width",
                num_saved - num_kept,
            )
        if num_kept < num_saved or not same_stacks:
            return
        if "inputs.row_L" in saved:
            self.inputs = HotInputs({name: saved[f"inputs.{name}"] for name in _INPUT_ARRAYS})

    def _load_stack(self, stack: str, saved: Mapping[str, np.ndarray], *, has_hot: bool) -> int:
        """Number of rows that still belong to tables of the schema."""
        if f"{stack}.id" not in saved:
            self.hot |= {stack: HotRows(np.zeros(0, np.uint32), np.zeros(0, np.int64))} if has_hot else {}
            return 0
        kept_N = np.isin(saved[f"{stack}.table"], [table.id for table in self.schema.stacks[stack]])
        table_N, id_N = saved[f"{stack}.table"][kept_N], saved[f"{stack}.id"][kept_N]
        if not has_hot:
            self.counts[stack].add(table_N, id_N, saved[f"{stack}.count"][kept_N])
            return len(id_N)
        hot = self.hot[stack] = HotRows(table_N, id_N)
        hot.s_N = saved[f"{stack}.s"][kept_N]
        hot.visited_N = saved[f"{stack}.visited"][kept_N].astype(np.bool_)
        hot.before_ND = saved[f"{stack}.before"][kept_N] if f"{stack}.before" in saved else None
        return len(id_N)

    def _count(self, batch: Batch, lookup: Lookup) -> None:
        if self.config.count_requests and self.num_counted >= self.config.count_requests:
            return
        self.num_counted += batch.num_requests
        for stack, hot in lookup.stacks.items():
            index_L = np.concatenate([np.zeros(0, np.int64), *hot.index.values()])
            count_U = np.bincount(index_L, minlength=len(hot.id_U))
            self.counts[stack].add(hot.table_U, hot.id_U, count_U)

    def _find_hot(self) -> None:
        """Choose the hot rows and drop the counts."""
        total = sum(counts.total for counts in self.counts.values())
        if self.config.count_requests and self.config.hot_ratio * total < _MIN_ACCESSES:
            log.warning(
                "slipstream.hot_ratio: expected at least %d counted accesses of a hot row, but %g of %d "
                "accesses is fewer: one or two accesses make a row hot; count more requests, or raise "
                "hot_ratio",
                _MIN_ACCESSES,
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
        min_count = 0
        # Whole counts only, so no order among equal counts is needed.
        if len(all_H) > self.config.max_hot_rows:
            min_count = int(np.sort(all_H)[-self.config.max_hot_rows - 1]) + 1
        for stack, counts in self.counts.items():
            kept_N = hot[stack] & (counts.count_N >= min_count)
            self.hot[stack] = HotRows(counts.rows.table_N[kept_N], counts.rows.id_N[kept_N])
        self.counts = {stack: AccessCounts() for stack in self.schema.stacks}

    def _take_snapshots(self, pull: Pull) -> None:
        lookup = Lookup(
            {stack: StackLookup(hot.rows.table_N, hot.rows.id_N, {}) for stack, hot in self.hot.items()}
        )
        rows = pull(lookup)
        for stack, hot in self.hot.items():
            hot.take_snapshot(rows[stack])

    def _visit(self, batch: Batch) -> None:
        """Record a batch between two snapshots."""
        slots = read_slots(batch, self._hot_rows)
        ends = np.cumsum([len(hot.rows) for hot in self.hot.values()])
        hot_H1, seen_H1 = np.ones(int(ends[-1]) + 1, np.bool_), np.zeros(int(ends[-1]) + 1, np.bool_)
        hot_H1[-1], seen_H1[slots.row_L] = False, True
        # The last part is rows that are not hot.
        for hot, seen_N in zip(self.hot.values(), np.split(seen_H1, ends), strict=False):
            hot.visited_N |= seen_N
        hot_R = hot_requests(slots, hot_H1, batch.num_requests, self.config.hot_share)
        self.num_looked += batch.num_requests
        self.num_hot_looked += int(hot_R.sum())
        if not self.inputs.full:
            self.inputs.add(slots, hot_R)

    @property
    def _hot_rows(self) -> dict[str, RowIndex]:
        return {stack: hot.rows for stack, hot in self.hot.items()}

    def _judge(self, slots: ReadSlots, num_requests: int) -> Classified:
        alpha, hot_share = self.config.alpha, self.config.hot_share
        return judge(slots, *self._all_rows(), num_requests, alpha=alpha, hot_share=hot_share)

    def _all_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """s (float32) and whether it is hot, for the hot rows of all stacks and the number after them."""
        s = [np.zeros(0, np.float32), *(self._s(self.hot[stack]) for stack in self.schema.stacks)]
        s_H1 = np.concatenate([*s, [np.float32(np.inf)]]).astype(np.float32)
        return s_H1, np.arange(len(s_H1)) < len(s_H1) - 1

    def _s(self, hot: HotRows) -> np.ndarray:
        if self.config.unvisited == "stale":
            return hot.s_N
        return np.where(hot.visited_N, hot.s_N, np.float32(np.inf))
