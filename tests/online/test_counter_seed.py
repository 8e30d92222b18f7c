"""`seed` loads many clicks into the counters at once. The result equals that of single clicks."""

from __future__ import annotations

import numpy as np

from roostream.online.counter_seed import seed
from roostream.online.counters import Counters
from roostream.schema.schema_file import schema_from_dict

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [
            {
                "name": "past",
                "kind": "sequence",
                "table": "item",
                "columns": {"time": "time_ms"},
                "online": "history",
            }
        ],
        "nro": [{"online": "clicks_24h"}],
        "label": [{"name": "click", "action": "click"}],
    }
)


def test_seeding_in_bulk_equals_single_clicks() -> None:
    rng = np.random.default_rng(0)
    n = 3000
    users_N, items_N = rng.integers(1, 12, n), rng.integers(1, 60, n)
    times_N = T0 + np.sort(rng.integers(0, 40_000_000, n) // 1000 * 1000)
    users_N[1::50] = users_N[::50]
    items_N[1::50] = items_N[::50]
    times_N[1::50] = times_N[::50]  # the same click again
    bulk, single = Counters(SCHEMA), Counters(SCHEMA)
    seed(bulk, users_N, items_N, times_N)
    for user, item, time_ms in zip(users_N.tolist(), items_N.tolist(), times_N.tolist(), strict=True):
        single.apply_engagement(user, item, "click", 1.0, time_ms)
    everything = np.arange(70)
    states = {"item": everything[1:60], "user": np.arange(1, 12)}
    assert bulk.dump(states) == single.dump(states)
    for user in range(1, 12):
        (ro_a, nro_a), (ro_b, nro_b) = (c.read(user, everything, T0 + 50_000_000) for c in (bulk, single))
        assert ro_a == ro_b
        for name in nro_a:
            assert np.array_equal(nro_a[name], nro_b[name], equal_nan=True), name
