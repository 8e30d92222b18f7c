"""How blocks of any known schema are read as the schema in use: `reading_plan` of each writer, stacked for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from roo.columns import Side
from roo.decode_kernels import Plan
from roo.errors import SchemaError
from roo.schema import Feature, Schema, reading_plan


class Layout(NamedTuple):
    """What of a side's arrays depends on the schema in use only."""

    default_F: np.ndarray  # float32
    keys: tuple[str, ...]  # list features
    columns: tuple[tuple[str, int, int], ...]  # (feature.column, k, c): ids columns before time columns
    most_columns: int
    is_weighted: bool


def layout_of(schema: Schema, side: Side) -> Layout:
    lists = schema.lists(side)
    columns_K = [(*f.id_columns, *f.time_columns) for f in lists]
    return Layout(
        default_F=np.array([f.default for f in schema.floats(side)], dtype=np.float32),
        keys=tuple(f.name for f in lists),
        columns=tuple((f"{lists[k].name}.{name}", k, c) for k, names in enumerate(columns_K) for c, name in enumerate(names)),
        most_columns=max(map(len, columns_K), default=0),
        is_weighted=any(f.kind == "weighted_ids" for f in lists),
    )


class Plans:
    """The writers met so far, numbered; the schema in use is number 0. Not thread-safe."""

    def __init__(self, schema: Schema, registry: Callable[[int], Schema | None]) -> None:
        self.schema, self.registry = schema, registry
        self._writers: list[Schema] = []
        self._numbers: dict[int, int] = {}
        self._refused: dict[int, str] = {}
        self.num_labels_S = np.zeros(0, dtype=np.int64)
        self.num_skipped_S = np.zeros(0, dtype=np.int64)
        self.layouts: dict[Side, Layout] = {"ro": layout_of(schema, "ro"), "nro": layout_of(schema, "nro")}
        self._add(schema)

    def number_of(self, fingerprint: int) -> int:
        """The writer's number.

        Raises:
            SchemaError: no such schema is registered, or its change can't be read; says which and what to do.
        """
        if fingerprint in self._refused:
            raise SchemaError(self._refused[fingerprint])
        if fingerprint not in self._numbers:
            writer = self.registry(fingerprint)
            if writer is None:
                raise SchemaError(f"unknown schema {fingerprint:016x}; register the schema that wrote these records")
            try:
                self._add(writer, fingerprint)
            except SchemaError as error:
                self._refused[fingerprint] = str(error)
                raise
        return self._numbers[fingerprint]

    def _add(self, writer: Schema, fingerprint: int | None = None) -> None:
        reading_plan(writer, self.schema)
        self._writers.append(writer)
        self._numbers[writer.fingerprint if fingerprint is None else fingerprint] = len(self._writers) - 1
        plans = [reading_plan(w, self.schema) for w in self._writers]
        self.label_to_ST = _padded([p["label"] for p in plans], -2)
        self.num_labels_S = np.array([len(w.labels) for w in self._writers], dtype=np.int64)
        groups = ("ro_float", "ro_list", "nro_float", "nro_list")
        self.num_skipped_S = np.array([sum(p[g].count(-1) for g in groups) for p in plans], dtype=np.int64)
        self._sides = {side: self._side(side, plans) for side in ("ro", "nro")}

    def side(self, side: Side) -> Plan:
        return self._sides[side]

    def _side(self, side: Side, plans: list[dict[str, list[int]]]) -> Plan:
        lists = [w.lists(side) for w in self._writers]
        cap = self.schema.limits.max_list
        return Plan(
            num_floats_S=np.array([len(p[f"{side}_float"]) for p in plans], dtype=np.int64),
            num_lists_S=np.array([len(fs) for fs in lists], dtype=np.int64),
            float_to_SF=_padded([p[f"{side}_float"] for p in plans], -1),
            list_to_SK=_padded([p[f"{side}_list"] for p in plans], -1),
            streams_SK3=np.stack([_padded([[_streams(f)[i] for f in fs] for fs in lists], 0) for i in range(3)], axis=2),
            max_len_K=np.array([f.max_len or cap for f in self.schema.lists(side)], dtype=np.int64),
        )


def _streams(f: Feature) -> tuple[int, int, int]:
    """How many arrays of a list's length it puts into `ids`, `weights` and `times`."""
    return 1 + len(f.id_columns), int(f.kind == "weighted_ids"), len(f.time_columns)


def _padded(rows: list[list[int]], fill: int) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
