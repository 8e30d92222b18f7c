"""Write shop.jsonl: a week of an invented shop, for the tutorials. The same seed gives the same file.

Each of 300 users likes two of eight categories and dislikes high prices. They click on what they like, more
often near the top of the list, and order some of it minutes later.

    python examples/shop/make_log.py 6000 > shop.jsonl
"""

from __future__ import annotations

import json
import math
import random
import sys

START_MS = 1_714_521_600_000  # 2024-05-01
WEEK_MS = 7 * 86_400_000
CATEGORIES = ("shoes", "socks", "hats", "coats", "bags", "belts", "shirts", "scarfs")


def main(num_requests: int, seed: int = 7) -> None:
    draw = random.Random(seed)
    items = [
        {
            "item_id": f"item-{i}",
            "category": draw.choice(CATEGORIES),
            "price": round(draw.lognormvariate(3.2, 0.7), 2),
        }
        for i in range(150)
    ]
    appeal = {item["item_id"]: draw.gauss(0, 0.8) for item in items}
    tastes = {f"user-{u}": draw.sample(CATEGORIES, 2) for u in range(300)}
    lines: list[tuple[int, dict]] = []
    for number in range(num_requests):
        time_ms = START_MS + int(WEEK_MS * (number + draw.random()) / num_requests)
        user = f"user-{min(int(draw.expovariate(0.012)), 299)}"
        shown = draw.sample(items, draw.randint(6, 12))
        request = {"request_id": f"r-{number}", "user_id": user}
        lines.append(
            (
                time_ms,
                {
                    "type": "impression",
                    **request,
                    "time": time_ms,
                    "ro": {"basket_value": round(draw.expovariate(0.05), 2)},
                    "candidates": shown,
                },
            )
        )
        for position, item in enumerate(shown):
            liking = 2.6 * (item["category"] in tastes[user]) - 0.5 * math.log(item["price"])
            chance = 1 / (1 + math.exp(1.6 - liking - appeal[item["item_id"]])) / (1 + 0.25 * position)
            if draw.random() < chance:
                click_ms = time_ms + 1000 + int(draw.expovariate(1 / 20_000))
                done = {"type": "engagement", **request, "item_id": item["item_id"]}
                lines.append((click_ms, {**done, "action": "click", "time": click_ms}))
                if draw.random() < 0.25:
                    order_ms = click_ms + int(draw.expovariate(1 / 300_000))
                    lines.append(
                        (order_ms, {**done, "action": "order", "time": order_ms, "value": item["price"]})
                    )
    for _, line in sorted(lines, key=lambda pair: pair[0]):
        print(json.dumps(line))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6000)
