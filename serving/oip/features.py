"""Features as tensors: the inputs of the model, and the conversion of an inference request to a RankRequest.

    item_id             [N]              candidate ids: integers, or BYTES, which are hashed
    RO float            [1]
    NRO float           [N]
    RO list             <name> [1, L], and a tensor of equal shape for each of its columns
    NRO list            <name> [sum of lengths] and <name>:lengths [N], or <name> [N, L]; so are its columns
    columns             <name>.weights of weighted ids; <name>.<column> of a sequence

An absent input is missing; so are NaN and a length of -1. The user is in the request's parameters `user_id`,
`session_id`, `surface`, `append` and `first_position`; its `id` is the request id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from roostream.errors import nearest
from roostream.schema.schema import Feature, Schema
from serving.errors import RequestError, shown
from serving.oip.tensors import Inference, Tensor
from serving.rank_json import MAX_FLOAT, check_num_candidates, check_position, check_unique
from serving.request import RankRequest, check_ids, check_text, parse_id, parse_ids, parse_request_id

ITEMS = "item_id"
LENGTHS = ":lengths"
_PARAMETERS: dict[str, tuple[type, ...]] = {
    "user_id": (int, str),
    "session_id": (int, str),
    "surface": (str,),
    "append": (bool,),
    "first_position": (int,),
}
_OF_THE_PROTOCOL = (
    "binary_data_output",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
)


class FeatureTensors:
    """For one schema. A feature called `item_id` has no input, since that name is the candidates'."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._ro = [f for f in schema.ro if f.name != ITEMS]
        self._nro = [f for f in schema.nro if f.name != ITEMS]
        self._known = {about["name"] for about in self.inputs()}

    def inputs(self) -> list[dict[str, Any]]:
        """The inputs as in the model's metadata; -1 is a variable size."""
        inputs = [_input_metadata(ITEMS, "INT64", [-1])]
        for f in self._ro:
            inputs += [
                _input_metadata(name, kind, [1] if f.kind == "float" else [1, -1]) for name, kind in _parts(f)
            ]
        for f in self._nro:
            inputs += [_input_metadata(name, kind, [-1]) for name, kind in _parts(f)]
            inputs += [_input_metadata(f.name + LENGTHS, "INT32", [-1])] if f.kind != "float" else []
        return inputs

    def build_request(self, inference: Inference, model_version: str) -> RankRequest:
        """The rank request of an inference request. Raises RequestError 400, 413: invalid names or shapes, or
        values that a JSON rank request would be refused for."""
        for name, tensor in inference.inputs.items():
            if name not in self._known:
                raise RequestError(
                    400, f"unknown input {shown(name)!r}{nearest(shown(name), self._known)}", tensor.path
                )
        if ITEMS not in inference.inputs:
            raise RequestError(400, f"expected an input {ITEMS!r} with the candidates, got none", "$.inputs")
        given, items = self._items(inference.inputs[ITEMS])
        parameters = _parse_parameters(inference.parameters)
        return RankRequest(
            request_id=parse_request_id(inference.id, "$.id"),
            user_id=parse_id(parameters["user_id"], "$.parameters.user_id"),
            session_id=parse_id(parameters["session_id"], "$.parameters.session_id"),
            surface=check_text(parameters["surface"], "$.parameters.surface"),
            item_ids=items,
            client_item_ids=given,
            ro=self._values(inference.inputs),
            nro=self._columns(inference.inputs, len(items)),
            append=parameters["append"],
            first_position=check_position(
                parameters["first_position"], len(items), "$.parameters.first_position"
            ),
            model_version=model_version,
        )

    def _items(self, tensor: Tensor) -> tuple[list[int | str], np.ndarray]:
        given = _ids(tensor)
        check_num_candidates(self.schema, len(given), tensor.path)
        items = parse_ids(given, lambda i: f"{tensor.path}.data[{i}]")
        check_unique(items, tensor.path + ".data[{}]")
        return given, items

    def _values(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """RO values; absent inputs stay absent."""
        out: dict[str, Any] = {}
        for f in self._ro:
            parts = _given(f, inputs)
            if not parts:
                continue
            if f.kind == "float":
                if len(parts[f.name].values) != 1:
                    raise RequestError(
                        400,
                        f"expected {f.name!r} of shape [1], got {list(parts[f.name].shape)}",
                        parts[f.name].path,
                    )
                out[f.name] = float(_numbers(parts[f.name])[0])
            else:
                for tensor in parts.values():
                    if len(tensor.shape) > 1 and tensor.shape[0] != 1:
                        raise RequestError(
                            400, f"expected shape [1, L], got {list(tensor.shape)}", tensor.path
                        )
                columns = {name: _list(f, name, tensor) for name, tensor in parts.items()}
                self._check_lengths(f, {name: [len(values)] for name, values in columns.items()}, parts)
                out[f.name] = _one(f, columns)
        return {name: value for name, value in out.items() if value == value}

    def _columns(self, inputs: dict[str, Tensor], n: int) -> dict[str, Any]:
        """NRO columns, one value per candidate."""
        out: dict[str, Any] = {}
        for f in self._nro:
            parts = _given(f, inputs)
            if not parts:
                if f.name + LENGTHS in inputs:
                    raise RequestError(
                        400, f"expected {f.name!r} beside its lengths", inputs[f.name + LENGTHS].path
                    )
                continue
            if f.kind == "float":
                out[f.name] = _check_rows(f, _numbers(parts[f.name]), n, parts[f.name])
                continue
            lengths = _lengths(inputs.get(f.name + LENGTHS), parts[f.name], n)
            self._check_lengths(f, {f.name: lengths}, parts)
            flat = {name: _list(f, name, tensor) for name, tensor in parts.items()}
            used = sum(length for length in lengths if length > 0)
            for name, values in flat.items():
                if len(values) != used:
                    raise RequestError(
                        400, f"expected {used} values by the lengths, got {len(values)}", parts[name].path
                    )
            out[f.name] = list(_rows(f, flat, lengths))
        return out

    def _check_lengths(self, f: Feature, lengths: dict[str, list[int]], parts: dict[str, Tensor]) -> None:
        max_list = self.schema.limits.max_list
        for name, sizes in lengths.items():
            if max(sizes, default=0) > max_list:
                raise RequestError(
                    413, f"expected at most {max_list} entries, got {max(sizes)}", parts[name].path
                )


def _input_metadata(name: str, kind: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": shape}


def _parts(f: Feature) -> list[tuple[str, str]]:
    """(input name, datatype); the feature's own input first."""
    if f.kind == "float":
        return [(f.name, "FP32")]
    weights = [(f"{f.name}.weights", "FP32")] if f.kind == "weighted_ids" else []
    return [(f.name, "INT64"), *weights, *((f"{f.name}.{column}", "INT64") for column in f.columns)]


def _given(f: Feature, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All inputs of a feature, or none."""
    names = [name for name, _ in _parts(f)]
    given = {name: inputs[name] for name in names if name in inputs}
    if given and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise RequestError(400, f"expected an input {missing!r} beside {next(iter(given))!r}", "$.inputs")
    return given


def _parse_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parse the parameters. RequestError 400 for an unknown name or wrong type."""
    out: dict[str, Any] = {"user_id": 0, "session_id": 0, "surface": "", "append": False, "first_position": 0}
    for name, value in parameters.items():
        if name in _OF_THE_PROTOCOL:
            continue
        if name not in _PARAMETERS:
            raise RequestError(
                400, f"unknown parameter {shown(name)!r}{nearest(shown(name), _PARAMETERS)}", "$.parameters"
            )
        if type(value) not in _PARAMETERS[name]:
            wanted = " or ".join(kind.__name__ for kind in _PARAMETERS[name])
            raise RequestError(400, f"expected {wanted}, got {shown(value)!r}", f"$.parameters.{name}")
        out[name] = value
    return out


def _numbers(tensor: Tensor) -> np.ndarray:
    """Return float64. RequestError 400 for texts and for values beyond float32."""
    if isinstance(tensor.values, list):
        raise RequestError(400, "expected numbers, got BYTES", tensor.path)
    values = tensor.values.astype(np.float64)
    if (np.abs(values) > MAX_FLOAT).any():
        raise RequestError(400, "expected finite 32-bit floats", tensor.path)
    return values


def _ids(tensor: Tensor) -> list[int | str]:
    ids: list[int | str] = list(tensor.values) if isinstance(tensor.values, list) else _integers(tensor)
    check_ids(ids, lambda i: f"{tensor.path}.data[{i}]")
    return ids


def _integers(tensor: Tensor) -> list[Any]:
    if isinstance(tensor.values, list) or tensor.values.dtype.kind not in "iu":
        raise RequestError(400, "expected integers (or BYTES for ids)", tensor.path)
    return tensor.values.tolist()


def _list(f: Feature, name: str, tensor: Tensor) -> list[Any]:
    """Ids, times or weights: the values of the input `name` of a list feature."""
    if f.kind == "weighted_ids" and name != f.name:
        return _numbers(tensor).tolist()
    if not isinstance(tensor.values, list) and tensor.values.dtype.kind == "f":
        return _numbers(tensor).tolist()
    return _ids(tensor)


def _lengths(lengths: Tensor | None, values: Tensor, n: int) -> list[int]:
    """The length of each candidate's list; -1 = missing."""
    if lengths is not None:
        sizes = _integers(lengths)
        if len(sizes) != n or min(sizes, default=0) < -1:
            raise RequestError(
                400, f"expected {n} lengths, of -1 (missing) or more, got {shown(sizes)}", lengths.path
            )
        return sizes
    if values.shape[:1] != (n,) or len(values.shape) > 2:
        shape = list(values.shape)
        raise RequestError(
            400,
            f"expected shape [{n}] or [{n}, L], or values with an input of lengths, got {shape}",
            values.path,
        )
    return [values.shape[1] if len(values.shape) == 2 else 1] * n


def _rows(f: Feature, flat: dict[str, list[Any]], lengths: list[int]) -> Iterator[Any]:
    at = 0
    for length in lengths:
        yield (
            None if length < 0 else _one(f, {name: values[at : at + length] for name, values in flat.items()})
        )
        at += max(length, 0)


def _one(f: Feature, columns: dict[str, list[Any]]) -> Any:
    """The value of one row, in the form of `roostream.wire.block`."""
    if f.kind == "ids":
        return columns[f.name]
    return {
        ("ids" if name == f.name else name.removeprefix(f"{f.name}.")): values
        for name, values in columns.items()
    }


def _check_rows(f: Feature, values: np.ndarray, n: int, tensor: Tensor) -> np.ndarray:
    if len(values) != n:
        raise RequestError(400, f"expected {f.name!r} of shape [{n}], got {list(tensor.shape)}", tensor.path)
    return values
