"""Fuzz targets: every decoder of bytes from outside, with valid inputs and the errors it may raise for
invalid ones. Any other error is a defect."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roostream.errors import CheckpointError, ConfigError, WireError
from roostream.runtime import manifest, tensor_file
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder
from serving.access.bearer_keys import decode_key_file, encode_key_file, new_key
from serving.errors import RequestError
from serving.feature_log.format import LogRecord, decode_header, encode_header, encode_record, scan
from serving.http.body import _inflate
from serving.http.engagements import EngagementParser
from serving.http.middleware import parse_deadline_ms
from serving.http.retrieval_routes import RetrieveParser
from serving.http.routes import parse_rank_options
from serving.oip.features import FeatureTensors
from serving.oip.tensors import parse_inference
from serving.rank_json import JsonParser
from serving.rank_protobuf import parse_impression
from serving.retrieval.catalogue import read_catalogue
from tests.runtime.manifest_cases import encoded
from tests.serving.serving_cases import BODY, HISTORY, NOW_MS, SCHEMA

GOLDEN = Path(__file__).parents[1] / "golden"
REQUEST_FIELDS = {"request_id": "r-1", "user_id": 17, "ro": {"mood": 0.5, "hour": 13.0}}
CANDIDATE_COLUMNS = {
    "item_id": [8, "nine", 10],
    "topics": [[1, 2], 7, None],
    "age_h": [2.5, None, None],
    "clicks": [3, 0, 1],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A decoder, valid inputs to mutate (`seeds`), and the errors it may raise for invalid input."""

    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = (RequestError,)

    def accepts(self, data: bytes) -> bool:
        """Return whether the decoder accepts `data`. Errors that are not declared in `errors` propagate."""
        try:
            self.decode(data)
        except self.errors:
            return False
        return True


def targets() -> dict[str, Target]:
    """Build all targets, by name."""
    return {**_request_body_targets(SCHEMA), **_record_targets(SCHEMA), **_file_targets()}


def _request_body_targets(schema: Schema) -> dict[str, Target]:
    rank_parser, engagement_parser, retrieve_parser = (
        JsonParser(schema),
        EngagementParser(schema),
        RetrieveParser(schema, 0),
    )
    rank_bodies = tuple(
        _json(body)
        for body in (
            BODY,
            {**BODY, "candidates": CANDIDATE_COLUMNS},
            {**BODY, "append": True, "first_position": 3},
        )
    )
    click = {
        "request_id": "r-1",
        "user_id": 17,
        "item_id": 8,
        "action": "click",
        "value": 2.5,
        "event_id": "e",
        "time_ms": 5,
    }
    retrieve_body = {
        **REQUEST_FIELDS,
        "k": 5,
        "exclude": [1, "i3"],
        "among": [2, "i6"],
        "exclude_seen": True,
        "filter": {"lang": ["da", "en"]},
    }
    return {
        "rank-json": Target(decode=rank_parser.parse, seeds=rank_bodies),
        "rank-protobuf": Target(
            decode=functools.partial(parse_impression, schema), seeds=(_impression(schema),)
        ),
        "engagements": Target(
            decode=lambda data: engagement_parser.parse(data, NOW_MS),
            seeds=(_json(click), _json([click, click])),
        ),
        "retrieve": Target(decode=retrieve_parser.retrieve, seeds=(_json(retrieve_body),)),
        "recommend": Target(
            decode=retrieve_parser.recommend,
            seeds=(_json({**retrieve_body, "retrieved": 9, "model_version": "1-2"}),),
        ),
        "inference": Target(
            decode=functools.partial(_decode_inference, FeatureTensors(schema)), seeds=_inference_requests()
        ),
        "inflated": Target(
            decode=_decode_compressed,
            seeds=(b"\0" + zlib.compress(rank_bodies[0]), b"\1" + zlib.compress(rank_bodies[0], wbits=31)),
        ),
        "query": Target(decode=_decode_query, seeds=(b"append=true&ranked=false&top=10\n250", b"top=1\n1")),
    }


def _record_targets(schema: Schema) -> dict[str, Target]:
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    records = tuple(
        bytes.fromhex(file.read_text()) for file in sorted(GOLDEN.glob("*.hex")) if file.stem != "rank_answer"
    )
    segment = encode_header(1, 5) + b"".join(
        encode_record(LogRecord("impressions", n, NOW_MS, b"12345678", b"value" * n), 5 + n) for n in range(3)
    )

    def samples(data: bytes) -> None:
        """Decode one sample. The decoder returns rejected records beside the batch and never raises."""
        decoder.decode([wire.Record("samples", 0, 0, NOW_MS, None, data)], corrections=True)

    return {
        "record": Target(decode=wire.decode, seeds=records, errors=(WireError,)),
        "samples": Target(decode=samples, seeds=(_sample(schema), *records), errors=()),
        "log-segment": Target(
            decode=lambda data: (decode_header(data), list(scan(data, 5))), seeds=(segment,), errors=()
        ),
    }


