"""Our ranker as a LitServe API class, imported by LitServe's worker process."""

from __future__ import annotations

from typing import Any

import litserve

from benchmarks.common.peer_ranking import PATH, DemoRank, Scoring


class LitRanking(litserve.LitAPI):  # type: ignore[misc]
    """One request at a time."""

    def setup(self, device: str) -> None:
        self.scoring = Scoring()

    def decode_request(self, request: DemoRank) -> DemoRank:
        return request

    def predict(self, asked: DemoRank) -> dict[str, Any]:
        return self.scoring.rank(asked)

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


def run(port: int) -> None:
    """Until the process ends."""
    LitRanking.decode_request.__annotations__["request"] = DemoRank  # it reads the type itself
    server = litserve.LitServer(LitRanking(api_path=PATH), accelerator="cpu", devices=1, workers_per_device=1)
    server.run(
        host="127.0.0.1", port=port, num_api_servers=1, log_level="warning", generate_client_file=False
    )
