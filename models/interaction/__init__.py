"""How the features of a candidate meet each other: a layer over a row's columns, never over rows.

cross_net.py   DCNv2's cross network
dhen.py        ensembles of interactions on top of each other
"""
