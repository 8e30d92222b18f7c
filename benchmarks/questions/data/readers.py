"""What do readers as programs give, and does training wait where they are slow?"""

import os

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.warehouse.reader_fleet"
_LARGE, _SMALL = (24, 16_384), (48, 2_048)  # files, and requests in each
_PACE, _SHARE, _SECONDS = 2_000.0, 0.44, (20.0, 20.0)
_CORES = os.cpu_count() or 1


def _programs(count: int) -> Subject:
    return Subject(f"{count} reader program{'s' if count > 1 else ''}", f"{_HERE}:read", (count, *_LARGE))


_ALONE = Subject("the worker reads for itself", f"{_HERE}:read", (0, *_LARGE), "peer")


def _starved(name: str, most: int, role: str) -> Subject:
    return Subject(name, f"{_HERE}:starved", (most, _SHARE, _PACE, _SECONDS, *_SMALL), role)  # type: ignore[arg-type]


QUESTION = Question(
    name="readers",
    asks="What do readers as programs give, and does training wait where they are slow?",
    rows=(
        Row(
            name="a session of 393,216 requests of 20 candidates, to a trainer that only counts",
            unit="requests",
            subjects=(_programs(2), _programs(1), _ALONE),
            time="of the second half",
        ),
        Row(
            name="the same by more readers",
            unit="requests",
            subjects=(_programs(4), _programs(8), _ALONE),
            time="of the second half",
            skipped=""
            if _CORES >= 10
            else f"expected 10 cores, for 8 readers and who is read for; this machine has {_CORES}",
        ),
        Row(
            name="readers that each bear 44 % of what training takes",
            unit="requests",
            subjects=(
                _starved("as many as the rule wishes for, up to 6", 6, "ours"),
                _starved("one reader", 1, "peer"),
                _starved("the worker reads for itself, not slowed", 0, "limit"),
            ),
            time="of 20 s behind the first 20",
        ),
    ),
    rounds=1,
    means="""\
The demo's schema; sealed files, every bit of every batch compared with what one process reads, in order. The first row's
trainer does nothing, so it is about how fast rows come. A worker that reads for itself does so in the thread of its source,
with nothing beside it; readers take cores of their own, and what they give is received, copied and put in order: on two cores
two readers and who is read for are three. The third row's trainer takes 2,000 requests a second by waiting, and each reader
gives 880 by a declared delay (`max_requests_s`): one keeps training waiting for 56 % of its time. Real processes, started
and ended by the rule of docs/decisions/0073; `waited until then` contains their start.""",
)
