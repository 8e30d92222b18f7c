"""The routes `/v2` of the Open Inference Protocol: health, metadata and inference of the one served model.

The model's name is the schema's name. An inference is a rank request: same queue, same log, same errors, but
in the format of this protocol, `{"error": …}`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response

from serving.answer import Scores, shortest
from serving.errors import RequestError, shown
from serving.http.admission import RETRY_AFTER_S
from serving.http.body import JSON, json_response, request_media_type
from serving.http.middleware import UNTIL_S
from serving.http.routes import Traffic, apply_version_header
from serving.oip.features import FeatureTensors
from serving.oip.tensors import (
    HEADER_LENGTH,
    OutputTensor,
    check_outputs,
    encode_response,
    parse_inference,
    select_outputs,
)
from serving.types import RankAnswer

ORDER = "order"
OCTETS = "application/octet-stream"


def add_inference_routes(app: FastAPI, traffic: Traffic) -> None:
    """Inference is added to the traffic, everything else to `app`."""
    context, ranking, bodies = traffic.context, traffic.ranking, traffic.bodies
    schema, metrics = context.schema, context.metrics
    # A label may be named like the order; its scores are in `/v1/rank` only.
    outputs = [*(task for task in schema.tasks if task != ORDER), ORDER]
    features = FeatureTensors(schema)

    def check_model(request: Request) -> str:
        """Return the version that the path names, or "". Raises RequestError 404."""
        model, version = request.path_params["model"], request.path_params.get("version", "")
        if model != schema.name:
            message = f"expected model {schema.name!r}, got {shown(model)!r}"
            raise RequestError(404, message, code="unknown_model")
        context.service.versions.named(version)
        return version

    async def infer(request: Request) -> Response:
        """Binary outputs follow the JSON if the request wants them."""
        scope = request.scope
        version = check_model(request)
        stated = request.headers.get(HEADER_LENGTH.decode())
        request_media_type(scope, (JSON, OCTETS))
        body = await bodies.read(request, scope[UNTIL_S])
        begin_s = time.perf_counter()
        inference = parse_inference(body, None if stated is None else stated.encode("latin-1"))
        check_outputs(inference, outputs)
        parsed = features.build_request(inference, version)
        apply_version_header(scope, parsed)
        metrics.stages.parse.observe(time.perf_counter() - begin_s)
        answer = await ranking.rank(parsed, len(body), scope[UNTIL_S])
        head = {
            "model_name": schema.name,
            "model_version": answer.model_version,
            "id": answer.request_id,
            "parameters": {"degraded": answer.degraded},
        }
        encoded, size = encode_response(head, select_outputs(_tensors(answer), inference))
        if size is None:
            return Response(encoded, media_type=JSON)
        return Response(encoded, headers={HEADER_LENGTH.decode(): str(size)}, media_type=OCTETS)

    async def metadata(request: Request) -> Response:
        check_model(request)
        return json_response(
            {
                "name": schema.name,
                "versions": [loaded.version.name for loaded in context.service.versions.loaded],
                "platform": "roostream",
                "inputs": features.inputs(),
                "outputs": [
                    {"name": name, "datatype": "INT32" if name == ORDER else "FP32", "shape": [-1]}
                    for name in outputs
                ],
            }
        )

    async def model_ready(request: Request) -> Response:
        check_model(request)
        return readiness({"name": schema.name})

    async def ready(request: Request) -> Response:
        return readiness({})

    async def live(request: Request) -> Response:
        return json_response({"live": True})

    async def server(request: Request) -> Response:
        return json_response(
            {"name": "roostream", "version": app.version, "extensions": ["binary_tensor_data"]}
        )

    def readiness(about: dict[str, Any]) -> Response:
        is_ready = not context.waiting_for()
        headers = {} if is_ready else {"retry-after": str(RETRY_AFTER_S)}
        return json_response({**about, "ready": is_ready}, 200 if is_ready else 503, headers)

    pages = {"/v2": server, "/v2/health/live": live, "/v2/health/ready": ready}
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        traffic.router.post(f"{model}/infer", name="infer", include_in_schema=False)(infer)
        pages |= {f"{model}/ready": model_ready, model: metadata}
    for path, endpoint in pages.items():
        app.add_route(path, endpoint, methods=["GET"])  # and HEAD


def _tensors(answer: RankAnswer[Any]) -> list[OutputTensor]:
    scores = answer.scores
    assert isinstance(scores, Scores)
    decimals_nT = shortest(scores.values_nT)
    outputs = [
        OutputTensor(task, "FP32", scores.values_nT[:, t], decimals_nT[:, t].tolist())
        for t, task in enumerate(scores.tasks)
        if task != ORDER
    ]
    return [*outputs, OutputTensor(ORDER, "INT32", np.array(answer.order, np.int32), answer.order)]
