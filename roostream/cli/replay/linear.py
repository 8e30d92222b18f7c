"""Logistic regression on the floats of a sample, trained as it goes: what is known without ids, lists or a network.

A candidate is its NRO floats and its request's RO floats after the schema's transforms, which of them are missing, and the length
of its list, each made asinh and standard by what came before. Steps are Adagrad's (Duchi et al. 2011), one a batch of samples.

Letters: B candidates, D inputs, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.schema.schema import Schema
from roostream.wire import transform
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record

_RATE = 0.2
_FURTHEST = 5.0  # standard deviations
_LOGITS = 15.0


class Linear:
    """Samples of other schemas than this one are scored as nothing is known of them. A few floats an input and task."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._decoder = Decoder(
            schema, lambda fingerprint: schema if fingerprint == schema.fingerprint else None
        )
        self._weight_DT = self._squares_DT = np.zeros((0, len(schema.tasks)))
        self._count, self._sum_D, self._square_D = 0.0, np.zeros(0), np.zeros(0)

    def learn(self, records: Sequence[Record]) -> dict[tuple[int, int], np.ndarray]:
        """(partition, offset) → scores [n, T] of before its labels were used, of each that can be read; then train on them."""
        batch, _ = self._decoder.decode(records)
        if not batch.num_candidates:
            return {}
        x_BD = self._standard(_inputs(batch))
        score_BT = 1 / (1 + np.exp(-np.clip(x_BD @ self._weight_DT, -_LOGITS, _LOGITS)))
        error_BT = (score_BT - (batch.label_BT > 0)) * batch.weight_BT
        gradient_DT = x_BD.T @ error_BT / len(x_BD)
        self._squares_DT += gradient_DT**2
        self._weight_DT -= _RATE * gradient_DT / np.sqrt(self._squares_DT + 1e-12)
        ends_R = np.cumsum(batch.num_candidates_R)[:-1]
        places = zip(batch.partition_R.tolist(), batch.offset_R.tolist(), strict=True)
        return dict(zip(places, np.split(score_BT, ends_R), strict=True))

    def _standard(self, x_BD: np.ndarray) -> np.ndarray:
        """Centred and scaled by the moments so far, these candidates' included; and a constant."""
        if not self._count:
            self._sum_D, self._square_D = np.zeros((2, x_BD.shape[1]))
            self._weight_DT, self._squares_DT = np.zeros((2, x_BD.shape[1] + 1, len(self.schema.tasks)))
            self._weight_DT[-1] = -1.0
        self._count += len(x_BD)
        self._sum_D += x_BD.sum(axis=0)
        self._square_D += (x_BD**2).sum(axis=0)
        mean_D = self._sum_D / self._count
        deviation_D = np.sqrt(np.maximum(self._square_D / self._count - mean_D**2, 0.0))
        scaled_BD = np.where(deviation_D > 1e-6, (x_BD - mean_D) / np.maximum(deviation_D, 1e-6), 0.0)
        return np.concatenate([np.clip(scaled_BD, -_FURTHEST, _FURTHEST), np.ones((len(x_BD), 1))], axis=1)


def _inputs(batch: Batch) -> np.ndarray:
    """float64 [B, D]."""
    ro_RG, nro_BG = transform.apply(batch)
    index_B = batch.request_index_B
    ro_BG = np.concatenate([ro_RG, ~batch.ro_present_RF], axis=1)[index_B]
    length_B1 = np.log(batch.num_candidates_R[index_B].astype(np.float64))[:, None]
    return np.arcsinh(
        np.concatenate([nro_BG, ~batch.nro_present_BF, ro_BG, length_B1], axis=1, dtype=np.float64)
    )
