"""A poll of records → one columnar batch, in the schema in use, whatever known schema wrote them.

1 collect the payloads into one buffer (the only Python loop over samples)
2 scan: where does every field of every sample, header, part and block lie?
3 samples that aren't in our writers' form: protobuf parses them and writes them again, or refuses them
4 check shapes, caps and numbers: what fails is a reject with a dead letter's reason, the rest goes on
5 fill the batch's arrays
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from roostream.errors import CheckpointError, SchemaError, WireError
from roostream.schema.ids import unsigned
from roostream.schema.schema import Registry, Schema
from roostream.wire import decode_kernels as k
from roostream.wire import proto_kernels as w
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.columns import Side, canonical
from roostream.wire.decode_fill import (
    Plans,
    Scan,
    block_of,
    field,
    fill,
    fill_request,
    join,
    nro_blocks,
    ro_blocks,
    scan,
    scan_blocks,
)
from roostream.wire.decode_kernels import Blocks
from roostream.wire.proto_fields import SAMPLE
from roostream.wire.records import Record

_WRONG = {
    k.BAD_SHAPE: (
        "bad_shape",
        "expected columns whose lengths agree with candidates, features and each other; got others",
    ),
    k.NON_FINITE: (
        "non_finite",
        "expected finite numbers (NaN only for a missing float); got an infinity or NaN",
    ),
    k.BAD_NUMBER: (
        "bad_number",
        f"expected weights of lists within ±{wire.MAX_WEIGHT:.0f}, the sample's in 0..{wire.MAX_WEIGHT:.0f} and propensities "
        "in (0, 1]; got others",
    ),
    k.OVERSIZED: ("oversized", "expected candidates and lists within the schema's limits; got more"),
}


@dataclasses.dataclass(frozen=True)
class Reject:
    """A record that can't be trained on."""

    index: int  # into the records given
    reason: str  # one of wire.REASONS
    error: str


