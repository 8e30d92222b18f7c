"""The Python client of serving: `Client(url).rank({…})`, and `AsyncClient`. It imports httpx2 and none of the
server (docs/http.md)."""

from serving.client.client import AsyncServingClient as AsyncClient
from serving.client.client import ServingClient as Client
from serving.client.messages import FoundItems, Ranking, Receipt, Recommendation, TopRanking
from serving.client.retry import RetryPolicy, ServingError

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
