"""Named arrays and text metadata as one safetensors file. Commits store a trainer's state in such files."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from roostream.errors import CheckpointError

_MAX_HEADER_BYTES = 64 << 20


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file."""
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    return safetensors.save(contiguous, dict(metadata) or None)


def decode(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays, ordered by name, and the metadata of a safetensors file.

    Raises:
        CheckpointError: not a safetensors file, or its sizes don't agree.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"expected a safetensors file, got {len(data)} bytes with a header of {size}")
    try:
        # `safetensors.load` returns no metadata, so it is read from the JSON header.
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        arrays = safetensors.load(data)  # in an order that differs from call to call
        return {name: arrays[name] for name in sorted(arrays)}, {str(k): str(v) for k, v in metadata.items()}
    # KeyError: a dtype that numpy does not have.
    except (SafetensorError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(
            f"expected a safetensors file, got {len(data)} bytes that aren't one ({error})"
        ) from None
