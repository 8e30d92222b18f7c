"""What does it save to compute a request's side once for all its candidates?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving.batched"


def _request(candidates: int) -> Row:
    return Row(
        name=f"a request of {candidates} candidates",
        unit="requests",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("request's side once", f"{_HERE}:once", (candidates,)),
            Subject("repeated for each candidate", f"{_HERE}:repeated", (candidates,), "peer"),
        ),
    )


QUESTION = Question(
    name="serving-batch",
    asks="What does it save to compute a request's side once for all its candidates?",
    rows=tuple(_request(n) for n in (10, 50, 200, 1000)),
    means="""\
From a request's values to its logits: batch, look-up of keys, rows, forward pass. The other way is the same code and the same
kernel, given each candidate as a request of its own with a copy of the request's features, as where a format knows impressions
only; all of them go through one pass, so that it pays a pass's fixed cost once too. Logits are equal to 1e-5, which is checked
before a figure is taken; so the model is without attention over the list, and the schema without transforms within it.

The demo schema with histories of 50, the default ranker otherwise; HTTP, Redis, JSON and encoding left out, though they would be
repeated as well.""",
)
