"""What does it save to train on requests and not on impressions?"""

import functools
from typing import Literal

from benchmarks.question import Question, Row, Subject
from benchmarks.workloads.sharing.bound import derived, of_history
from benchmarks.workloads.sharing.shared_data import EBNERD, MIND, absent

_TRAINED = "benchmarks.workloads.sharing.training:trained"
_LAYER = "benchmarks.workloads.sharing.long_history:layer"
_IMPRESSIONS, _BATCHES = 640, 4
_LONG = (1000, 10, 256)  # entries of a history, targets, width


def _row(architecture: str, of: str | int, named: str, skipped: str = "") -> Row:
    def subject(name: str, form: str, role: Literal["ours", "stage", "peer"]) -> Subject:
        return Subject(name, _TRAINED, (architecture, form, of, _IMPRESSIONS, _BATCHES), role)

    subjects = [
        subject("requests", "requests", "ours"),
        subject("adapter", "adapter", "peer"),
        subject("impressions", "impressions", "peer"),
        subject("RecD", "recd", "peer"),
    ]
    if of != 1:  # a request of one candidate has nothing to share
        subjects += [subject(name, name, "stage") for name in ("first of each", "one impression")]
    return Row(
        name=f"{architecture}, {named}",
        unit="impressions",
        clock="cpu",
        subjects=tuple(subjects),
        derives=derived,
        skipped=skipped,
    )


def _rows(architecture: str) -> list[Row]:
    made_up = [
        _row(architecture, k, f"{k} {'candidate' if k == 1 else 'candidates'} a request")
        for k in (1, 2, 5, 10, 20)
    ]
    return [
        *made_up,
        _row(architecture, "EB-NeRD", "EB-NeRD", absent(EBNERD)),
        _row(architecture, "MIND", "MIND", absent(MIND)),
    ]


QUESTION = Question(
    name="roo-vs-expanded",
    asks="What does it save to train on requests instead of impressions?",
    rows=(
        *(row for architecture in ("retrieval", "early", "late") for row in _rows(architecture)),
        _row("late with HSTU", 5, "5 candidates a request"),
        Row(
            name="a layer of HSTU: 1000 entries, 10 targets, width 256",
            unit="impressions",
            clock="cpu",
            subjects=(
                Subject("requests", _LAYER, (True, *_LONG)),
                Subject("a target at a time", _LAYER, (False, *_LONG), "peer"),
            ),
            derives=functools.partial(of_history, *_LONG),
        ),
    ),
    slice_s=0.15,
    rounds=3,
    means="""\
requests: whole requests, what they share is computed once for each. adapter: the same samples, made impressions and cut into
batches again in the step (ROO paper, 2.1.3). impressions: they arrive as impressions, in random order; that they had to be made
costs nothing. RecD: they arrive as impressions, those of a request next to each other; equal neighbours are found and made
deduplicated tensors with inverse indices in the step. All train the same impressions, about 640 a batch, with equal logits and
gradients (tests). Candidates don't see each other here: impressions could be trained so only with their whole list in each.

A step is look-up, pull, tensors, forward, loss, backward, dense step and push, on decoded batches, with a shard in the same
process and one thread; decoding, predictions and metrics are left out. Kinds of models are as by default, both towers and the
last with HSTU; "late" has the request's tower, UserArch and target attention. Made-up requests have 20 features with a history
of 50 and candidates 8; the logs are the first 2 560 impressions of each, histories cut at 50. "A request" are impressions for
each row of request-only features that is trained. Bytes and FLOPs are an impression's, and counted: bytes that arrive are those
of decoded arrays, rows those that are pulled (as many gradients go back); FLOPs are those of matrix products, both ways.

a is what a request's side costs, b a candidate's, c a step without both, from steps on the same requests whole, on 160 with their
first candidate alone, and on a single impression. K(a+b)/(a+Kb) is the most that sharing can give: it doesn't know c, which every
form pays once a batch, and which is much of a step where lists are long, since 640 impressions are few requests then. "Of the
bound" is the measured ratio over it.

RecD gets more than its paper describes (there floats, and the layers above lists, run for each impression), so that what is left
between it and requests is the search for duplicates and what arrives. The ROO paper, at 4 to 7 impressions a request, on GPUs:
retrieval 1.48 to 6.7 times as fast as impressions, early-stage 2.25 to 3.66, late-stage 1.32 to 2.0; against RecD 1.5
(early-stage) and 1.1 (late-stage, where the one trained on requests was another model).

HSTU with 1000 entries and 10 targets: the paper's formula, m (n² d + n d²) over (n + m)² d + (n + m) d², has one product of
tokens and one matrix, and gives 9.82. A layer has two products of tokens and five matrices, and the sequence of an impression
holds its target, n + 1 tokens: 9.86 is counted.""",
)
