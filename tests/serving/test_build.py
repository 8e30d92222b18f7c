"""What a serving process does before it is ready: it compiles all kernels with made-up requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from roostream.wire.lookup import Lookup
from serving.build import precompile
from serving.rank import RankService
from serving.request import RankRequest
from tests.serving.serving_cases import HISTORY, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeHydrator


class ZeroRows:
    """Fake rows that are all 0."""

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        return {
            s: np.zeros((len(part.id_U), SCHEMA.stacks[s][0].dim), np.float32)
            for s, part in lookup.stacks.items()
        }


class RecordingRankService(RankService):
    """A rank service that records the requests that it ranked."""

    ranked: list[RankRequest]

    def rank(self, request: RankRequest, time_ms: int) -> Any:
        self.__dict__.setdefault("ranked", []).append(request)
        return super().rank(request, time_ms)


def test_kernels_are_compiled_before_the_first_request(tmp_path: Path) -> None:
    serving = build_serving(
        tmp_path,
        ZeroRows(),
        FakeHydrator({"history": HISTORY}, {"clicks": 1.0}),
        service=RecordingRankService,
    )
    precompile(serving.context)
    in_json, in_protobuf = serving.service.ranked  # type: ignore[attr-defined]
    assert in_json.blocks is None and in_protobuf.blocks is not None
    assert in_json.item_ids.tolist() == in_protobuf.item_ids.tolist() == [8, 9]
    assert serving.context.log.backlog_records == 0, "made-up requests are not logged"
    serving.close()
