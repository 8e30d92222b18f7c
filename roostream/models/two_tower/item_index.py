"""Item vectors as one file, with exact search.

Format 1: safetensors with `id` int64 [I], rising and distinct, and `vector` float32 [I, D]; metadata `format`
= "1", `schema` (fingerprint, 16 hex digits) and `version` of the model ("<incarnation>-<seq>"). Compare a
request's vector only with vectors of its own version.

Letters: I items, B candidates, D width, K best.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from roostream.errors import CheckpointError
from roostream.models.inputs import Inputs
from roostream.models.two_tower.models import Retrieval
from roostream.runtime import tensor_file

FORMAT = "1"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ItemIndex:
    """Content of an index file."""

    id_I: np.ndarray  # int64, rising
    vector_ID: np.ndarray  # float32, unit length
    schema: str
    version: str

    def best(self, request_D: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, products) of the k items with the largest product, best first; ties by smaller id."""
        product_I = self.vector_ID @ request_D
        place_K = np.argsort(-product_I, kind="stable")[:k]
        return self.id_I[place_K], product_I[place_K]


def build_item_index(model: Retrieval, inputs: Inputs, schema: str, version: str) -> ItemIndex:
    """Index of the items of a batch's candidates, each once; the last features of an item count."""
    with torch.inference_mode():
        vector_BD = model.item_vectors(inputs).cpu().numpy()
    reversed_ids = inputs.item_B.cpu().numpy()[::-1]
    id_I, first_I = np.unique(reversed_ids, return_index=True)
    vector_ID = np.ascontiguousarray(vector_BD[::-1][first_I], dtype=np.float32)
    return ItemIndex(id_I=id_I.astype(np.int64), vector_ID=vector_ID, schema=schema, version=version)


def merged(older: ItemIndex, newer: ItemIndex) -> ItemIndex:
    """All items of both indexes; `newer` wins.

    Raises:
        CheckpointError: they are of different models.
    """
    if (older.schema, older.version) != (newer.schema, newer.version):
        raise CheckpointError(
            f"expected vectors of model version {older.version}, got {newer.version}; build the index again"
        )
    kept_I = ~np.isin(older.id_I, newer.id_I)
    id_I = np.concatenate([older.id_I[kept_I], newer.id_I])
    order_I = np.argsort(id_I)
    vector_ID = np.concatenate([older.vector_ID[kept_I], newer.vector_ID])[order_I]
    return dataclasses.replace(newer, id_I=id_I[order_I], vector_ID=vector_ID)


def encode(index: ItemIndex) -> bytes:
    """Bytes of the file."""
    metadata = {"format": FORMAT, "schema": index.schema, "version": index.version}
    return tensor_file.encode({"id": index.id_I, "vector": index.vector_ID}, metadata)


def decode(data: bytes) -> ItemIndex:
    """Inverse of `encode`.

    Raises:
        CheckpointError: another format, or damaged.
    """
    tensors, metadata = tensor_file.decode(data)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"expected an index of items of format {FORMAT}, got {metadata.get('format', 'none')}"
        )
    id_I, vector_ID = tensors.get("id", np.zeros(0)), tensors.get("vector", np.zeros(0))
    fits = (
        id_I.dtype == np.int64
        and vector_ID.dtype == np.float32
        and vector_ID.ndim == 2
        and id_I.shape == vector_ID.shape[:1]
    )
    if not fits or (np.diff(id_I) <= 0).any() or not np.isfinite(vector_ID).all():
        raise CheckpointError(
            "expected rising ids and a finite vector for each, got others; build the index again"
        )
    return ItemIndex(
        id_I=id_I, vector_ID=vector_ID, schema=metadata.get("schema", ""), version=metadata.get("version", "")
    )
