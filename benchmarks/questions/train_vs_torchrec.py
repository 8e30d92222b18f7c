"""What does the same DLRM train a second over the shards' rows, and over TorchRec's own?"""

from benchmarks.question import Question, Row, Subject

_STEPS = "benchmarks.workloads.dlrm.dlrm_steps"


def _row(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"batches of {requests * candidates} impressions, {candidates} of each request",
        unit="impressions",
        subjects=(
            Subject("our loop", f"{_STEPS}:our_loop", size),
            Subject("our step from decoded batches", f"{_STEPS}:our_batches", size, "stage"),
            Subject("TorchRec, from tensors", f"{_STEPS}:their_batches", size, "peer"),
        ),
    )


QUESTION = Question(
    name="train-vs-torchrec",
    asks="What does the same DLRM train a second over the shards' rows, and over TorchRec's own?",
    rows=(_row(2560, 1), _row(512, 5), _row(128, 20)),
    slice_s=0.5,
    rounds=5,
    means="""\
Both sides train TorchRec's `DLRM` (dense 64-16, over 128-64-2) from the same rows, weights, batches and Adagrad; a test holds
losses and rows of both to 1e-5. One thread each, in one process, in turns. The demo schema: two request-only lists of one id,
a history of 30, two ids a candidate, four tables of 100 001 rows of width 16, ids by a Zipf law.

**TorchRec** gets tensors that are there: a row an impression, a request's lists and floats repeated for its candidates. A step is
forward, backward with FBGEMM's fused exact Adagrad inside, and torch's fused Adam. Reading, decoding, copies and scores are not
in it. **Our step from decoded batches** looks the keys up, pulls rows from a shard in the same process, makes tensors, runs
forward and backward through `RemoteEmbeddingBagCollection`, Adam, and pushes. **Our loop** also decodes samples from bytes,
leaves out ids that it has seen, scores before it trains, counts metrics, clips, and makes a prediction message a request.

What is shared in a request is pooled once by us and for every impression there, so that our share grows with the candidates of a
request; at one candidate there is nothing to share. Rows live in the process that trains on both sides: nothing is said here of
shards behind a network, nor of TorchRec on several devices.""",
)
