"""Fills in the features that the client left out and the schema keeps online, then encodes the request's
blocks.

Values of the client always win. Stateful features (histories, counters) come from Redis; stateless ones are
computed from the request, as in replay (roostream/online). A complete block of the client stays byte for
byte; a block with missing features is filled in place (roostream/wire/missing_features.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roostream.errors import WireError
from roostream.online.counters import (
    STATELESS_FEATURES,
    some_missing,
    sources_of,
    stateless_features,
    with_online,
)
from roostream.online.entity_fields import EntityFields, FieldReader
from roostream.schema.schema import Schema
from roostream.wire.block import Columns, Side, flat_values, nro_columns, pack, ro_columns, values_of
from roostream.wire.missing_features import MissingFeatures
from serving.errors import RequestError
from serving.request import RankRequest, RequestBlocks


class FeatureCompletion:
    """For one schema. Pure: hydrated values go in, blocks come out."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self._reader = schema, FieldReader(schema)
        sides: tuple[Side, ...] = ("ro", "nro")
        self._sources: dict[Side, dict[str, str]] = {side: sources_of(schema, side) for side in sides}
        self._stateful: dict[Side, dict[str, str]] = {
            side: {
                name: source
                for name, source in self._sources[side].items()
                if source not in STATELESS_FEATURES
            }
            for side in sides
        }
        self._missing = {side: MissingFeatures(schema, side, self._sources[side]) for side in sides}
        self._stateful_missing = {side: MissingFeatures(schema, side, self._stateful[side]) for side in sides}

    def open(self, request: RankRequest) -> None:
        """Check once whether the blocks lack a feature that can be filled in. If counters need feature
        values, the blocks are decoded."""
        if request.blocks is None or request.has_missing is not None:
            return
        blocks = request.blocks
        request.has_missing_stateful = self._lacks(self._stateful_missing, request, blocks)
        request.has_missing = request.has_missing_stateful or self._lacks(self._missing, request, blocks)
        if request.has_missing and (self._reader.ro or self._reader.nro):
            self._decode_blocks(request, blocks)

    def _lacks(
        self, missing: dict[Side, MissingFeatures], request: RankRequest, blocks: RequestBlocks
    ) -> bool:
        return missing["ro"].any_missing(blocks.ro_columns, 1) or missing["nro"].any_missing(
            blocks.nro_columns, len(request.item_ids)
        )

    def _decode_blocks(self, request: RankRequest, blocks: RequestBlocks) -> None:
        n = len(request.item_ids)
        request.ro = values_of(self.schema, "ro", blocks.ro_columns, 1)
        flat = flat_values(self.schema, blocks.nro_columns, n)
        request.nro = self._given(blocks.nro_columns, n) if flat is None else flat
        request.blocks = None

    def _given(self, columns: Columns, num_rows: int) -> dict[str, Any]:
        """Columns that have a value in at least one row."""
        values = values_of(self.schema, "nro", columns, num_rows)
        return {name: column for name, column in values.items() if not _all_missing(column)}

    def needs_hydration(self, request: RankRequest) -> bool:
        """Whether a stateful feature is missing. Call `open` first."""
        if request.blocks is not None:
            return request.has_missing_stateful
        if any(name not in request.ro for name in self._stateful["ro"]):
            return True
        return any(
            name not in request.nro or some_missing(request.nro[name]) for name in self._stateful["nro"]
        )

    def fields(self, request: RankRequest) -> EntityFields:
        """The request's fields that declared counters are keyed by, not validated yet. Call `open` first."""
        header = request.user_id, request.session_id, request.surface, request.request_id
        return self._reader.from_values(header, request.ro, request.nro, len(request.item_ids))

    def encode(
        self, request: RankRequest, time_ms: int, ro_online: Mapping[str, Any], nro_online: Mapping[str, Any]
    ) -> RequestBlocks:
        """Return the blocks to log and to score.

        Raises:
            RequestError: 400 or 413: a value does not fit into a block.
        """
        if request.blocks is not None and not request.has_missing:
            return request.blocks
        n = len(request.item_ids)
        own_ro, own_nro = stateless_features(
            request.user_id, request.item_ids, time_ms, request.first_position
        )
        try:
            arrays = self._arrays(request, {**ro_online, **own_ro}, {**nro_online, **own_nro}, n)
        except WireError as error:
            raise RequestError(413 if error.reason == "oversized" else 400, str(error), "$") from None
        return RequestBlocks(pack(arrays[0]), pack(arrays[1]), *arrays)

    def _arrays(
        self, request: RankRequest, ro_online: Mapping[str, Any], nro_online: Mapping[str, Any], n: int
    ) -> tuple[Columns, Columns]:
        """Fill the blocks in place if possible, else encode from values. Raises WireError."""
        if (blocks := request.blocks) is not None:
            ro = self._missing["ro"].fill(blocks.ro_columns, 1, ro_online)
            nro = self._missing["nro"].fill(blocks.nro_columns, n, nro_online)
            if ro is not None and nro is not None:
                return ro, nro
            self._decode_blocks(request, blocks)
        ro_given = with_online("ro", self._sources["ro"], request.ro, ro_online)
        nro_given = with_online("nro", self._sources["nro"], request.nro, nro_online)
        return ro_columns(self.schema, ro_given), nro_columns(self.schema, nro_given, n)


def _all_missing(column: Any) -> bool:
    return bool(np.isnan(column).all()) if isinstance(column, np.ndarray) else all(v is None for v in column)
