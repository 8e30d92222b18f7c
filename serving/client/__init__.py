"""A client of serving, for those who ask it: `Client(url).rank({…})`, and `AsyncClient`. It loads httpx2 and nothing of the
server (docs/http.md)."""

from serving.client.callers import AsyncServingClient as AsyncClient
from serving.client.callers import ServingClient as Client
from serving.client.failure import ServingError
from serving.client.retrying import RetryPolicy
from serving.client.said import FoundItems, Ranking, Receipt, Recommendation, TopRanking

__all__ = [
    "AsyncClient",
    "Client",
    "FoundItems",
    "Ranking",
    "Receipt",
    "Recommendation",
    "RetryPolicy",
    "ServingError",
    "TopRanking",
]
