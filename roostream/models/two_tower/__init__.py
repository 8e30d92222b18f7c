"""Two-tower models (ROO paper §3.1). The request tower runs once per request; item vectors do not depend on a
request, so they can be kept in an index.

    towers.py            the two towers
    retrieval.py         dot products, trained with a softmax over the batch's items
    sampled_softmax.py   that loss
    early_ranker.py      a small network over both vectors
    cascade.py           retrieval and a late ranker as one model
    item_index.py        item vectors as a file
"""
