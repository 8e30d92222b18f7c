"""Tensors of an inference request and answer: in JSON, or as bytes after the JSON (binary tensor data
extension). No features.

Source: Open Inference Protocol, REST,
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol; the extension is Triton's,
`extension_binary_data`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from types import GenericAlias
from typing import Any, NamedTuple

import msgspec
import numpy as np

from roostream.errors import nearest
from serving.errors import RequestError, shown
from serving.rank_json import decode_body

HEADER_LENGTH = b"inference-header-content-length"
_DTYPES = {
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
TYPES = (*_DTYPES, "BYTES")
MAX_INPUTS = 4096
_MAX_BODY_DIMS = 8


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Any] = {}


class _WantedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _InferenceBody(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_WantedOutput] | None = None


_DECODER = msgspec.json.Decoder(_InferenceBody)


class Tensor(NamedTuple):
    """A tensor of a request. `values` are flat and row-major: an array of numbers, or texts."""

    shape: tuple[int, ...]
    values: np.ndarray | list[str]
    path: str  # for messages


class Inference(NamedTuple):
    """A request. `outputs`: name → whether it is wanted as bytes; None = all outputs, as `is_binary` says,
    which an absent and an empty list mean."""

    id: str
    parameters: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, bool] | None
    is_binary: bool


def parse_inference(body: bytes, header_length: bytes | None) -> Inference:
    """Parse the body of a request. `header_length`: the header of the binary extension, or None.

    Raises:
        RequestError: status 400 or 413, with the path of the field.
    """
    size = len(body)
    if header_length is not None:
        if not header_length.isdigit() or len(header_length) > 10 or int(header_length) > len(body):
            raise RequestError(
                400,
                f"expected {HEADER_LENGTH.decode()} within the body's {len(body)} bytes, got "
                f"{shown(header_length.decode(errors='replace'))!r}",
            )
        size = int(header_length)
    request: _InferenceBody = decode_body(_DECODER, body[:size], {})
    if len(request.inputs) > MAX_INPUTS:
        raise RequestError(
            413, f"expected at most {MAX_INPUTS} inputs, got {len(request.inputs)}", "$.inputs"
        )
    inputs: dict[str, Tensor] = {}
    for i, given in enumerate(request.inputs):
        path = f"$.inputs[{i}]"
        if given.name in inputs:
            raise RequestError(400, f"expected each input once, got {shown(given.name)!r} twice", path)
        size, inputs[given.name] = _input(given, body, size, path)
    if size != len(body):
        raise RequestError(400, f"expected {size} bytes by the inputs' binary_data_size, got {len(body)}")
    outputs = (
        None
        if not request.outputs
        else {o.name: o.parameters.get("binary_data") is True for o in request.outputs}
    )
    return Inference(
        request.id, request.parameters, inputs, outputs, request.parameters.get("binary_data_output") is True
    )


def _input(given: _Input, body: bytes, at: int, path: str) -> tuple[int, Tensor]:
    """Return (offset of the next input's bytes, the tensor)."""
    if given.datatype not in TYPES:
        got = shown(given.datatype)
        raise RequestError(
            400,
            f"expected one of {', '.join(TYPES)}, got {got!r}{nearest(got, TYPES)}",
            f"{path}.datatype",
        )
    if len(given.shape) > _MAX_BODY_DIMS or any(not 0 <= d < 1 << 31 for d in given.shape):
        raise RequestError(
            400,
            f"expected at most {_MAX_BODY_DIMS} sizes of 0 or more, got {shown(given.shape)}",
            f"{path}.shape",
        )
    count, size = math.prod(given.shape), given.parameters.get("binary_data_size")
    if size is None:
        values = _values_of_json(given, path)
    else:
        if type(size) is not int or not 0 <= size <= len(body) - at:
            raise RequestError(
                400,
                f"expected at most {len(body) - at} bytes, got {shown(size)}",
                f"{path}.parameters.binary_data_size",
            )
        values = _values_of_bytes(given.datatype, body[at : at + size], path)
        at += size
    if len(values) != count:
        raise RequestError(400, f"expected {count} values by its shape, got {len(values)}", f"{path}.data")
    return at, Tensor(tuple(given.shape), values, path)


def _values_of_json(given: _Input, path: str) -> np.ndarray | list[str]:
    """The values of an input whose `data` is JSON, flat or nested, row-major; null is NaN."""
    value: Any = (
        str if given.datatype == "BYTES" else float | None if given.datatype.startswith("FP") else int
    )
    kinds: list[Any] = [GenericAlias(list, (value,))]
    for _ in given.shape[1:]:
        kinds.append(GenericAlias(list, (kinds[-1],)))
    reason = ""
    for kind in (kinds[0], kinds[-1]):
        try:
            data = msgspec.json.decode(given.data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = reason or str(error)
            continue
        for _ in range(kinds.index(kind)):
            data = [v for part in data for v in part]
        return data if given.datatype == "BYTES" else _array(data, given.datatype, path)
    raise RequestError(400, f"expected {given.datatype} values, flat or nested: {reason}", f"{path}.data")


def _array(data: list[Any], datatype: str, path: str) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            return np.array(data, dtype=np.float64 if datatype.startswith("FP") else _DTYPES[datatype])
    except OverflowError:
        raise RequestError(400, f"expected values of {datatype}, got one beyond it", f"{path}.data") from None


def _values_of_bytes(datatype: str, data: bytes, path: str) -> np.ndarray | list[str]:
    """The values of an input that follows the JSON as bytes."""
    if datatype != "BYTES":
        dtype = np.dtype(_DTYPES[datatype])
        if len(data) % dtype.itemsize:
            raise RequestError(
                400, f"expected whole values of {dtype.itemsize} bytes, got {len(data)} bytes", f"{path}.data"
            )
        return np.frombuffer(data, dtype)
    texts, at = [], 0
    while at < len(data):
        end = at + 4 + struct.unpack_from("<I", data, at)[0] if at + 4 <= len(data) else len(data) + 1
        if end > len(data):
            raise RequestError(
                400, "expected texts, each behind its length in 4 bytes, got one that is cut", f"{path}.data"
            )
        texts.append(_text(data[at + 4 : end], path))
        at = end
    return texts


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestError(400, "expected texts in UTF-8", f"{path}.data") from None


class OutputTensor(NamedTuple):
    """An FP32 or INT32 output; `written` has its values for JSON."""

    name: str
    datatype: str
    values: np.ndarray
    written: Sequence[float]


def check_outputs(request: Inference, names: Sequence[str]) -> None:
    """Check the outputs that a request names against those of the model.

    Raises:
        RequestError: status 400: the model has no such output.
    """
    for i, name in enumerate(request.outputs or ()):
        if name not in names:
            raise RequestError(
                400, f"unknown output {shown(name)!r}{nearest(shown(name), names)}", f"$.outputs[{i}]"
            )


def select_outputs(outputs: list[OutputTensor], request: Inference) -> list[tuple[OutputTensor, bool]]:
    """The outputs that a request asks for, in its order, or all of them if it names none. True beside an
    output: the client wants it as bytes behind the JSON instead of as JSON numbers."""
    if request.outputs is None:
        return [(output, request.is_binary) for output in outputs]
    known = {output.name: output for output in outputs}
    return [(known[name], binary or request.is_binary) for name, binary in request.outputs.items()]


def encode_response(
    head: dict[str, Any], outputs: list[tuple[OutputTensor, bool]]
) -> tuple[bytes, int | None]:
    """The body of an answer, and the number of its bytes that are JSON if tensors follow as bytes, else
    None."""
    parts, described = [], []
    for output, is_binary in outputs:
        description: dict[str, Any] = {
            "name": output.name,
            "shape": [len(output.values)],
            "datatype": output.datatype,
        }
        if is_binary:
            parts.append(output.values.astype(_DTYPES[output.datatype]).tobytes())
            description["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            description["data"] = list(output.written)
        described.append(description)
    body = msgspec.json.encode({**head, "outputs": described})
    return (body + b"".join(parts), len(body)) if parts else (body, None)
