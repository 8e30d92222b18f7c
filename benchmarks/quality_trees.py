"""Is the default model as good as boosted trees on the same floats?

Replays the first requests of several logs in one pass, each request scored before it is trained. The trees
(LightGBM) are fitted again to all requests so far whenever there are half as many more.
"""

from __future__ import annotations

from benchmarks.harness.benchmark import Benchmark
from benchmarks.quality_early import rows_by_log

BENCHMARK = Benchmark(
    name="quality-trees",
    summary="Is the default model as good as boosted trees on the same floats?",
    rows=rows_by_log(10_000, "default model and trees", True),
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
