"""Retrieval: finds the catalogue items whose two-tower vectors are nearest to the request's vector.

catalogue.py        the items and their attributes, read from a file
item_vectors.py     builds the items' vectors and updates them when rows, versions or the catalogue change
nearest_items.py    search over vectors while they are replaced, exact or with an IVF index
retriever.py        a request → its nearest items → the list that is ranked and shown
"""
