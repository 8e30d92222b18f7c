"""The columnar batch of R requests and B candidates that the decoder makes and models run on.

RO arrays have R rows, NRO arrays B rows. `x_RD[request_index_B]` gives every candidate the row of its
request. Candidates of a request are adjacent and in the order shown. R, B or both may be 0. Letters: R
requests, B candidates, F floats of a side, K list features of a side, T labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from roostream.schema.schema import Schema
from roostream.wire.jagged import Jagged

TEXT = "S64"
# Arrays with a row for each request; all others have one for each candidate.
_REQUEST_SUFFIXES = ("_R", "_RF")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Numpy arrays, which `roostream.models.inputs` wraps as tensors without a copy. Construction asserts the
    shapes."""

    schema: Schema
    ro_float_RF: np.ndarray  # float32; missing = the feature's default
    ro_present_RF: np.ndarray  # bool
    nro_float_BF: np.ndarray  # float32
    nro_present_BF: np.ndarray  # bool
    ro_lists: Jagged
    nro_lists: Jagged
    num_candidates_R: np.ndarray  # int32
    request_index_B: np.ndarray  # int64, sorted
    item_B: np.ndarray  # int64
    label_BT: np.ndarray  # float32
    label_before_BT: np.ndarray  # float32: the label trained before a correction; NaN = none
    weight_BT: np.ndarray  # float32: the sample's weight; 0 = the writer has no such label
    position_B: np.ndarray  # int32; -1 = unknown
    propensity_B: np.ndarray  # float32; 1 = shown without exploration
    served_score_BT: np.ndarray  # float32; NaN = not scored when served
    time_ms_R: np.ndarray  # int64: request time
    close_ms_R: np.ndarray  # int64
    oldest_engagement_ms_R: np.ndarray  # int64: 0 = no engagement
    sample_id_R: np.ndarray  # int64 (uint64 bits)
    surface_R: np.ndarray  # S64: UTF-8, empty = unknown
    correction_R: np.ndarray  # bool: train loss(label) - loss(label_before)
    partition_R: np.ndarray  # int32
    offset_R: np.ndarray  # int64: offset of the sample's record

    def __post_init__(self) -> None:
        """Check lengths by the letters of the names; the decoder has checked the values."""
        r, b, t = len(self.num_candidates_R), len(self.item_B), len(self.schema.labels)
        for name, n in (("ro_float_RF", r), ("ro_present_RF", r), ("nro_float_BF", b), ("nro_present_BF", b)):
            assert getattr(self, name).shape == (
                n,
                len(self.schema.floats("ro" if name[0] == "r" else "nro")),
            ), name
        assert self.ro_lists.num_rows == r and self.nro_lists.num_rows == b
        assert int(self.num_candidates_R.sum()) == b == len(self.request_index_B)
        for name in ("label_BT", "label_before_BT", "weight_BT", "served_score_BT"):
            assert getattr(self, name).shape == (b, t), name
        for name, by_request in _ARRAYS.items():
            assert len(getattr(self, name)) == (r if by_request else b), name

    @property
    def num_requests(self) -> int:
        return len(self.num_candidates_R)

    @property
    def num_candidates(self) -> int:
        return len(self.item_B)

    def take_requests(self, rows_M: np.ndarray) -> Batch:
        """The requests `rows_M` (int64 [M]), in that order, with all their candidates."""
        counts = self.num_candidates_R[rows_M]
        ends = np.cumsum(counts, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        at = np.arange(total, dtype=np.int64) + np.repeat(self._first_R1[rows_M] - (ends - counts), counts)
        return self.take(rows_M, at, np.repeat(np.arange(len(rows_M), dtype=np.int64), counts), counts)

    @cached_property
    def _first_R1(self) -> np.ndarray:
        """int64 [R + 1]: the first candidate of each request."""
        return np.concatenate([[0], np.cumsum(self.num_candidates_R, dtype=np.int64)])

    def requests_between(self, start: int, end: int) -> Batch:
        """A copy of the requests `start` up to `end`, in time proportional to these requests. Use it instead
        of `take_requests` to cut a batch into many."""
        first_candidate, end_candidate = self._first_R1[start], self._first_R1[end]
        changes: dict[str, object] = {
            name: getattr(self, name)[
                slice(start, end) if by_request else slice(first_candidate, end_candidate)
            ].copy()
            for name, by_request in _ARRAYS.items()
        }
        changes["request_index_B"] = self.request_index_B[first_candidate:end_candidate] - start
        lists = {
            "ro_lists": self.ro_lists.rows_between(start, end),
            "nro_lists": self.nro_lists.rows_between(first_candidate, end_candidate),
        }
        return dataclasses.replace(self, **changes, **lists)  # type: ignore[arg-type]

    def expand(self) -> Batch:
        """The impression-level batch, with every candidate as its own request (ROO paper §2.1.3), R = B."""
        b = self.num_candidates
        each = np.arange(b, dtype=np.int64)
        return self.take(self.request_index_B, each, each, np.ones(b, dtype=np.int32))

    def take(
        self, rows_M: np.ndarray, candidates_B: np.ndarray, index_B: np.ndarray, counts_M: np.ndarray
    ) -> Batch:
        """The requests `rows_M` (int64 [M]) with the candidates `candidates_B` (int64 [B]). `index_B`,
        sorted, is the new request of each candidate; `counts_M` the number of candidates of each request."""
        changes: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                changes[field.name] = (
                    value[rows_M] if field.name.endswith(_REQUEST_SUFFIXES) else value[candidates_B]
                )
        changes |= {
            "ro_lists": self.ro_lists.take_rows(rows_M),
            "nro_lists": self.nro_lists.take_rows(candidates_B),
        }
        changes |= {"request_index_B": index_B, "num_candidates_R": counts_M.astype(np.int32)}
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The requests of at least one batch, one batch after the other; all have the same schema."""
        first = batches[0]
        if len(batches) == 1:
            return first
        changes: dict[str, object] = {
            name: np.concatenate([getattr(batch, name) for batch in batches])
            for name in _ARRAYS
            if name != "request_index_B"
        }
        counts_R = np.concatenate([batch.num_candidates_R for batch in batches])
        changes["request_index_B"] = np.repeat(np.arange(len(counts_R), dtype=np.int64), counts_R)
        changes["ro_lists"] = Jagged.concat([batch.ro_lists for batch in batches])
        changes["nro_lists"] = Jagged.concat([batch.nro_lists for batch in batches])
        return dataclasses.replace(first, **changes)  # type: ignore[arg-type]


_ARRAYS = {
    f.name: f.name.endswith(_REQUEST_SUFFIXES) for f in dataclasses.fields(Batch) if f.type == "np.ndarray"
}
"""Array → whether it has a row for each request."""
