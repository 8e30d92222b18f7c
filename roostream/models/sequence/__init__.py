"""Models of a request's history in time (ROO paper §3.3): history and targets in one jagged sequence.

Nobody in it looks at what is behind him, so one pass serves all candidates of a request.

    jagged_targets.py        which token is whose: order, positions, times, who may look at whom
    pointwise_attention.py   HSTU's attention, in plain torch
    attention_in_place.py    the same on a CPU, without padding, for who has no times
    hstu.py                  HSTU's layers
    history_tokens.py        entries as tokens
    hstu_part.py             a ranker's part: each candidate's output at the end of its request's history
    history_encoder.py       a history as one vector
    causal_transformer.py    SASRec's layers: softmax attention over a history
    next_item.py             what comes next, learned at every entry of a history
"""