class Decoder:
    """`registry` gives the schema of a fingerprint, or None (roostream.schema.registry). Not thread-safe: one a thread."""

    def __init__(self, schema: Schema, registry: Registry) -> None:
        self.schema = schema
        self.plans = Plans(schema, registry)
        self.num_skipped_features = (
            0  # so far: features of decoded samples that the schema in use no longer has
        )
        self.num_skipped_corrections = 0  # so far: not asked for, or without features

    def decode(self, records: Sequence[Record], *, corrections: bool = False) -> tuple[Batch, list[Reject]]:
        """Samples (and, if asked, trainable corrections) of one poll as a batch, and what can't be read, in the records' order.

        Never raises for what a record holds: each is a request of the batch, a reject, or a correction that is left out.
        """
        rejects: dict[int, tuple[str, str]] = {}
        values = [record.value or b"" for record in records]
        found, correction_N = self._scan(values, rejects)
        plan_N = self._plans(found, rejects)
        status_N = self._check(found, plan_N)
        for n in np.flatnonzero(status_N > 0):
            rejects[int(found.index_N[n])] = _WRONG[int(status_N[n])]
        self._check_times(records, found, correction_N, status_N, rejects)
        trainable_N = ~correction_N
        if corrections:
            trainable_N |= w.read_varint(found.buf, field(found.spans_N, SAMPLE.untrainable)) == 0
        kept = np.flatnonzero((status_N == k.OK) & trainable_N)
        index_R = found.index_N[kept]
        batch = Batch(
            schema=self.schema,
            correction_R=correction_N[kept],
            partition_R=np.array([record.partition for record in records], dtype=np.int32)[index_R],
            offset_R=np.array([record.offset for record in records], dtype=np.int64)[index_R],
            **fill(self.plans, found, plan_N, kept),
        )
        self.num_skipped_features += int(self.plans.num_skipped_S[plan_N[kept]].sum())
        self.num_skipped_corrections += int(((status_N == k.OK) & ~trainable_N).sum())
        return batch, [Reject(i, *rejects[i]) for i in sorted(rejects)]

    def decode_request(self, ro: bytes | None, nro: bytes, item_ids: np.ndarray, time_ms: int) -> Batch:
        """One request as serving scores it: R = 1, B = len(item_ids), labels 0, weights 1, no offset (-1).

        Its blocks, written in the schema in use, are read by the kernels that read a sample's: what serving scores is what
        training will read.

        Raises:
            WireError: `undecodable`, `bad_shape`, `non_finite`, `bad_number` or `oversized`.
        """
        limits, n = self.schema.limits, len(item_ids)
        if n > limits.max_candidates:
            raise WireError("oversized", f"expected at most {limits.max_candidates} candidates, got {n}")
        buf, spans_2, ok_2 = scan_blocks(ro or b"", nro)
        if not ok_2.all():
            buf, spans_2, _ = scan_blocks(canonical(ro or b""), canonical(nro))
        blocks: dict[Side, Blocks] = {"ro": block_of(spans_2[:1], 1), "nro": block_of(spans_2[1:], n)}
        for side, block in blocks.items():
            status = np.zeros(1, dtype=np.int64)
            k.check_blocks(buf, block, self.plans.side(side), limits.max_list, status)
            if status[0]:
                reason, error = _WRONG[int(status[0])]
                raise WireError(reason, f"{side} block: {error}")
        return fill_request(self.plans, buf, blocks["ro"], blocks["nro"], item_ids, time_ms)

    def _scan(self, values: list[bytes], rejects: dict[int, tuple[str, str]]) -> tuple[Scan, np.ndarray]:
        """The samples and corrections among `values`, all in our writers' form (3), and bool [N]: which are corrections."""
        buf, starts = join(values)
        index_N = self._admit(buf, starts, rejects)
        is_correction_N = buf[starts[index_N]] == wire.CORRECTION
        found = scan(buf, starts, index_N, self.schema.limits.max_candidates)
        if found.ok_N.all():
            return found, is_correction_N
        for i in map(int, index_N[~found.ok_N]):
            try:
                values[i] = rewritten(values[i])
            except WireError as error:
                rejects[i] = (error.reason, str(error))
        kept_N = np.array([int(i) not in rejects for i in index_N], dtype=bool)
        found = scan(*join(values), index_N[kept_N], self.schema.limits.max_candidates)
        assert found.ok_N.all()
        return found, is_correction_N[kept_N]

    def _admit(self, buf: np.ndarray, starts: np.ndarray, rejects: dict[int, tuple[str, str]]) -> np.ndarray:
        """Indices of the records that say they are samples or corrections, and aren't too large."""
        size, at = starts[1:] - starts[:-1], starts[:-1]
        kind, version = (
            np.where(size > 0, buf[at], 0),
            np.where(size > 1, buf[np.minimum(at + 1, len(buf) - 1)], 0),
        )
        known = ((kind == wire.SAMPLE) | (kind == wire.CORRECTION)) & (version == wire.VERSION)
        most = self.schema.limits.max_sample_bytes
        for i in np.flatnonzero(~known | (size > most)):
            if size[i] < 2:
                rejects[int(i)] = ("undecodable", f"expected a record of 2 bytes or more, got {size[i]}")
            elif not known[i]:
                text = f"expected a sample of version {wire.VERSION}, got type {kind[i]} version {version[i]}"
                rejects[int(i)] = ("unknown_type", text)
            else:
                rejects[int(i)] = ("oversized", f"expected at most {most} bytes, got {size[i]}")
        return np.flatnonzero(known & (size <= most))

    def _plans(self, found: Scan, rejects: dict[int, tuple[str, str]]) -> np.ndarray:
        """int64 [N]: each sample's writer in `plans`, -1 = can't be read."""
        fingerprints, inverse = np.unique(found.schema_N, return_inverse=True)
        numbers = np.full(len(fingerprints), -1, dtype=np.int64)
        for i, fingerprint in enumerate(fingerprints):
            try:
                numbers[i] = self.plans.number_of(unsigned(int(fingerprint)))
            except (SchemaError, CheckpointError) as error:
                for n in found.index_N[inverse == i]:
                    rejects[int(n)] = ("unknown_schema", str(error))
        return numbers[inverse]

    def _check(self, found: Scan, plan_N: np.ndarray) -> np.ndarray:
        """int64 [N]: OK, or the first thing that is wrong; -1 for samples whose writer is not known."""
        limits = self.schema.limits
        status_N = np.where(plan_N < 0, -1, k.OK)
        used_N = np.bincount(found.sample_P, weights=found.used_P, minlength=len(plan_N)).astype(np.int64)
        k.check_samples(
            found.buf, found.spans_N, self.plans.num_labels_S[plan_N], used_N, limits.max_candidates, status_N
        )
        k.check_blocks(found.buf, ro_blocks(found, plan_N), self.plans.side("ro"), limits.max_list, status_N)
        status_P = np.where(plan_N[found.sample_P] < 0, -1, found.status_P)
        k.check_blocks(
            found.buf, nro_blocks(found, plan_N), self.plans.side("nro"), limits.max_list, status_P
        )
        for p in np.flatnonzero(status_P > 0):
            status_N[found.sample_P[p]] = status_N[found.sample_P[p]] or status_P[p]
        return status_N

    def _check_times(
        self,
        records: Sequence[Record],
        found: Scan,
        correction_N: np.ndarray,
        status_N: np.ndarray,
        rejects: dict[int, tuple[str, str]],
    ) -> None:
        """A sample's record has its close time as timestamp: by it partitions are merged, rows stamped, ids forgotten. A
        correction's has the joiner's now."""
        timestamp_N = np.array([record.timestamp_ms for record in records], dtype=np.int64)[found.index_N]
        close_ms_N = w.read_i64(found.buf, field(found.spans_N, SAMPLE.close_ms))
        for n in np.flatnonzero((status_N == k.OK) & ~correction_N & (close_ms_N != timestamp_N)):
            error = f"expected the record's timestamp {timestamp_N[n]}, got close time {close_ms_N[n]}"
            rejects[int(found.index_N[n])] = ("bad_time", error)
            status_N[n] = k.BAD_SHAPE


def rewritten(value: bytes) -> bytes:
    """A sample as our writers write it, without unknown fields and without the texts that no batch holds.

    Raises:
        WireError: `undecodable`.
    """
    sample = pb.Sample()
    try:
        sample.ParseFromString(value[2:])
    except DecodeError as error:
        raise WireError("undecodable", f"expected a Sample: {error}") from None
    sample.DiscardUnknownFields()  # type: ignore[attr-defined]
    for text in ("request_id", "model_version"):
        sample.header.ClearField(text)
    sample.actions[:] = [""] * len(sample.actions)
    if sample.HasField("ro"):
        sample.ro = canonical(sample.ro)
    for part in sample.parts:
        part.nro = canonical(part.nro)
    return value[:2] + sample.SerializeToString(deterministic=True)


def precompile() -> None:
    """Compile every kernel into numba's cache."""
    from roostream.schema.schema import Feature, Label

    schema = Schema(ro=(Feature(name="x"),), labels=(Label(name="click", action="click"),))
    Decoder(schema, lambda _: None).decode([], corrections=True)
