"""A sequence model on a log that is whole: what does each user take next? Apart from live training, and of one process.

config.py            settings
movielens.py         the files of MovieLens-1M
user_sequences.py    items of each user in order; windows of them to learn from, and to be asked about
full_ranking.py      where the item that came next stands among all that were not seen before
next_item_run.py     epochs, and what is told of each
"""
