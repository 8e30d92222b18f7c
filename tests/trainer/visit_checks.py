"""What a model has learned of simulated visits (visits.py), and that serving scores as training does."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from roostream.models.config import ModelConfig
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record
from serving.request_batch import read_request
from serving.scorer import build_version
from tests.trainer.visits import SCHEMA
from trainer.loop import TrainLoop


class RowsOf:
    """The rows of a loop's shard as serving's replica gives them."""

    def __init__(self, loop: TrainLoop) -> None:
        self.loop = loop

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        return {stack: np.asarray(rows_UD) for stack, rows_UD in self.loop.rows.pull(lookup).items()}


def log_losses(predicted: list[pb.Prediction]) -> np.ndarray:
    """Of each request's first task, the mean over its candidates."""
    out = []
    for p in predicted:
        score_n, label_n = (np.array(x).reshape(len(p.item_ids), -1)[:, 0] for x in (p.scores, p.labels))
        out.append(-np.log(np.where(label_n > 0, score_n, 1 - score_n)).mean())
    return np.array(out)


def assert_serving_scores_as(loop: TrainLoop, config: ModelConfig, records: Iterable[Record]) -> None:
    """A version of the loop's weights, made from `config`, scores these requests alone as the loop scores
    them."""
    version = build_version("1-1", SCHEMA, config, 0, loop.descent.scorer.state_dict())
    for record in records:
        batch, _ = Decoder(SCHEMA, {}.get).decode([record])
        _, sample = wire.decode(record.value)
        assert isinstance(sample, pb.Sample)
        items = np.array(sample.item_ids, np.uint64).view(np.int64)
        request = read_request(SCHEMA, sample.ro, sample.parts[0].nro, items, sample.header.time_ms)
        logits = version.score(RowsOf(loop), request)
        np.testing.assert_allclose(1 / (1 + np.exp(-logits)), loop.scores(batch), rtol=0, atol=1e-5)
