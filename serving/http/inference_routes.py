"""The routes `/v2` of the Open Inference Protocol: health, metadata and inference of the one served model.

The model's name is the schema's name. An inference is a rank request: same queue, same log, same errors, but
in the format of this protocol, `{"error": …}`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from serving.answer import RankAnswer, shortest
from serving.context import ServingContext
from serving.errors import RequestError, shown
from serving.http.body import JSON, request_media_type, send_answer
from serving.http.log_rate_limit import LogRateLimit
from serving.http.routes import RankEndpoint, apply_version_header
from serving.oip.features import FeatureTensors
from serving.oip.tensors import (
    HEADER_LENGTH,
    Inference,
    OutputTensor,
    check_outputs,
    encode_response,
    parse_inference,
    select_outputs,
)

ORDER = "order"
OCTETS = "application/octet-stream"
_MODEL = re.compile(r"/v2/models/(?P<name>.+?)(/versions/(?P<version>[^/]+))?(?P<what>/ready|/infer)?")


class InferenceAnswer(NamedTuple):
    """The answer of an inference before it is encoded."""

    ranked: RankAnswer
    inference: Inference


class InferenceProtocol:
    """The ASGI application below `/v2`. It shares the queue of `rank`."""

    def __init__(
        self, context: ServingContext, rank: RankEndpoint, log_rate_limit: LogRateLimit, release: str
    ) -> None:
        self.context, self.release = context, release
        self.infer = InferEndpoint(context, rank, log_rate_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _MODEL.fullmatch(scope["path"])
        if match is not None and match["what"] == "/infer":
            if scope["method"] != "POST":
                await send_inference_error(
                    send, RequestError(405, f"expected POST, got {shown(scope['method'])}"), allow="POST"
                )
            else:
                await self.infer(scope, receive, send)
            return
        try:
            status, answer = self._describe(scope, match)
        except RequestError as error:
            await send_inference_error(send, error)
        else:
            body = msgspec.json.encode(answer)
            await send_answer(send, status, b"" if scope["method"] == "HEAD" else body, JSON, {})

    def _describe(self, scope: Scope, match: re.Match[str] | None) -> tuple[int, dict[str, Any]]:
        """Return (status, answer) of a GET. Raises RequestError 400, 404, 405."""
        about: dict[str, Callable[[], dict[str, Any]]] = {
            "/v2": lambda: {
                "name": "roostream",
                "version": self.release,
                "extensions": ["binary_tensor_data"],
            },
            "/v2/health/live": lambda: {"live": True},
            "/v2/health/ready": lambda: {"ready": not self.context.waiting_for()},
        }
        describe = about.get(scope["path"])
        if describe is None and match is None:
            raise RequestError(404, f"nothing is at {shown(scope['path'])!r}")
        if scope["method"] not in ("GET", "HEAD"):
            raise RequestError(405, f"expected GET or HEAD, got {shown(scope['method'])}")
        if describe is not None:
            answer = describe()
        else:
            assert match is not None
            self.infer.check_model(match)
            answer = (
                {"name": match["name"], "ready": not self.context.waiting_for()}
                if match["what"]
                else self._metadata()
            )
        return 503 if answer.get("ready") is False else 200, answer

    def _metadata(self) -> dict[str, Any]:
        return {
            "name": self.context.schema.name,
            "versions": [loaded.version.name for loaded in self.context.service.versions.loaded],
            "platform": "roostream",
            "inputs": self.infer.features.inputs(),
            "outputs": [
                {"name": name, "datatype": "INT32" if name == ORDER else "FP32", "shape": [-1]}
                for name in self.infer.outputs
            ],
        }


class InferEndpoint(RankEndpoint):
    """`POST /v2/models/<name>[/versions/<version>]/infer`."""

    route = "infer"

    def __init__(self, context: ServingContext, rank: RankEndpoint, log_rate_limit: LogRateLimit) -> None:
        super().__init__(context, rank.body_reader, log_rate_limit)
        self.gate, self.queue = rank.gate, rank.queue
        self.features = FeatureTensors(context.schema)
        self.outputs = (*(task for task in context.schema.tasks if task != ORDER), ORDER)

    def check_model(self, match: re.Match[str]) -> str:
        """Return the version in the path, "" = none. Raises RequestError 400, 404."""
        if match["name"] != self.context.schema.name:
            message = f"expected model {self.context.schema.name!r}, got {shown(match['name'])!r}"
            raise RequestError(404, message, code="unknown_model")
        version = match["version"] or ""
        self.context.service.versions.named(version)
        return version

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """As RankEndpoint.answer; also 404 for the path of another model."""
        self.gate.check(self.remaining_s(until_s))
        match = _MODEL.fullmatch(scope["path"])
        assert match is not None
        version = self.check_model(match)
        stated = next((value for name, value in scope["headers"] if name == HEADER_LENGTH), None)
        request_media_type(scope, (JSON, OCTETS))
        body = await self.body_reader.read(scope, receive, until_s)
        begin_s = time.perf_counter()
        inference = parse_inference(body, stated)
        check_outputs(inference, self.outputs)
        request = self.features.build_request(inference, version)
        apply_version_header(scope, request)
        self.context.metrics.stages.parse.observe(time.perf_counter() - begin_s)
        return InferenceAnswer(await self.rank_request(request, len(body), until_s), inference)

    def error_body(self, error: RequestError) -> object:
        return _fault(error)

    def encode(self, scope: Scope, answer: object) -> tuple[bytes, str, dict[str, str]]:
        """Binary outputs follow the JSON if the request wants them."""
        if not isinstance(answer, InferenceAnswer):
            return msgspec.json.encode(answer), JSON, {}
        ranked = answer.ranked
        head = {
            "model_name": self.context.schema.name,
            "model_version": ranked.model_version,
            "id": ranked.request_id,
            "parameters": {"degraded": ranked.degraded},
        }
        body, size = encode_response(head, select_outputs(self._tensors(ranked), answer.inference))
        return (body, JSON, {}) if size is None else (body, OCTETS, {HEADER_LENGTH.decode(): str(size)})

    def _tensors(self, ranked: RankAnswer) -> list[OutputTensor]:
        decimals_nT = shortest(ranked.scores_nT)
        match = [
            OutputTensor(task, "FP32", ranked.scores_nT[:, t], decimals_nT[:, t].tolist())
            for t, task in enumerate(ranked.tasks)
            if task != ORDER
        ]
        return [*match, OutputTensor(ORDER, "INT32", np.array(ranked.order, np.int32), ranked.order)]


def _fault(error: RequestError) -> dict[str, str]:
    return {"error": f"{error} (at {error.path})" if error.path else str(error)}


async def send_inference_error(send: Send, error: RequestError, **headers: str) -> None:
    """Send an error in the format of this protocol."""
    await send_answer(
        send, error.status, msgspec.json.encode(_fault(error)), JSON, {**error.headers(), **headers}
    )
