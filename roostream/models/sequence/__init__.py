"""Models of a request's history (ROO paper §3.3): history and targets in one jagged sequence.

Attention is causal, so one pass serves all candidates of a request.

    jagged_sequences.py   tokens: order, positions, times, attention mask
    hstu_attention.py     HSTU's attention: plain torch, and CPU kernels without padding
    hstu.py               HSTU's layers
    history_encoders.py   tokens of a history; encoders for the ranker and for the two towers
    sasrec.py             SASRec's layers
    next_item.py          next-item prediction at every entry of a history
"""
