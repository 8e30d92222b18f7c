"""The goodput benchmark with a kill every five minutes; takes half an hour."""

from benchmarks.goodput import MEANS, during
from benchmarks.harness.benchmark import Benchmark

BENCHMARK = Benchmark(
    name="goodput-5min",
    summary="What is trained with a kill every 5 minutes? (Takes half an hour.)",
    rows=(during(300.0),),
    rounds=1,
    interpretation=f"The target is 0.95 with a kill every 5 minutes.\n\n{MEANS}",
)
