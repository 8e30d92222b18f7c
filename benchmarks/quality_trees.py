"""Is the default model as good as boosted trees on the same floats?

Replays the first requests of several logs in one pass, each request scored before it is trained. The trees
(LightGBM) are fitted again to all requests so far whenever there are half as many more.
"""

from __future__ import annotations

from benchmarks.common.dataset_paths import absent
from benchmarks.common.first_logs import LOGS
from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject

_MAX_REQUESTS = 10_000
_BOTH = "benchmarks.quality_early:learned"

BENCHMARK = Benchmark(
    name="quality-trees",
    summary="Is the default model as good as boosted trees on the same floats?",
    rows=tuple(
        Row(
            name=f"up to {_MAX_REQUESTS:,} requests of {name}, a seed a run",
            unit="requests",
            shows="cost",
            time="CPU time of replay and baselines",
            subjects=(Subject("default model and trees", _BOTH, (name, _MAX_REQUESTS, RUN, True)),),
            skipped=absent(log.folder) if log.folder else "",
        )
        for name, log in LOGS.items()
    ),
    slice_s=0.0,
    rounds=1,
    interpretation="""\
As in quality-early, with boosted trees (LightGBM, 15 leaves, rate 0.05). They are fitted to all requests so
far whenever there are half as many more, and the newest 15 % of these choose the number of trees. They see
the floats of candidate and request that the model sees too, and the length of the list, but no ids and no
histories. "difference to trees" is the mean difference of the model to them, request by request, "± to trees"
half of its 95 % interval in one run. Higher is better for request AUC, lower for NE. The cost is that of the
replay alone.""",
)
