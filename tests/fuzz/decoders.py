"""All decoders of external bytes: valid inputs, and the errors with which they may reject others. Any other
error is a defect."""

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
WHO = {"request_id": "r-1", "user_id": 17, "ro": {"mood": 0.5, "hour": 13.0}}
COLUMNS = {
    "item_id": [8, "nine", 10],
    "topics": [[1, 2], 7, None],
    "age_h": [2.5, None, None],
    "clicks": [3, 0, 1],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A decoder `read`, and valid inputs `seeds`."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = (RequestError,)

    def try_one(self, data: bytes) -> bool:
        """Whether `data` is accepted. Raises undeclared errors."""
        try:
            self.read(data)
        except self.refuses:
            return False
        return True


def targets() -> dict[str, Target]:
    """Fresh targets by name."""
    return {**_bodies(SCHEMA), **_records(SCHEMA), **_files()}


def _bodies(schema: Schema) -> dict[str, Target]:
    rank, engage, found = JsonParser(schema), EngagementParser(schema), RetrieveParser(schema, 0)
    plain = tuple(
        _json(body)
        for body in (BODY, {**BODY, "candidates": COLUMNS}, {**BODY, "append": True, "first_position": 3})
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
    asked = {
        **WHO,
        "k": 5,
        "exclude": [1, "i3"],
        "among": [2, "i6"],
        "exclude_seen": True,
        "filter": {"lang": ["da", "en"]},
    }
    return {
        "rank-json": Target(read=rank.parse, seeds=plain),
        "rank-protobuf": Target(
            read=functools.partial(parse_impression, schema), seeds=(_impression(schema),)
        ),
        "engagements": Target(
            read=lambda data: engage.parse(data, NOW_MS), seeds=(_json(click), _json([click, click]))
        ),
        "retrieve": Target(read=found.retrieve, seeds=(_json(asked),)),
        "recommend": Target(
            read=found.recommend, seeds=(_json({**asked, "retrieved": 9, "model_version": "1-2"}),)
        ),
        "inference": Target(read=functools.partial(_infer, FeatureTensors(schema)), seeds=_inferences()),
        "inflated": Target(
            read=_inflated, seeds=(b"\0" + zlib.compress(plain[0]), b"\1" + zlib.compress(plain[0], wbits=31))
        ),
        "query": Target(read=_query, seeds=(b"append=true&ranked=false&top=10\n250", b"top=1\n1")),
    }


def _records(schema: Schema) -> dict[str, Target]:
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    records = tuple(
        bytes.fromhex(file.read_text()) for file in sorted(GOLDEN.glob("*.hex")) if file.stem != "rank_answer"
    )
    segment = encode_header(1, 5) + b"".join(
        encode_record(LogRecord("impressions", n, NOW_MS, b"12345678", b"value" * n), 5 + n) for n in range(3)
    )

    def samples(data: bytes) -> None:
        """Never raises; rejects are returned beside the batch."""
        decoder.decode([wire.Record("samples", 0, 0, NOW_MS, None, data)], corrections=True)

    return {
        "record": Target(read=wire.decode, seeds=records, refuses=(WireError,)),
        "samples": Target(read=samples, seeds=(_sample(schema), *records), refuses=()),
        "log-segment": Target(
            read=lambda data: (decode_header(data), list(scan(data, 5))), seeds=(segment,), refuses=()
        ),
    }


def _files() -> dict[str, Target]:
    outer = json.loads((GOLDEN / "format_1" / "manifest.json").read_bytes())
    item = {
        "item_id": 8,
        "topics": [1, 7],
        "age_h": 2.5,
        "attributes": {"lang": "da", "tags": [1, "all"], "paid": True},
    }
    lines = b"\n".join((_json(item), _json({**item, "item_id": "i9"})))
    keys = encode_key_file([new_key("web", ["rank", "engage"], 0)[1], new_key("ops", ["admin"], 5, 9)[1]])
    tensors = tensor_file.encode({"a": np.arange(4.0), "b": np.arange(6.0).reshape(2, 3)}, {"k": "v"})
    return {
        "catalogue": Target(
            read=lambda data: read_catalogue(SCHEMA, data.split(b"\n")),
            seeds=(lines,),
            refuses=(ConfigError,),
        ),
        "keys": Target(read=decode_key_file, seeds=(keys,), refuses=(ConfigError,)),
        "manifest": Target(read=_manifest, seeds=(_json(outer["body"]),), refuses=(CheckpointError,)),
        "tensors": Target(read=tensor_file.decode, seeds=(tensors,), refuses=(CheckpointError,)),
    }


def _manifest(data: bytes) -> object:
    """Read a manifest with a valid checksum, so that the code behind the check is reached."""
    try:
        whole = encoded(json.loads(data))
    except (ValueError, RecursionError):
        whole = data
    return manifest.decode(whole)


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


def _inferences() -> tuple[bytes, ...]:
    """Inputs whose first byte tells whether a header length of ten digits follows."""
    head = {
        "id": "r-1",
        "parameters": {"user_id": 17, "session_id": 4},
        "inputs": [
            {"name": "item_id", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
            {"name": "mood", "shape": [1], "datatype": "FP32", "data": [0.5]},
            {"name": "topics", "shape": [3], "datatype": "INT64", "data": [5, 6, 7]},
            {"name": "topics:lengths", "shape": [2], "datatype": "INT32", "data": [2, 1]},
        ],
    }
    binary: Any = json.loads(_json(head))
    data = {
        "item_id": b"\1\0\0\0a\1\0\0\0b",
        "mood": b"\0\0\0\x3f",
        "topics": bytes(24),
        "topics:lengths": b"\2\0\0\0\1\0\0\0",
    }
    for given in binary["inputs"]:
        del given["data"]
        given["parameters"] = {"binary_data_size": len(data[given["name"]])}
    whole = _json(binary)
    return b"J" + _json(head), b"B%010d" % len(whole) + whole + b"".join(data.values())


def _infer(tensors: FeatureTensors, data: bytes) -> object:
    is_binary = data[:1] == b"B"
    asked = parse_inference(data[11:] if is_binary else data[1:], data[1:11] if is_binary else None)
    return tensors.build_request(asked, "")


def _inflated(data: bytes) -> bytes:
    return _inflate(data[1:], ("deflate", "gzip", "br")[data[0] % 3 if data else 0], 1 << 16)


def _query(data: bytes) -> object:
    query, _, deadline = data.partition(b"\n")
    return parse_rank_options(query), parse_deadline_ms({"headers": [(b"x-deadline-ms", deadline)]}, 1000)
