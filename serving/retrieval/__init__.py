"""Which of all items a request should be ranked with: a two-tower's request vector against the items' vectors, kept fresh.

catalogue.py        which items there are, from a file; attributes.py: by what they are filtered
item_encoder.py     what an item's vector is made of
nearest_items.py    vectors that are searched while they are replaced; inverted_lists.py proposes where to look
changed_rows.py     whose rows are others than before; due_items.py: who waits since when
item_keeper.py      the thread that keeps all of it
retriever.py        a request → items; shortlist.py → what is ranked and shown
"""
