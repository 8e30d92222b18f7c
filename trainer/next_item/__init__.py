"""Next-item evaluation (`roostream next-item`): a sequence model on a complete log, in one process, apart
from live training.

    config.py       settings
    movielens.py    files of MovieLens-1M
    sequences.py    each user's items in order; windows for training and evaluation
    evaluation.py   rank of the next item among all unseen items
    training.py     epochs and their evaluations
"""