def _file_targets() -> dict[str, Target]:
    golden_manifest = json.loads((GOLDEN / "format_1" / "manifest.json").read_bytes())
    item = {
        "item_id": 8,
        "topics": [1, 7],
        "age_h": 2.5,
        "attributes": {"lang": "da", "tags": [1, "all"], "paid": True},
    }
    catalogue = b"\n".join((_json(item), _json({**item, "item_id": "i9"})))
    keys = encode_key_file([new_key("web", ["rank", "engage"], 0)[1], new_key("ops", ["admin"], 5, 9)[1]])
    tensors = tensor_file.encode({"a": np.arange(4.0), "b": np.arange(6.0).reshape(2, 3)}, {"k": "v"})
    return {
        "catalogue": Target(
            decode=lambda data: read_catalogue(SCHEMA, data.split(b"\n")),
            seeds=(catalogue,),
            errors=(ConfigError,),
        ),
        "keys": Target(decode=decode_key_file, seeds=(keys,), errors=(ConfigError,)),
        "manifest": Target(
            decode=_manifest, seeds=(_json(golden_manifest["body"]),), errors=(CheckpointError,)
        ),
        "tensors": Target(decode=tensor_file.decode, seeds=(tensors,), errors=(CheckpointError,)),
    }


def _manifest(data: bytes) -> object:
    """Decode `data` as the body of a manifest with a valid checksum, so that fuzzing gets past the check."""
    try:
        content = encoded(json.loads(data))
    except (ValueError, RecursionError):
        content = data
    return manifest.decode(content)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _blocks(schema: Schema) -> tuple[bytes, bytes]:
    nro = {"topics": [[1, 2], [7], None], "age_h": [2.5, float("nan"), 1.0], "clicks": [3.0, 0.0, 1.0]}
    return encode_ro(schema, {"mood": 0.5, "user": [17], "history": HISTORY}), encode_nro(schema, nro, 3)


def _impression(schema: Schema) -> bytes:
    ro, nro = _blocks(schema)
    header = pb.Header(
        request_id="r-1", user_id=17, surface="home", schema=schema.fingerprint, model_version="1-2"
    )
    return pb.Impression(header=header, item_ids=[8, 9, 10], ro=ro, nro=nro).SerializeToString()


def _sample(schema: Schema) -> bytes:
    ro, nro = _blocks(schema)
    return wire.encode(
        wire.SAMPLE,
        pb.Sample(
            header=pb.Header(request_id="r-1", user_id=17, time_ms=NOW_MS - 5, schema=schema.fingerprint),
            sample_id=31,
            close_ms=NOW_MS,
            ro=ro,
            item_ids=[8, 9, 10],
            parts=[pb.Part(nro=nro, num_rows=3, rows=[0, 1, 2])],
            labels=[1.0, 0.0, 0.0, 2.0, 0.0, 0.0],
            scores=[0.1] * 6,
            positions=[0, 1, 2],
            propensities=[1.0] * 3,
            weight=1.0,
        ),
    )


def _inference_requests() -> tuple[bytes, ...]:
    """Inference requests. `J` is followed by JSON; `B` by the header's length in ten digits, the header and
    data."""
    json_request = {
        "id": "r-1",
        "parameters": {"user_id": 17, "session_id": 4},
        "inputs": [
            {"name": "item_id", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
            {"name": "mood", "shape": [1], "datatype": "FP32", "data": [0.5]},
            {"name": "topics", "shape": [3], "datatype": "INT64", "data": [5, 6, 7]},
            {"name": "topics:lengths", "shape": [2], "datatype": "INT32", "data": [2, 1]},
        ],
    }
    binary_request: Any = json.loads(_json(json_request))
    data = {
        "item_id": b"\1\0\0\0a\1\0\0\0b",
        "mood": b"\0\0\0\x3f",
        "topics": bytes(24),
        "topics:lengths": b"\2\0\0\0\1\0\0\0",
    }
    for tensor in binary_request["inputs"]:
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": len(data[tensor["name"]])}
    header = _json(binary_request)
    return b"J" + _json(json_request), b"B%010d" % len(header) + header + b"".join(data.values())


def _decode_inference(tensors: FeatureTensors, data: bytes) -> object:
    is_binary = data[:1] == b"B"
    request = parse_inference(data[11:] if is_binary else data[1:], data[1:11] if is_binary else None)
    return tensors.build_request(request, "")


def _decode_compressed(data: bytes) -> bytes:
    return _inflate(data[1:], ("deflate", "gzip", "br")[data[0] % 3 if data else 0], 1 << 16)


def _decode_query(data: bytes) -> object:
    query, _, deadline = data.partition(b"\n")
    return parse_rank_options(query), parse_deadline_ms({"headers": [(b"x-deadline-ms", deadline)]}, 1000)
