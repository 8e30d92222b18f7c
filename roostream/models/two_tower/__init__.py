"""Models in which request and item meet late (ROO paper §3.1).

The request's side runs once a request; an item's vector needs no request, so that it can be kept in an index.

    towers.py            the two sides
    retrieval.py         dot products; learned by a softmax over the batch's items
    sampled_softmax.py   that loss
    early_ranker.py      a small network over both vectors
    item_index.py        the items' vectors as a file
"""
