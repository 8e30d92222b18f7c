"""Embedding rows: where they live (`server`, `table`, `segments`), how they change (`rules`), how they get out (`publish`).

The trainer imports `param_server.client` only, serving `param_server.replica` (a room). No torch here.
"""
