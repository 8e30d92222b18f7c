"""The sample log of `roostream init`: a week of an invented shop. The same seed gives the same lines.

Each of 300 users likes two of eight categories and dislikes high prices. They click on what they like, more
often near the top of the list, and some of these clicks lead to a second action minutes later.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

_START_MS = 1_714_521_600_000  # 2024-05-01
_WEEK_MS = 7 * 86_400_000
_CATEGORIES = ("shoes", "socks", "hats", "coats", "bags", "belts", "shirts", "scarfs")
_NUM_ITEMS, _NUM_USERS = 150, 300


def sample_lines(
    num_requests: int, action: str = "click", second_action: str = "order", seed: int = 7
) -> Iterator[str]:
    """The log's lines, in time order, without line ends. `second_action` "" = users do nothing more."""
    draw = random.Random(seed)
    items: list[dict[str, Any]] = [
        {
            "item_id": f"item-{i}",
            "category": draw.choice(_CATEGORIES),
            "price": round(draw.lognormvariate(3.2, 0.7), 2),
        }
        for i in range(_NUM_ITEMS)
    ]
    prices: dict[str, float] = {item["item_id"]: item["price"] for item in items}
    appeal = {item["item_id"]: draw.gauss(0, 0.8) for item in items}
    tastes = {f"user-{u}": draw.sample(_CATEGORIES, 2) for u in range(_NUM_USERS)}
    lines: list[tuple[int, dict[str, object]]] = []
    for number in range(num_requests):
        time_ms = _START_MS + int(_WEEK_MS * (number + draw.random()) / num_requests)
        user = f"user-{min(int(draw.expovariate(0.012)), _NUM_USERS - 1)}"
        shown = draw.sample(items, draw.randint(6, 12))
        header = {"request_id": f"r-{number}", "user_id": user}
        basket = {"basket_value": round(draw.expovariate(0.05), 2)}
        lines.append(
            (time_ms, {"type": "impression", **header, "time": time_ms, "ro": basket, "candidates": shown})
        )
        for position, item in enumerate(shown):
            liking = 2.6 * (item["category"] in tastes[user]) - 0.5 * math.log(prices[item["item_id"]])
            chance = 1 / (1 + math.exp(1.6 - liking - appeal[item["item_id"]])) / (1 + 0.25 * position)
            if draw.random() >= chance:
                continue
            done = {"type": "engagement", **header, "item_id": item["item_id"]}
            click_ms = time_ms + 1000 + int(draw.expovariate(1 / 20_000))
            lines.append((click_ms, {**done, "action": action, "time": click_ms}))
            if draw.random() < 0.25:
                second_ms = click_ms + int(draw.expovariate(1 / 300_000))
                second = {"action": second_action, "time": second_ms, "value": item["price"]}
                lines.extend([(second_ms, {**done, **second})] if second_action else [])
    for _, line in sorted(lines, key=lambda pair: pair[0]):
        yield json.dumps(line)
