"""How the features of a candidate meet each other: layers over a row's columns.

They never mix rows: a row's result does not depend on the others.

    cross_net.py   DCNv2's cross network
    dhen.py        ensembles of interactions on top of each other
"""
