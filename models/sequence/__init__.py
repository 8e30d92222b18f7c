"""Models of a request's history in time (ROO paper §3.3): history and targets in one jagged sequence.

jagged_targets.py        which token is whose: order, positions, times, who may look at whom
pointwise_attention.py   HSTU's attention, in plain torch
hstu.py                  HSTU's layers
hstu_part.py             a ranker's part: each candidate's output at the end of its request's history
"""
